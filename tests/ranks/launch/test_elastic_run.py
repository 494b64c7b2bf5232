"""Elastic runs on one host: restarts, world sizes, reported reasons, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

import paceline
from paceline._core.job_key import JobKey
from paceline._core.processes.warning_signals import WarningSignals
from paceline.errors import RankFailed, UsageError, WorldError
from paceline.launch.agent.elastic_agent import ElasticAgent, run_host
from paceline.launch.agent.elastic_run import run_elastic, run_job
from paceline.launch.agent.job_server import serve_jobs
from paceline.launch.agent.job_spec import JobSpec, JobTimeouts
from paceline.launch.agent.rendezvous_address import RendezvousAddress, free_port
from paceline.launch.agent.restart_policy import JobEnded, JobOutcome
from paceline.launch.process.rank_output import RankLogs
from paceline.world.store import request_client
from paceline.world.store.request_client import Connection

SOURCE = str(Path(paceline.__file__).parents[1])

WORLDS = """
import os, signal, sys, torch
import torch.distributed as dist
import paceline

life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
world = paceline.init(timeout=60.0)
total = torch.tensor([world.rank + 1.0])
dist.all_reduce(total)
print(life, world.rank, world.size, world.local_size, int(total), flush=True)
if world.rank == 1 and life == 0:
    raise ValueError("a bad batch")
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if world.size > 1:
    dist.all_reduce(total)
paceline.shutdown()
"""

# Without torch: ranks that only start and end take a moment.
PLAIN = """
import os, signal, sys, time
from pathlib import Path
rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
notes = Path(os.environ["NOTES"])
def wait_for(name):
    while not (notes / name).exists():
        time.sleep(0.01)
def note(name):
    (notes / f"{name}.part").write_text(str(os.getpid()))
    (notes / f"{name}.part").rename(notes / name)
"""

IGNORES_SIGTERM = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("out", life, flush=True)
print("err", life, file=sys.stderr, flush=True)
note(f"here{rank}-{life}")
wait_for(f"here{1 - rank}-{life}")
if rank == 1:
    print(os.environ["WORLD_SIZE"], "PACELINE_INIT_METHOD" in os.environ)
    sys.exit(5)
time.sleep(600)
"""

# Rank 2 fails, and takes a while to end; rank 0 notices that and has ended before it; rank 1 continues.
FOLLOWS = """
def ended(name):
    return Path("/proc", (notes / name).read_text(), "stat").read_text().rpartition(")")[2].split()[0] == "Z"
if rank == 0:
    wait_for("failed")
    note("noticed")
    sys.exit("RuntimeError: Connection closed by peer")
if rank == 2:
    note("failed")
    wait_for("noticed")
    while not ended("noticed"):
        time.sleep(0.01)
    sys.exit("KeyError: 7")
time.sleep(600)
"""

