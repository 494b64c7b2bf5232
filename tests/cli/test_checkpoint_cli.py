"""``paceline checkpoint``: shows, verifies, exports, converts; a damaged checkpoint sets the exit code."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
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
    assert f"{str(tmp_path)!r} holds no checkpoint" in error


# ------------------------------------------------------------------ other formats


@pytest.fixture
def foreign(tmp_path):
    """Checkpoints that plain torch.distributed.checkpoint wrote, named as torchtitan names them."""
    net = torch.nn.Linear(3, 2)
    for step in (5, 100):
        dcp.save(
            {"model": net.state_dict(), "train_state": {"step": step}},
            checkpoint_id=tmp_path / f"step-{step}",
        )
    return tmp_path


def test_checkpoints_of_torch_are_listed_and_verified(command, foreign, tmp_path):
    code, shown, _ = command("checkpoint", "ls", foreign)
    assert code == 0
    assert shown.index("step-100") < shown.index("step-5")
    assert shown.count("DCP, not read") == 2
    file = tmp_path / "found.json"
    code, shown, _ = command("checkpoint", "verify", foreign, "--json", file)
    assert code == 0
    assert shown.count("DCP, intact") == 2
    rows = json.loads(file.read_text())
    assert [(row["step"], row["ranks"], row["format"], row["problem"]) for row in rows] == [
        (100, 1, "plain dcp", ""),
        (5, 1, "plain dcp", ""),
    ]
    code, shown, _ = command("checkpoint", "verify", foreign / "step-5")  # a checkpoint by its own path
    assert code == 0
    assert "step-100" not in shown
    data = foreign / "step-5" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    code, shown, _ = command("checkpoint", "verify", foreign)
    assert code == 1
    assert "step-5: __0_0.distcp has" in shown
    (foreign / "step-100" / ".metadata").write_bytes(b"")
    code, shown, _ = command("checkpoint", "ls", foreign)
    assert code == 1
    assert "step-100: .metadata is invalid" in shown


def test_containers_have_their_names(command, tmp_path):
    for name in ("paceline", "dcp"):
        with paceline.Checkpoint(tmp_path / name, torch.nn.Linear(1, 1), format=name) as checkpoint:
            checkpoint.save(wait=True)
        file = tmp_path / f"{name}.json"
        assert command("checkpoint", "verify", tmp_path / name, "--json", file)[0] == 0
        assert [row["format"] for row in json.loads(file.read_text())] == [name]


def test_convert_to_every_format_and_back(command, run, tmp_path):
    code, shown, error = command("checkpoint", "convert", run, tmp_path / "dcp", "--to", "dcp")
    assert code == 0
    assert shown.startswith(f"dcp: {tmp_path / 'dcp'} (")
    assert "note" not in shown
    assert "tensors: " in error  # progress
    code, shown, _ = command("checkpoint", "convert", tmp_path / "dcp", tmp_path / "hf", "--to", "hf")
    assert code == 0
    assert "note: the result has weights only" in shown
    code, shown, _ = command("checkpoint", "convert", tmp_path / "hf", tmp_path / "back", "--to", "paceline")
    assert code == 0
    assert "note: the result has weights only: paceline.import_weights takes them" in shown
    first, last = (load_file(tmp_path / each / "model.safetensors") for each in ("hf", "back"))
    assert all(torch.equal(first[name], last[name]) for name in ("weight", "bias"))
    code, shown, _ = command("checkpoint", "verify", tmp_path / "back")
    assert code == 0
    assert "intact" in shown


def test_convert_from_torch_with_a_configuration(command, foreign, tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text("{}")
    words = "--to", "hf", "--config", tmp_path / "config", "--model-name", "model"
    code, _, _ = command("checkpoint", "convert", foreign / "step-5", tmp_path / "x", *words)
    assert code == 0
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "onnx"], "'onnx' is not a format"),
        (["--to", "dcp", "--config", "."], "a configuration for 'dcp'"),
        (["--to", "hf", "--model-name", "other"], "holds no model 'other'"),
    ],
)
def test_wrong_conversions_are_refused(command, run, tmp_path, words, message):
    code, shown, error = command("checkpoint", "convert", run, tmp_path / "x", *words)
    assert (code, shown) == (2, "")
    assert message in error
    assert not (tmp_path / "x").exists()


def test_convert_overwrites_nothing(command, run, tmp_path):
    (tmp_path / "x").mkdir()
    code, _, error = command("checkpoint", "convert", run, tmp_path / "x", "--to", "dcp")
    assert code == 2
    assert "exists already" in error
    assert list((tmp_path / "x").iterdir()) == []
