"""Programs for torch's DistributedDataParallel train alike with the import line changed, or nothing changed at all.

The programs in `programs/` are written in the style of widely used ones and don't know of Paceline.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import paceline.ddp
from model_zoo import max_difference

PROGRAMS = Path(__file__).parent / "programs"
THEIRS = "from torch.nn.parallel import DistributedDataParallel as DDP\n"
OURS = "from paceline import DistributedDataParallel as DDP\n"
TOLERANCE = 1e-6
"""Largest difference of any step's loss; on two ranks it is 0, on more their sums are rounded in another order."""


def run_program(rank, size, way, name, *arguments):
    """Run a program as torchrun would; return its losses. In `way` "installed" not even the import line changes.

    The group outlives the program's models, since torch's class may hang where it is the last to release a group.
    """
    groups, destroy = [], dist.destroy_process_group

    def leave():
        groups.append(dist.group.WORLD)
        destroy()

    text = (PROGRAMS / name).read_text()
    if way == "changed":
        assert text.count(THEIRS) == 1
        text = text.replace(THEIRS, OURS)
    if way == "installed":
        paceline.ddp.install()
    try:
        argv = mock.patch.object(sys, "argv", [name, *arguments])
        with argv, mock.patch.object(dist, "destroy_process_group", leave):
            module = {"__name__": "__main__"}
            exec(compile(text, name, "exec"), module)
    finally:
        paceline.ddp.uninstall()
    return module["losses"]


def losses_of(pool, environments, size, way, name, *arguments):
    found = pool(size).run(run_program, way, name, *map(str, arguments), world=False, env=environments(size))
    return torch.tensor([loss for losses in found for loss in losses], dtype=torch.float64)


def gap(left, right):
    assert len(left) == len(right)
    return (left - right).abs().max().item()


def saved_in(folder):
    [path] = folder.iterdir()
    return torch.load(path)


@pytest.mark.sweep
@pytest.mark.parametrize(("way", "size"), [("changed", 2), ("installed", 2), ("changed", 3)])
@pytest.mark.parametrize("name", ["tutorial_loop.py", "micro_steps.py", "snapshot_trainer.py"])
def test_a_program_learns_the_same_with_its_import_line_changed(
    pool, rank_environments, tmp_path, name, way, size
):
    folders = tmp_path / "theirs", tmp_path / "ours"
    # rounded to bfloat16 in between, the last bit of a sum makes a difference of a thousandth
    arguments = ["5", "float32"] if name == "snapshot_trainer.py" and size > 2 else []
    losses = []
    for folder, each in zip(folders, ("torch", way), strict=True):
        folder.mkdir()
        losses.append(losses_of(pool, rank_environments, size, each, name, folder, *arguments))
    assert len(losses[0]) >= size * 50
    assert losses[0].min() < 0.8 * losses[0][0]
    assert gap(*losses) <= (0.0 if size == 2 else TOLERANCE)


def test_two_models_in_turns_learn_the_same_once_the_class_is_installed(pool, rank_environments, tmp_path):
    losses, states = [], []
    for way in ("torch", "installed"):
        losses.append(losses_of(pool, rank_environments, 2, way, "two_models.py", tmp_path))
        states.append(saved_in(tmp_path))
    assert gap(*losses) == 0.0
    for model in ("maker", "judge"):
        assert list(states[0][model]) == list(states[1][model])
        assert max_difference(list(states[0][model].values()), list(states[1][model].values())) == 0.0


@pytest.mark.parametrize("name", ["micro_steps.py", "snapshot_trainer.py"])
def test_a_checkpoint_of_torchs_class_is_resumed_by_ours(pool, rank_environments, tmp_path, name):
    arguments = ["3"] if name == "snapshot_trainer.py" else []
    losses_of(pool, rank_environments, 2, "torch", name, tmp_path, *arguments)
    [checkpoint] = tmp_path.iterdir()
    written, losses = checkpoint.read_bytes(), []
    arguments = ["5"] if arguments else [tmp_path]
    for way in ("torch", "changed"):
        checkpoint.write_bytes(written)
        losses.append(losses_of(pool, rank_environments, 2, way, name, tmp_path, *arguments))
    assert gap(*losses) == 0.0
