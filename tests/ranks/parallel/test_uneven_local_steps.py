"""Ranks with different numbers of local steps stay equal: with a warm-up, and over several blocks."""

from __future__ import annotations

import pytest
import torch

import paceline
from local_sgd_cases import adamw, flat, network, same, take_step


def blocks(rank, size, steps, options):
    """Return the parameters after each of several blocks, of `steps[block][rank]` local steps."""
    model = paceline.DataParallel(network(), sync="bucketed")
    optim = adamw(model)
    loop = paceline.DiLoCo(model, optim, **options, compression=None)
    after = []
    for of_rank in steps:
        with loop:
            for step in range(1, of_rank[rank] + 1):
                take_step(model, optim, rank, step)
        after.append(flat(model))
    return torch.cat(after)


@pytest.mark.parametrize("options", [{"every": 4}, {"every": 6, "fragments": 3, "delay": 2}])
def test_the_warm_up_ends_for_all_ranks_at_the_same_synchronisation(pool, options):
    same(pool(2).run(blocks, [[3, 25]], {**options, "warmup": 10}))


@pytest.mark.parametrize("options", [{"every": 4}, {"every": 6, "fragments": 3, "delay": 2}])
def test_several_blocks(pool, options):
    same(pool(2).run(blocks, [[7, 17], [9, 4], [8, 8]], options))
