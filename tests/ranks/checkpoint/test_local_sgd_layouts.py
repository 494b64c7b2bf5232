"""Checkpoints of local SGD in both formats, on every number of ranks: what ranks share is the same to the bit."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import paceline
from local_sgd_cases import adamw, network, take_step
from same_states import difference

FORMATS = ["paceline", "dcp"]
OPTIONS = {"every": 4, "fragments": 2, "delay": 1}


def built(seed):
    model = paceline.DataParallel(network(torch.float32, seed), sync="bucketed")
    optim = adamw(model)
    return model, optim, paceline.DiLoCo(model, optim, **OPTIONS)


def states(loop, rank):
    return copy.deepcopy((loop.shared(), loop.state_dict(), loop.rank_state_dict()))


def save(rank, size, folder):
    """Save between two synchronisations, where every rank has weights of its own; write all states besides."""
    paceline.init()
    model, optim, loop = built(1)
    with loop:
        for step in range(1, 7):
            take_step(model, optim, rank, step, dtype=torch.float32)
        for format in FORMATS:
            with paceline.Checkpoint(
                Path(folder, f"{size}-{format}"), model, optim, loop, format=format
            ) as checkpoint:
                checkpoint.save(wait=True)
        torch.save(states(loop, rank), Path(folder, f"{size}-{rank}.pt"))


def load(rank, size, folder, sources):
    paceline.init()
    problems = []
    for source in sources:
        saved = [
            torch.load(Path(folder, f"{source}-{each}.pt"), weights_only=False) for each in range(source)
        ]
        shared, common, own = saved[rank] if source == size else saved[0]
        for format in FORMATS:
            model, optim, loop = built(5)
            with paceline.Checkpoint(Path(folder, f"{source}-{format}"), model, optim, loop) as checkpoint:
                assert checkpoint.load() is not None
            found = states(loop, rank)
            problems += [
                difference(found[0], shared, f"{source} {format} shared"),
                difference(found[1], common, f"{source} {format} common"),
                difference(found[2], own, f"{source} {format} own") if source == size else "",
            ]
    return [text for text in problems if text]


@pytest.mark.parametrize("target", [1, 2, 3, 4])
def test_what_ranks_share_is_loaded_on_every_number_of_ranks(pool, tmp_path, target):
    sources = sorted({2, 3, target} - {1})
    for source in sources:
        pool(source).run(save, tmp_path)
    for problems in pool(target).run(load, tmp_path, sources):
        assert problems == []
