"""The lab's requirements, torchrun's command lines, and interface counters. Nothing is run."""

from __future__ import annotations

import os
import sys

import pytest

from paceline.errors import UsageError
from paceline.testing.netlab import lab_requirements
from paceline.testing.netlab.lab_job import is_torchrun_failure, lab_torchrun_command, strip_torchrun_report
from paceline.testing.netlab.lab_network import InterfaceBytes, parse_traffic
from paceline.testing.netlab.lab_requirements import (
    check_lab_program,
    is_python,
    missing_facility,
    search_path,
)

ALL = (1 << 41) - 1


def test_a_complete_machine_lacks_nothing():
    assert missing_facility("linux", [], ALL) is None
    assert missing_facility("linux", [], 1 << 12 | 1 << 21) is None


@pytest.mark.parametrize(
    ("facts", "parts"),
    [
        (("darwin", ["ip"], 0), ["needs Linux; this is darwin"]),
        (("linux", ["tc", "ip"], ALL), ["needs tc, ip: not found", "install the package iproute2 (apt-get"]),
        (("linux", ["unshare", "ip"], ALL), ["install the package iproute2 util-linux"]),
        (
            ("linux", [], 0),
            ["lacks CAP_NET_ADMIN and CAP_SYS_ADMIN", "sudo", "unshare --user", "--privileged"],
        ),
        (("linux", [], ALL & ~(1 << 21)), ["lacks CAP_SYS_ADMIN\n"]),
        (("linux", [], ALL & ~(1 << 12)), ["lacks CAP_NET_ADMIN\n"]),
    ],
)
def test_a_missing_requirement_is_named_with_a_remedy(facts, parts):
    problem = missing_facility(*facts)
    assert isinstance(problem, UsageError)
    for part in parts:
        assert part in str(problem)


def test_tools_are_looked_for_where_administrators_have_them(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert lab_requirements.tool_path("sh") == "sh"  # not found: its name, for the message
    paths = []
    monkeypatch.setattr(lab_requirements.shutil, "which", lambda name, path: paths.append(path.split(":")))
    lab_requirements.tool_path("tc")
    assert paths == [["/nowhere", "/usr/sbin", "/sbin"]]


def test_torchrun_gets_the_node_rank_of_each_host():
    program = ["train.py", "--steps", "3"]
    command = lab_torchrun_command(program, node=1, nodes=4, ranks_per_host=2, master=0, port=29501)
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert command[-3:] == program
    options = dict(word[2:].split("=") for word in command[3:-3])
    assert options == {
        "nnodes": "4",
        "node-rank": "1",
        "nproc-per-node": "2",
        "master-addr": "10.77.0.1",
        "master-port": "29501",
        "monitor-interval": "0.05",
    }


@pytest.mark.parametrize(
    ("program", "python"),
    [(["train.py"], True), (["-m", "my.module"], True), (["paceline", "train"], False), (["./train"], False)],
)
def test_other_programs_run_without_python(program, python):
    assert is_python(program) is python
    command = lab_torchrun_command(program, node=0, nodes=1, ranks_per_host=1, master=0, port=1)
    assert ("--no-python" in command) is not python


def test_fewer_than_one_rank_is_refused():
    for ranks in (0, -2):
        with pytest.raises(UsageError, match=f"ranks_per_host={ranks}: at least 1"):
            lab_torchrun_command(["train.py"], node=0, nodes=1, ranks_per_host=ranks, master=0, port=1)


def test_programs_are_looked_for_beside_python_and_from_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert search_path() == f"{os.path.dirname(sys.executable)}:/nowhere"
    (tmp_path / "train.py").write_text("")
    tool = tmp_path / "tool"
    tool.write_text("")
    tool.chmod(0o755)
    for program in (["train.py"], ["./tool"], ["-m", "my.module"], [os.path.basename(sys.executable)]):
        check_lab_program(program, tmp_path)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ([], "no program to run"),
        (["other.py"], "no such script: other.py"),
        (["tool"], "no such program: tool"),
        (["./tool"], "no such program: ./tool"),
    ],
)
def test_a_missing_program_is_refused(tmp_path, program, message):
    (tmp_path / "tool").write_text("")  # neither on the path nor executable
    with pytest.raises(UsageError, match=message):
        check_lab_program(program, tmp_path)


REPORT = (
    "E1121 17:58:10.195000 25 lib/torch/distributed/elastic/multiprocessing/api.py:1002] "
    "failed (exitcode: 1) local_rank: 1 (pid: 28) of binary: python"
)
NOTICE = (
    "W1121 17:58:10.179000 25 lib/torch/distributed/elastic/multiprocessing/api.py:1028] "
    "Sending process 27 closing signal SIGTERM"
)


def test_torchrun_s_own_traceback_is_left_out():
    assert is_torchrun_failure(REPORT)
    assert not is_torchrun_failure(NOTICE)
    own = f"ValueError: a bad batch\n{NOTICE}\n{REPORT}"
    assert strip_torchrun_report(f"{own}\nTraceback (most recent call last):\n  ChildFailedError\n") == own
    assert (
        strip_torchrun_report("usage: torchrun\nerror: unrecognized")
        == "usage: torchrun\nerror: unrecognized"
    )


TABLE = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:     100       1    0    0    0     0          0         0      100       1    0    0    0     0       0          0
  eth0:18446744073709551615 2 0    0    0     0          0         0     4096       3    0    0    0     0       0          0
"""  # noqa: E501 — as the kernel writes it


def test_counters_are_read_by_column():
    assert parse_traffic(TABLE) == InterfaceBytes(sent=4096, received=2**64 - 1)
    assert parse_traffic(TABLE, "lo") == InterfaceBytes(sent=100, received=100)


def test_counters_can_be_subtracted():
    assert InterfaceBytes(sent=9, received=7) - InterfaceBytes(sent=4, received=7) == InterfaceBytes(
        sent=5, received=0
    )
