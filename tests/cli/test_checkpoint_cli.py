"""``paceline checkpoint``: shows, verifies, exports; a damaged checkpoint sets the exit code."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import paceline


@pytest.fixture
def run(tmp_path):
    checkpoint = paceline.Checkpoint(tmp_path / "run" / "checkpoint", torch.nn.Linear(3, 2))
    for checkpoint.step in (10, 20):
        checkpoint.save(wait=True)
    checkpoint.close()
    return tmp_path / "run"


def test_show_verify_export(command, run, tmp_path):
    code, shown, _ = command("checkpoint", "ls", run)
    assert code == 0
    assert shown.index("step-00000020") < shown.index("step-00000010")
    assert "not read" in shown
    file, out = tmp_path / "found.json", tmp_path / "out.safetensors"
    code, shown, _ = command("checkpoint", "verify", run, "--json", file)
    assert code == 0
    assert shown.count("intact") == 2
    assert [(each["step"], each["problem"]) for each in json.loads(file.read_text())] == [(20, ""), (10, "")]
    code, shown, _ = command("checkpoint", "export", run, out)
    assert code == 0
    assert shown.startswith(f"weights: {out} (")
    assert load_file(out)["weight"].shape == (2, 3)


def test_damage_is_shown_and_an_exit_code(command, run):
    (run / "checkpoint" / "step-00000020" / "model.safetensors").unlink()
    code, shown, _ = command("checkpoint", "verify", run / "checkpoint")
    assert code == 1
    assert "DAMAGED" in shown
    assert "step-00000020: model.safetensors is missing" in shown
    (run / "checkpoint" / "step-00000020" / "manifest.json").unlink()
    code, shown, _ = command("checkpoint", "ls", run)
    assert code == 1
    assert "manifest.json is missing" in shown


def test_an_unwritable_export_is_refused_first(command, run, tmp_path):
    out = tmp_path / "no" / "out.safetensors"
    code, shown, error = command("checkpoint", "export", run, out)
    assert (code, shown) == (2, "")
    assert "can't write FILE" in error


def test_a_folder_without_checkpoints(command, tmp_path):
    code, _, error = command("checkpoint", "ls", tmp_path)
    assert code == 2
    assert "no checkpoint in" in error
