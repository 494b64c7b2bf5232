"""`Checkpoint.load(path)`: any checkpoint, or the newest intact one of another folder, which stays as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import CheckpointError, UsageError


def net(value):
    made = nn.Linear(1, 1, bias=False)
    nn.init.constant_(made.weight, value)
    return made


def write(folder, *steps, **options):
    """Write checkpoints whose weight is their step."""
    for step in steps:
        with paceline.Checkpoint(folder, net(step), keep=9, **options) as checkpoint:
            checkpoint.step = step
            checkpoint.save(wait=True)


def load(folder, path, **options):
    """Return the checkpoint's attributes and the weight after a load, and save."""
    model = net(-1)
    checkpoint = paceline.Checkpoint(folder, model, **options)
    try:
        found = checkpoint.load(path)
        checkpoint.save(wait=True)
    finally:
        checkpoint.close()
    return found, checkpoint.step, model.weight.item()


def damage(path):
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)


@pytest.mark.parametrize("path", ["other/checkpoint/step-00000003", "other/checkpoint", "other", "renamed"])
def test_one_checkpoint_or_the_newest_of_a_folder(tmp_path, path):
    write(tmp_path / "other" / "checkpoint", 1, 3)
    if path == "renamed":
        (tmp_path / "other" / "checkpoint" / "step-00000003").rename(tmp_path / "renamed")
    found, step, weight = load(tmp_path / "own", tmp_path / path)
    assert (found.step, step, weight) == (3, 3, 3)
    assert (tmp_path / "own" / "step-00000003").is_dir()


def test_damaged_ones_elsewhere_are_skipped_and_left_alone(tmp_path, caplog):
    write(tmp_path / "other", 1, 2, 3)
    for step in (2, 3):
        damage(tmp_path / "other" / f"step-0000000{step}")
    found, _, weight = load(tmp_path / "own", tmp_path / "other")
    assert weight == 1
    assert [each.path.rpartition("/")[2] for each in found.passed_over] == ["step-00000003", "step-00000002"]
    assert len([record for record in caplog.records if "skipped" in record.message]) == 2
    assert len(list((tmp_path / "other").glob("step-*"))) == 3
    assert not list((tmp_path / "other").glob("*.damaged"))
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        load(tmp_path / "own", tmp_path / "other" / "step-00000003")


def test_nothing_there_is_an_error(tmp_path):
    write(tmp_path / "own", 1)
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(UsageError, match="holds no checkpoint"):
            load(tmp_path / "own", path)


def test_newer_checkpoints_in_the_own_folder_are_warned_of(tmp_path, caplog):
    write(tmp_path / "own", 1, 5)
    write(tmp_path / "other", 3, 5)
    load(tmp_path / "own", tmp_path / "other" / "step-00000005")
    assert caplog.records == []
    load(tmp_path / "own", tmp_path / "own" / "step-00000001", keep=9)  # back to an earlier one
    (warning,) = [record.message for record in caplog.records]
    assert "step-00000005 already exists, and this run did not load it" in warning


def test_a_run_of_two_programs(tmp_path):
    """The first start begins from elsewhere, later ones from the run's own folder."""
    write(tmp_path / "other", 7)
    for expected in (7, 8, 9):
        model = net(-1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with paceline.Checkpoint(tmp_path / "own", model) as checkpoint:
            found = checkpoint.load() or checkpoint.load(tmp_path / "other")
            assert found.step == expected
            assert model.weight.item() == expected
            model.weight.grad = torch.full((1, 1), -1.0)
            optimizer.step()
            checkpoint.step += 1
            checkpoint.save(wait=True)
