"""Gathers of a sharded optimizer that are held back: what other ranks updated is NaN until it is waited for.

with held_back() as launched:
    ...                                      # train
    assert pending(launched) == 2            # gathers that nobody has waited for
"""

from __future__ import annotations

import io
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import nn

import paceline
from paceline.parallel.engine import parameter_gather
from paceline.parallel.gradient_collectives import Comm

__all__ = ["EACH_PARAMETER", "WIDTH", "Small", "X", "held_back", "one_step", "pending", "saved", "wrapped"]

EACH_PARAMETER = paceline.Sync(bucket_mib=0, shard="optimizer")
WIDTH = 8


class HeldBack:
    """A gather whose result appears when it is waited for."""

    ended = None

    def __init__(self, comm, flat, pending):
        pending.wait()
        with torch._C.DisableTorchFunction():
            self.rows = flat.view(torch.uint8).numpy().reshape(comm.shards, -1)
        self.real = self.rows.copy()
        self.rows[[rank for rank in range(comm.shards) if rank != comm.shard]] = 0xFF  # NaN in every dtype
        self.waited = False

    def poll(self):
        pass

    def wait(self):
        if not self.waited:
            self.rows[:] = self.real
        self.waited = True


@contextmanager
def held_back():
    """Hold back all gathers of steps in this block; yield the list of them."""
    launched, real = [], Comm.all_gather

    def all_gather(comm, flat, posted=None):
        launched.append(HeldBack(comm, flat, real(comm, flat, posted)))
        return launched[-1]

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(Comm, "all_gather", all_gather))
        # An earlier case of this process may have compiled.
        patches.enter_context(mock.patch.object(parameter_gather._compiled, "may_run", return_value=False))
        yield launched


def pending(launched):
    return sum(not each.waited for each in launched)


def wrapped(net, sync=EACH_PARAMETER, **options):
    model = paceline.DataParallel(net, sync=sync)
    options = {"lr": 0.05, **options}
    return model, paceline.ShardedOptimizer(model, torch.optim.AdamW, **options)


def one_step(model, optim, rank, loss_of=lambda net, x: net(x).square().mean(), seed=0):
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * seed + rank))
    loss_of(model, x).backward()
    optim.step()
    optim.zero_grad()


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


X = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


def saved(value):
    with io.BytesIO() as file:
        torch.save(value, file)
        file.seek(0)
        return torch.load(file)
