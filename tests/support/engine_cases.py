"""Wrapped models, their data and their losses, for tests of the engine."""

from __future__ import annotations

import torch
import torch.distributed as dist

import model_zoo
import paceline

__all__ = ["ALL", "REPLICATED", "data", "loss_on", "same_on_all_ranks", "wrapped"]

REPLICATED = ["naive", "flat", "overlap", "bucketed"]
ALL = [*REPLICATED, "sharded", "full-shard"]


def data(rank, step=0, n=6):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(n, model_zoo.WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randn(n, 1, generator=generator, dtype=torch.float64)


def loss_on(model, rank, step=0, name="Plain"):
    return model_zoo.loss_of(model, name, *data(rank, step))


def wrapped(sync, name="Plain", lr=0.1, **options):
    model = paceline.DataParallel(model_zoo.build(name), sync=sync, **options)
    return model, paceline.ShardedOptimizer(model, torch.optim.SGD, lr=lr, momentum=0.9)


def same_on_all_ranks(tensors):
    """Return whether every rank holds the same values."""
    flat = torch.cat([tensor.reshape(-1).to(torch.complex128) for tensor in tensors])
    rows = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, flat)
    return all(torch.equal(row, flat) for row in rows)
