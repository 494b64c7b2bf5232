"""``paceline doctor``: output equals its JSON, and only failed essential checks set the exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import typer

from paceline.errors import UsageError
from paceline.tools.cli import doctor_command as module
from paceline.tools.cli.doctor_command import doctor, try_loopback
from paceline.world.machine_facts import LoopbackTiming, read_machine_facts


@pytest.fixture(scope="module")
def facts():
    return read_machine_facts()


def test_it_runs_here_and_its_json_is_right(tmp_path):
    env = os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "paceline", "doctor", "--json", str(tmp_path / "doctor.json")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    record = json.loads((tmp_path / "doctor.json").read_text())
    assert (record["kind"], record["schema"]) == ("doctor", 1)
    assert record["machine"]["threads"] == os.cpu_count()
    assert record["machine"]["thread_variables"]["OMP_NUM_THREADS"] == "1"
    loopback = record["loopback"]
    assert loopback["right"] is True
    assert loopback["ranks"] == 2
    assert loopback["shared"] is True
    assert 0 < loopback["small_seconds"] < loopback["seconds"]
    subjects = [finding["subject"] for finding in record["findings"]]
    assert len(set(subjects)) == len(subjects)
    for finding in record["findings"]:
        assert finding["status"] in ("ok", "note", "warn")
        assert finding["subject"] in ended.stdout
    assert "Traceback" not in ended.stderr
    assert "Warning" not in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["doctor.json"]


def test_something_essential_that_is_broken_is_an_exit_code(monkeypatch, facts, capsys):
    monkeypatch.setattr(module, "read_machine_facts", lambda: replace(facts, torch=None))
    with pytest.raises(typer.Exit) as caught:
        doctor(None, nproc_per_node=2)
    assert caught.value.exit_code == 1
    shown = capsys.readouterr().out
    assert "pip install 'torch>=" in shown
    assert "2 broken" in shown


def test_a_failed_all_reduce_is_reported_and_sets_the_exit_code(monkeypatch, facts, capsys, tmp_path):
    monkeypatch.setattr(module, "read_machine_facts", lambda: facts)
    monkeypatch.setattr(module, "try_loopback", lambda ranks: "[rank 1] ended with exit code 1")
    with pytest.raises(typer.Exit):
        doctor(tmp_path / "d.json", nproc_per_node=2)
    assert "[rank 1] ended with exit code 1" in capsys.readouterr().out
    assert json.loads((tmp_path / "d.json").read_text())["loopback"] == "[rank 1] ended with exit code 1"


def test_no_ranks_try_no_all_reduce(monkeypatch, facts, capsys):
    monkeypatch.setattr(module, "read_machine_facts", lambda: facts)
    monkeypatch.setattr(module, "try_loopback", lambda ranks: pytest.fail("tried"))
    doctor(None, nproc_per_node=0)
    assert "not tried" in capsys.readouterr().out


@pytest.mark.sweep
@pytest.mark.parametrize(
    "arguments",
    [
        ["--nproc-per-node", "1"],
        ["--nproc-per-node", "-2"],
        ["--json", "/no/such/folder/d.json"],
        ["--nproc-per-node", "two"],
    ],
)
def test_wrong_options_are_one_message(arguments):
    ended = subprocess.run(
        [sys.executable, "-m", "paceline", "doctor", *arguments], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert arguments[0] in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.thorough
def test_the_all_reduce_is_right_between_three_ranks():
    measured = try_loopback(3)
    assert isinstance(measured, LoopbackTiming)
    assert (measured.ranks, measured.right) == (3, True)


@pytest.mark.thorough
def test_ranks_without_common_memory_get_an_error(monkeypatch):
    monkeypatch.setenv("PACELINE_SHARED_MEMORY", "0")
    measured = try_loopback(2)
    assert isinstance(measured, LoopbackTiming)
    assert (measured.right, measured.shared) == (True, False)


@pytest.mark.thorough
def test_causes_of_a_failed_all_reduce_are_reported(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    message = try_loopback(2)
    assert isinstance(message, str)
    assert "no-such-interface" in message or "ended with exit code 1" in message


@pytest.mark.parametrize(("given", "why"), [("", "is a folder"), ("nowhere/facts.json", "no such folder")])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_tried(monkeypatch, tmp_path, given, why):
    monkeypatch.setattr(module, "read_machine_facts", lambda: pytest.fail("measured before refusing"))
    with pytest.raises(UsageError, match=why):
        doctor(tmp_path / given, nproc_per_node=2)
