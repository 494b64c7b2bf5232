"""``paceline checkpoint``: shows, verifies, exports; a damaged one is an exit code."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import paceline
from paceline.tools.cli import app


def run_command(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["paceline", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        app.main()
    return ended.value.code or 0


@pytest.fixture
def run(tmp_path):
    keep = paceline.Checkpoint(tmp_path / "run" / "checkpoint", torch.nn.Linear(3, 2))
    for keep.step in (10, 20):
        keep.save(wait=True)
    keep.close()
    return tmp_path / "run"


def test_show_verify_export(monkeypatch, capsys, run, tmp_path):
    assert run_command(monkeypatch, "checkpoint", run) == 0
    shown = capsys.readouterr().out
    assert shown.index("step-00000020") < shown.index("step-00000010")
    assert "not read" in shown
    file, out = tmp_path / "found.json", tmp_path / "out.safetensors"
    assert run_command(monkeypatch, "checkpoint", run, "--verify", "--export", out, "--json", file) == 0
    assert capsys.readouterr().out.count("intact") == 2
    assert [(each["step"], each["problem"]) for each in json.loads(file.read_text())] == [(20, ""), (10, "")]
    assert load_file(out)["weight"].shape == (2, 3)


def test_damage_is_shown_and_an_exit_code(monkeypatch, capsys, run):
    (run / "checkpoint" / "step-00000020" / "model.safetensors").unlink()
    assert run_command(monkeypatch, "checkpoint", run / "checkpoint", "--verify") == 1
    shown = capsys.readouterr().out
    assert "DAMAGED" in shown
    assert "step-00000020: model.safetensors is missing" in shown
    (run / "checkpoint" / "step-00000020" / "manifest.json").unlink()
    assert run_command(monkeypatch, "checkpoint", run) == 1
    assert "manifest.json is missing" in capsys.readouterr().out


def test_an_unwritable_export_is_refused_first(monkeypatch, capsys, run, tmp_path):
    out = tmp_path / "no" / "out.safetensors"
    assert run_command(monkeypatch, "checkpoint", run, "--verify", "--export", out) == 2
    written = capsys.readouterr()
    assert "can't write --export" in written.err
    assert written.out == ""


def test_a_folder_without_checkpoints(monkeypatch, capsys, tmp_path):
    assert run_command(monkeypatch, "checkpoint", tmp_path) == 2
    assert "no checkpoint in" in capsys.readouterr().err
