"""Clipping on simulated accelerators: no step waits, factors have the gradients' dtype, results have the CPU's bits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import paceline
from paceline.parallel.engine import deferred_status
from simulated_accelerator import simulated_world

STEPS, COUNTED_FROM = 6, 4
"""The first steps build the buckets, make the optimizer's state, and are read in time."""


class Net(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=dtype))

    def forward(self, x):
        return self.layers(x) * self.scale


CLIPS = {
    "model": lambda model: model.clip_grad_norm_(0.1),
    "model, largest": lambda model: model.clip_grad_norm_(0.01, math.inf),
    "torch": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "torch, largest": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01, math.inf),
}


def train(rank, device, sync, dtype, clip, simulator=None):
    model = paceline.DataParallel(Net(dtype).to(device), sync=sync)
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    generator, norms = torch.Generator().manual_seed(rank), []
    for _ in range(STEPS):
        if simulator is not None:
            simulator.next_step()
        x = torch.randn(4, 6, generator=generator).to(dtype)
        x = x if device == "cpu" else x.pin_memory().to(device, non_blocking=True)
        model.backward(model(x).square().mean(), samples=4)
        norms.append(CLIPS[clip](model))
        optim.step()
        optim.zero_grad()
    if simulator is not None:
        simulator.phase = "after"
    return [each.detach().cpu().clone() for each in [*model.whole_parameters(), *norms]]


def differences_and_waits(rank, size, path, *case):
    """Return whether tensors differ from the CPU's, where the host waited, and the dtypes of gradients and factors."""
    original, mixed = torch._foreach_mul_, set()

    def noting(tensors, factor):
        if isinstance(factor, torch.Tensor) and tensors[0].device.type != "cpu":
            mixed.update((each.dtype, factor.dtype) for each in tensors if each.dtype != factor.dtype)
        return original(tensors, factor)

    with simulated_world(rank, size, path, "cpu:gloo,sim:simccl", seed=1) as simulator:
        expected = train(rank, "cpu", *case)
        torch._foreach_mul_ = noting
        try:
            found = train(rank, "sim", *case, simulator)
        finally:
            torch._foreach_mul_ = original
        waits = {
            (wait.kind, wait.site)
            for wait in simulator.synchronisations
            if wait.phase != "after" and wait.step > COUNTED_FROM and not of_the_step_before(wait)
        }
    return list(map(torch.equal, found, expected)), sorted(waits), mixed


def of_the_step_before(wait):
    return wait.kind == "event" and wait.age >= 1 and deferred_status.__name__.rpartition(".")[2] in wait.site


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize(
    ("sync", "dtype"),
    [
        ("bucketed", torch.float32),
        ("bucketed", torch.bfloat16),
        ("sharded", torch.float32),
        ("sharded", torch.bfloat16),
    ],
    ids=str,
)
def test_clipping_waits_for_nothing(simulated_pool, tmp_path, sync, dtype, clip):
    found = simulated_pool(2).run(
        differences_and_waits, str(tmp_path / "store"), sync, dtype, clip, world=False
    )
    for same, waits, mixed in found:
        assert all(same)
        assert waits == []
        assert mixed == set()