SLEEPS = """
note(f"here{rank}")
time.sleep(600)
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder for notes, and one for temporary files, where nothing may stay."""
    for name in ("tmp", "notes"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PACELINE_INIT_METHOD", "file:///of/an/outer/launcher")
    return tmp_path


def script(home, text):
    path = home / "script.py"
    path.write_text(text)
    return [str(path)]


def restarts(folder):
    return [json.loads(line) for line in (folder / "restarts.jsonl").read_text().splitlines()]


def wait_until(reached):
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def assert_gone(home, names):
    for name in names:
        process = int((home / "notes" / name).read_text())
        wait_until(
            lambda process=process: (
                not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE
            )
        )


@pytest.mark.thorough
def test_worlds_form_again_at_the_same_and_a_smaller_size(home, capfd):
    calls = []
    logs = home / "logs"
    run_elastic(script(home, WORLDS), 2, log_dir=logs, min_ranks=1, progress=lambda: bool(calls.append(0)))
    shown = capfd.readouterr()
    assert shown.out.splitlines() == ["0 0 2 2 3", "1 0 2 2 3", "2 0 1 1 1"]
    assert (logs / "rank1.log").read_text().startswith("0 1 2 2 3\n")
    assert (logs / "restart1" / "rank1.log").read_text() == "1 1 2 2 3\n"
    assert not (logs / "restart2").exists()
    messages = [line for line in shown.err.splitlines() if line.startswith("paceline: ")]
    assert [line.partition(" after ")[0] for line in messages] == [
        f"paceline: restart 1: rank 1 on {os.uname().nodename} ended with exit code 1",
        f"paceline: restart 2: rank 1 on {os.uname().nodename} was ended by SIGKILL",
    ]
    assert messages[0].endswith("(ValueError: a bad batch); 2 → 2 ranks")
    assert messages[1].endswith("the same rank failed 2 times in a row without progress; 2 → 1 rank")
    records = restarts(logs)
    assert [(one["restart"], one["action"], one["ranks_before"], one["ranks_after"]) for one in records] == [
        (1, "same", 2, 2),
        (2, "fewer", 2, 1),
    ]
    assert [(one["first"]["rank"], one["first"]["exit_code"]) for one in records] == [(1, 1), (1, -9)]
    assert records[0]["first"]["lines"][-1].endswith("ValueError: a bad batch")
    assert len(calls) == 2
    assert list((home / "tmp").iterdir()) == []


@pytest.mark.thorough
def test_progress_keeps_the_size_until_restarts_are_used_up(home, capfd):
    timeouts = JobTimeouts(end=0.2)
    job = JobSpec(
        script(home, PLAIN + IGNORES_SIGTERM), 2, 1, max_restarts=2, progress=lambda: True, timeouts=timeouts
    )
    with pytest.raises(RankFailed, match=r"\[rank 1\] ended with exit code 5 after") as caught:
        run_job(job)
    assert (caught.value.rank, caught.value.exit_code) == (1, 5)
    assert "restarted 2 times already" in str(caught.value)
    assert "rank 1 | err 2\n  rank 1 | 2 False\n" in str(caught.value)
    shown = capfd.readouterr()
    assert shown.out == "out 0\nout 1\nout 2\n"
    assert [line for line in shown.err.splitlines() if "restart" not in line] == ["err 0", "err 1", "err 2"]
    assert shown.err.count("; 2 → 2 ranks\n") == 2
    assert_gone(home, [f"here{rank}-{restart}" for rank in range(2) for restart in range(3)])
    assert list((home / "tmp").iterdir()) == []


@pytest.mark.thorough
def test_later_failures_are_listed_after_the_first(home):
    timeouts = JobTimeouts(follow=60.0)
    job = JobSpec(
        script(home, PLAIN + FOLLOWS), 3, 3, max_restarts=0, log_dir=home / "logs", timeouts=timeouts
    )
    with pytest.raises(RankFailed) as caught:
        run_job(job)
    message = str(caught.value)
    assert message.startswith("[rank 2] ended with exit code 1 after")
    assert "after it rank 0 (ended with exit code 1); restarts are disabled" in message
    [record] = restarts(home / "logs")
    assert (record["event"], record["action"], record["ranks_after"]) == ("end", "end", 0)
    assert (record["first"]["lines"], record["after"][0]["lines"]) == (
        ["KeyError: 7"],
        ["RuntimeError: Connection closed by peer"],
    )


def signalled(fork, folder, words, notes, number):
    """Run `words` as a command line, send it a signal once two ranks are there, and return its exit code."""
    child = fork(command, words, notes)
    wait_until(lambda: all(Path(notes, f"here{rank}").exists() for rank in range(2)))
    child.kill(number)
    return child.wait()


def command(send, words, notes):
    os.environ |= {"NOTES": notes, "PYTHONPATH": SOURCE}
    tempfile.tempdir = str(Path(notes).with_name("tmp"))  # a killed command leaves its logs there
    sys.argv = ["paceline", *words]
    from paceline.tools.cli.app import main

    main()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_signal_ends_all(home, killable, number, code):
    words = ["run", "--nproc-per-node", "2", *script(home, PLAIN + SLEEPS)]
    assert killable.run_ranks(signalled, words, str(home / "notes"), number) == code
    assert_gone(home, ["here0", "here1"])


@pytest.mark.parametrize("other", ["silent", "another key", "no key"])
def test_another_service_at_the_rendezvous_address_is_reported(other, capfd, monkeypatch):
    monkeypatch.setattr(request_client, "_CONNECT_SECONDS", 1.0)
    monkeypatch.setattr(Connection.__init__, "__defaults__", (1.0,))
    with contextlib.ExitStack() as stack:
        if other == "silent":
            foreign = stack.enter_context(socket.socket())
            foreign.bind(("127.0.0.1", 0))
            foreign.listen()
            port = foreign.getsockname()[1]
        else:
            key = JobKey.generate() if other == "another key" else None
            server = serve_jobs(RendezvousAddress("127.0.0.1", free_port()), key)
            stack.callback(server.close)
            port = server.port
        address = RendezvousAddress("127.0.0.1", port)
        job = JobSpec(["train.py"], 1, 2, hosts=2, address=address)
        with pytest.raises(WorldError, match=f"the server at {address} is not a rendezvous of this job: it"):
            run_host(job, RankLogs(None), JobKey.generate(), WarningSignals(signal.raise_signal))
    assert capfd.readouterr().err == ""


def test_a_surplus_host_is_notified_that_the_job_succeeded(monkeypatch, capfd):
    def over(self):
        raise JobEnded(JobOutcome(0))

    monkeypatch.setattr(ElasticAgent, "run", over)
    run_host(JobSpec(["train.py"], 1, 1), RankLogs(None), None, WarningSignals(signal.raise_signal))
    lines = capfd.readouterr().err.splitlines()
    assert lines == ["paceline: the job ended well while this host waited to join"]


def test_two_servers_at_one_port_are_refused_without_a_traceback():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match="Address already in use"):
            serve_jobs(RendezvousAddress("127.0.0.1", taken.getsockname()[1]), None)
