"""``paceline lab`` before anything is set up: refusals and their messages. Needs no root."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from paceline.errors import UsageError
from paceline.testing.netlab import lab as making
from paceline.testing.netlab import lab_requirements
from paceline.tools.cli.lab_command import parse_slow_hosts


@pytest.fixture
def paceline(command, monkeypatch, tmp_path):
    """Run `paceline lab` in an empty folder; return exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: command("lab", *arguments)


@pytest.fixture(autouse=True)
def nothing_is_set_up(monkeypatch):
    """Fail the test if the command sets up a host."""

    def refuse(*arguments):
        raise AssertionError("it set up a host")

    monkeypatch.setattr(making, "LabHost", refuse)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.py"], "no such script: train.py"),
        (["no-such-program"], "no such program: no-such-program"),
        (["--nproc-per-node", "-1", "true"], "--nproc-per-node -1: at least 0"),
        (["--nnodes", "0", "true"], "hosts=0: a lab has 1 to 250 hosts"),
        (["--link", "fast", "true"], "'fast' is no rate"),
        (["--link", "100", "true"], "'100' is no rate: unknown unit ''"),
        (["--slow", "50Mbit/s", "true"], "--slow '50Mbit/s' is not N=RATE"),
        (["--slow", "5=50Mbit/s", "true"], "slow names host 5, but there are 2 hosts"),
        (["--slow", "1=", "true"], "'' is no rate"),
        (["--latency", "long", "true"], "'long' is no time"),
        (["--timeout", "long", "true"], "'long' is no time"),
        (["--json", "no/folder/lab.json", "true"], "can't write --json no/folder/lab.json: no such folder"),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2(paceline, arguments, message):
    code, out, err = paceline(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "→" in err


@pytest.mark.parametrize(
    "arguments", [[], ["--nnodes", "2"], ["--host", "2", "true"], ["--nnodes", "many", "true"]]
)
def test_a_call_that_can_not_be_read_is_refused(paceline, arguments):
    code, _, err = paceline(*arguments)
    assert code == 2
    assert "Usage: paceline lab" in err


def test_without_rights_the_error_explains_how_to_get_them(paceline, monkeypatch):
    monkeypatch.setattr(lab_requirements.sys, "platform", "linux")
    monkeypatch.setattr(lab_requirements, "_find", lambda name: name)
    monkeypatch.setattr(lab_requirements, "_capabilities", lambda: 0)
    code, _, err = paceline("true")
    assert code == 2
    assert "this process lacks CAP_NET_ADMIN and CAP_SYS_ADMIN" in err
    assert 'sudo "$(command -v paceline)" lab' in err


def test_without_tools_it_names_the_package(paceline, monkeypatch):
    monkeypatch.setattr(lab_requirements.sys, "platform", "linux")
    monkeypatch.setattr(lab_requirements, "_find", lambda name: None if name == "tc" else name)
    code, _, err = paceline("true")
    assert code == 2
    assert "a lab needs tc: not found" in err
    assert "apt-get install iproute2" in err


def test_options_after_the_program_are_its_own(paceline, tmp_path):
    (tmp_path / "train.py").write_text("")
    code, _, err = paceline("--link", "never", "train.py", "--link", "x", "--nonsense", "-h")
    assert code == 2
    assert "'never' is no rate" in err  # its own options were read, those of the program were not


def test_help_lists_the_options():
    command = [sys.executable, "-m", "paceline", "lab", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    assert re.search(r"Usage: paceline lab \[OPTIONS\] \S*PROGRAM", shown)
    for option in ("--nnodes", "--link", "--nproc-per-node", "--slow", "--latency", "--timeout", "--json"):
        assert option in shown


def test_slow_hosts_are_named_by_number_or_name():
    assert parse_slow_hosts(["2=50Mbit/s", "host10=1Gbit/s"]) == {2: "50Mbit/s", 10: "1Gbit/s"}
    assert parse_slow_hosts([]) == {}
    for texts in (["50Mbit/s"], ["=50Mbit/s"], ["a=1Mbit/s"], ["-1=1Mbit/s"], ["1=1Mbit/s", "host1=2Mbit/s"]):
        with pytest.raises(UsageError, match="--slow"):
            parse_slow_hosts(texts)
