"""Elastic runs across hosts: any host may be lost and return, except the one that serves the rendezvous.

Starting torch takes seconds, so few tests start much.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from paceline.testing.netlab import Lab

pytestmark = pytest.mark.timeout(300)

# A rank writes a line per step. All end at the same step once there are three again and a file requests it.
STEPS = """
import json, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import paceline

folder = Path(sys.argv[1])
world = paceline.init(timeout=60.0)
while True:
    both = torch.tensor([world.rank + 1.0, float(world.size == 3 and (folder / "enough").exists())])
    dist.all_reduce(both)
    with open(folder / f"steps-{os.uname().nodename}", "a") as file:
        life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        print(json.dumps([life, world.rank, world.size, world.nodes, int(both[0])]), file=file)
    if both[1]:
        break
    time.sleep(0.05)
paceline.shutdown()
"""

# Without torch: these ranks only start, and report their parent.
SLEEPS = """
import os, sys, time
from pathlib import Path
note = Path(sys.argv[1], os.uname().nodename)
note.with_suffix(".part").write_text(str(os.getppid()))
note.with_suffix(".part").rename(note)
time.sleep(600)
"""


def follow(lab, folder, *jobs):
    """Return a function that waits until a rank on `host` has made a step in a world of `size`."""

    def reach(host, size, restart=0):
        deadline = time.monotonic() + 120
        path = Path(folder, f"steps-host{host}")
        while True:
            lines = path.read_text().splitlines() if path.exists() else []
            steps = [json.loads(line) for line in lines if line.endswith("]")]
            if steps and steps[-1][2] == size and steps[-1][0] >= restart:
                assert steps[-1][3:] == [
                    size,
                    size * (size + 1) // 2,
                ]  # a rank each; the sum over all of them
                return steps[-1][0]
            output = [line for job in jobs for line in job.lines()]
            assert time.monotonic() < deadline, output
            time.sleep(0.05)

    return reach


@pytest.mark.thorough
def test_the_host_of_rank_0_is_lost_and_returns(tmp_path):
    script = tmp_path / "steps.py"
    script.write_text(STEPS)
    run = ["paceline", "run", "--nnodes", "3", "--min-ranks", "2", "--rendezvous", "host3:29400"]
    run += ["--log-dir", str(tmp_path / "logs"), str(script), str(tmp_path)]
    with Lab(hosts=4) as lab:
        server = lab.start(["paceline", "run", "--serve", "host3"], on=3)
        first = lab.start(run, on=[0, 1, 2])
        reach = follow(lab, tmp_path, server, first)
        for host in range(3):
            reach(host, 3)
        lab.kill(0)
        restarts = [reach(host, 2) for host in (1, 2)]
        back = lab.start(run, on=0)
        assert [reach(host, 3, restart=2) for host in range(3)] == [2, 2, 2]
        (tmp_path / "enough").write_text("")
        [again] = back.wait(timeout=60)
        lost, *others = first.wait(timeout=60, check=False)
        assert server.running() == [3]
        server.end()
    assert restarts == [1, 1]
    assert (lost.code, again.code, [one.code for one in others]) == (-9, 0, [0, 0])
    for stderr in (others[0].stderr, others[1].stderr):
        assert "paceline: restart 1: host0 was lost after" in stderr
        assert "; 3 → 2 ranks on 2 hosts" in stderr
        assert "paceline: restart 2: host0 joined; 2 → 3 ranks on 3 hosts" in stderr
    records = [json.loads(line) for line in (tmp_path / "logs" / "restarts.jsonl").read_text().splitlines()]
    by_host = {(one["written_by"], one["restart"]): one for one in records}
    assert sorted(by_host) == [("host0", 2), ("host1", 1), ("host1", 2), ("host2", 1), ("host2", 2)]
    for host in ("host1", "host2"):
        assert (by_host[host, 1]["first"]["host"], by_host[host, 1]["first"]["rank"]) == ("host0", None)
        assert {one["host"] for one in by_host[host, 1]["after"]} <= {"host1", "host2"}


@pytest.mark.thorough
def test_the_host_of_the_rendezvous_is_lost_and_a_host_is_interrupted(tmp_path):
    script = tmp_path / "sleeps.py"
    script.write_text(SLEEPS)
    run = ["paceline", "run", "--nnodes", "2", "--rendezvous", "host0:29400", str(script), str(tmp_path)]
    here = [tmp_path / "host0", tmp_path / "host1"]
    with Lab(hosts=2) as lab:
        job = lab.start(run, env={"TMPDIR": str(tmp_path)})  # a killed command leaves its logs there
        _appear(here)
        lab.kill(0)
        served, other = job.wait(timeout=120, check=False)
        assert (served.code, other.code) == (-9, 1)
        assert "Error: the rendezvous at host0:29400 was lost" in other.stderr
        assert "paceline run --serve" in other.stderr

        for path in here:
            path.unlink()
        job = lab.start(run)
        _appear(here)
        lab.run(f"kill -INT {here[1].read_text()}", on=1)
        result, interrupted = job.wait(timeout=120, check=False)
        assert (result.code, interrupted.code) == (130, 130)
        assert "Error: interrupted on host1" in result.stderr


def _appear(paths):
    deadline = time.monotonic() + 120
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.05)
