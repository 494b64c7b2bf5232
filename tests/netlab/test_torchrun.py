"""torchrun over the lab: worlds across hosts, reports of failures, and the command line.

Starting torch takes seconds, so few tests start much.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from paceline.errors import HostFailed
from paceline.testing.netlab import Lab

pytestmark = pytest.mark.timeout(300)

ALL_REDUCE = """
import json, os, socket, sys
import torch, torch.distributed as dist
import paceline

world = paceline.init(backend="gloo", timeout=120.0)
values = torch.full((250_000,), world.rank + 1.0)
dist.all_reduce(values)
facts = {name: os.environ[name] for name in ("GROUP_RANK", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")}
facts |= vars(world) | {"sum": values.unique().tolist(), "hostname": socket.gethostname(), "words": sys.argv[1:]}
os.write(1, (json.dumps(facts) + "\\n").encode())  # one write, so that ranks of a host do not mix their lines
paceline.shutdown()
"""

# A world of its own would cost seconds of importing torch: torchrun's ranks alone are enough to fail.
FAILS = """
import os, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
if os.environ["RANK"] == "3":
    time.sleep(0.5)
    raise ValueError("a bad batch")
time.sleep(1000)
"""


def command(*arguments, **options):
    """Run `paceline lab` as a user does."""
    env = os.environ | {"COLUMNS": "200", "NO_COLOR": "1"}
    line = [sys.executable, "-m", "paceline", "lab", *map(str, arguments)]
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=240, **options)


@pytest.mark.thorough
def test_a_world_across_hosts(tmp_path):
    script = tmp_path / "all_reduce.py"
    script.write_text(ALL_REDUCE)
    with Lab(hosts=2, rate="200Mbit/s") as lab:
        results = lab.torchrun([str(script), "--size", "tiny"], ranks_per_host=2, timeout=240)
        traffic = lab.bytes(0), lab.bytes(1)
    reports = sorted(
        (json.loads(line) for one in results for line in one.stdout.splitlines()), key=lambda one: one["rank"]
    )
    assert [one["rank"] for one in reports] == [0, 1, 2, 3]
    assert [one["node"] for one in reports] == [0, 0, 1, 1]
    assert [one["GROUP_RANK"] for one in reports] == ["0", "0", "1", "1"]
    assert [one["local_rank"] for one in reports] == [0, 1, 0, 1]
    assert [one["hostname"] for one in reports] == ["host0", "host0", "host1", "host1"]
    for one in reports:
        assert (one["nodes"], one["local_size"], one["size"], one["backend"]) == (2, 2, 4, "gloo")
        assert one["sum"] == [10.0]
        assert one["words"] == ["--size", "tiny"]
        assert (one["OMP_NUM_THREADS"], one["GLOO_SOCKET_IFNAME"]) == ("1", "eth0")
    # a ring of four sends 2 · 3/4 of a million bytes over each link
    assert all(1_400_000 < one.sent < 4_000_000 for one in traffic)


@pytest.mark.thorough
def test_a_failing_rank_names_its_host(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    with Lab(hosts=2) as lab, pytest.raises(HostFailed) as caught:
        lab.torchrun([str(script)], ranks_per_host=2, timeout=240)
    assert caught.value.host == 1
    message = str(caught.value)
    assert message.startswith("host1 ended with exit code 1")
    assert "ValueError: a bad batch" in message
    assert "failed (exitcode: 1) local_rank: 1" in message
    assert "ChildFailedError" not in message  # torchrun's own traceback


@pytest.mark.thorough
def test_the_command_counts_and_writes_down(tmp_path):
    script = tmp_path / "all_reduce.py"
    script.write_text(ALL_REDUCE)
    result = command(
        "--nnodes", 2, "--link", "200Mbit/s", "--json", tmp_path / "lab.json", script, "--json", "x"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("2 hosts; 1 rank each; links 200 Mbit/s\n")
    lines = re.findall(r"^host([01]) \| (\{.*\})$", result.stdout, re.MULTILINE)
    assert sorted((host, json.loads(line)["words"]) for host, line in lines) == [
        (host, ["--json", "x"]) for host in "01"
    ]
    assert re.search(r"^host1 +200 Mbit/s +\S+ \S?i?B ", result.stdout, re.MULTILINE)
    record = json.loads((tmp_path / "lab.json").read_text())
    assert (record["kind"], record["ended_well"], record["ranks_per_host"]) == ("lab", True, 1)
    assert [host["name"] for host in record["hosts"]] == ["host0", "host1"]
    assert all(host["sent"] > 900_000 and host["rate"] == 25e6 for host in record["hosts"])
    assert all(0 < host["busiest"] < 1.2 * 25e6 for host in record["hosts"])


def test_the_command_runs_any_program_once_on_each_host(tmp_path):
    result = command(
        "--nnodes",
        3,
        "--slow",
        "host2=10Mbit/s",
        "--nproc-per-node",
        0,
        "--",
        "sh",
        "-c",
        "hostname; pwd",
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert "3 hosts; the program once on each; links unlimited, host2 10 Mbit/s" in result.stdout
    for host in range(3):
        lines = [line for line in result.stdout.splitlines() if line.startswith(f"host{host} |")]
        assert lines == [f"host{host} | host{host}", f"host{host} | {tmp_path}"]


def test_the_command_reports_a_failure_once(tmp_path):
    result = command(
        "--nnodes",
        2,
        "--nproc-per-node",
        0,
        "--json",
        tmp_path / "lab.json",
        "sh",
        "-c",
        "echo broken >&2; exit 3",
    )
    assert result.returncode == 1
    assert result.stdout.count("| broken") == 2
    assert "Error: host" in result.stderr
    assert "ended with exit code 3" in result.stderr
    assert "broken" not in result.stderr
    assert json.loads((tmp_path / "lab.json").read_text())["ended_well"] is False


def test_the_command_ends_programs_that_take_too_long():
    result = command("--timeout", "500ms", "--nproc-per-node", 0, "sleep", 1000)
    assert result.returncode == 1
    assert "not finished within 0.5 s: still running on host0, host1" in result.stderr


def test_ctrl_c_leaves_cleanly(tmp_path):
    line = "trap 'echo tidy; exit' TERM; echo ready; while :; do sleep 0.05; done"
    words = [sys.executable, "-m", "paceline", "lab", "--nproc-per-node", "0", "sh", "-c", line]
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    seen = ""
    while seen.count("ready\n") < 2:
        seen += process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out.count("tidy") == 2
    assert "Traceback" not in err
    assert re.search(r"^host1 +unlimited", out, re.MULTILINE)
