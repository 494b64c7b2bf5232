"""A wrapped model beside the same one in one process."""

from __future__ import annotations

from functools import partial

import torch

import model_zoo
import paceline

__all__ = ["SGD", "linear", "one_process", "over_paceline", "pair", "same"]

SGD = {"lr": 0.1, "momentum": 0.9}


def pair(sync, make, kind=torch.optim.SGD, **options):
    """Return a wrapped model with its optimizer, and the same for one process, from the same start."""
    made = []
    for _ in range(2):
        torch.manual_seed(3)
        made.append(make().double())
    options = options or SGD
    model = paceline.DataParallel(made[0], sync=sync)
    optim = paceline.ShardedOptimizer(model, kind, **options)
    return model, optim, made[1], kind(made[1].parameters(), **options)


def one_process(reference, other, losses):
    """Take a step on the mean of `losses`, each the mean over as many samples as the others."""
    (sum(losses) / len(losses)).backward()
    other.step()
    other.zero_grad()


def linear():
    """Return a model that FSDP2 shards completely; on 3 ranks one holds nothing of its bias."""
    return torch.nn.Linear(model_zoo.WIDTH, 1)


def same(gaps, tolerance=1e-12):
    assert all(gap < tolerance for gap in gaps), gaps


def over_paceline(pool):
    """Return a function that makes pools over the paceline backend; test files turn it into a fixture.

    (test_engine.py and test_sharded_optimizer.py run over gloo.)
    """
    return partial(pool, backend="paceline")
