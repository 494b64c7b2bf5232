"""No step waits for the device: counted on simulated accelerators, where results also have the bits of the CPU."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import paceline
from paceline.parallel.engine import deferred_status
from simulated_accelerator import simulated_world

STEPS, COUNTED_FROM = 7, 4
"""The first steps build the buckets, make the optimizer's state, and are read in time."""

LATE = "event"
"""The status of the step before may be waited for."""


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 3))


def batches(rank, step, device):
    """Return the micro-batches of a step; ranks have other numbers of samples, which change from step to step."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    for size in (4 + rank, 5 + step % 3):
        x = torch.randn(size, 6, generator=generator)
        y = torch.randint(0, 3, (size,), generator=generator)
        if device != "cpu":
            x, y = x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
        yield x, y, size


def backward(model, rank, step, device, call):
    """Run a step's backwards: the first is accumulated."""
    for number, (x, y, size) in enumerate(batches(rank, step, device)):
        with model.accumulate() if number == 0 else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(model(x), y)
            if call == "samples":
                model.backward(loss, samples=size)
            elif call == "share":
                model.backward(loss)
            else:
                loss.backward()


def train(rank, device, sync, call, clip, simulator=None):
    """Return the parameters after a few steps."""
    model = paceline.DataParallel(net().to(device), sync=sync)
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=0.1)
    for step in range(STEPS):
        if simulator is not None:
            simulator.next_step()
        backward(model, rank, step, device, call)
        if clip:
            model.clip_grad_norm_(0.1)
        optim.step()
        optim.zero_grad()
    if simulator is not None:
        simulator.phase = "after"
    return [parameter.detach().cpu().clone() for parameter in model.whole_parameters()]


def differences_and_waits(rank, size, path, seeds, *case):
    """Return the seeds that give other parameters than the CPU, and where the host waited in a late step."""
    differing, waits = [], set()
    for seed in range(seeds):
        with simulated_world(rank, size, f"{path}-{seed}", "cpu:gloo,sim:simccl", seed=seed) as simulator:
            expected = train(rank, "cpu", *case)
            found = train(rank, "sim", *case, simulator)
            waits |= {
                (wait.kind, wait.site)
                for wait in simulator.synchronisations
                if wait.phase != "after" and wait.step > COUNTED_FROM and not of_the_step_before(wait)
            }
        if not all(map(torch.equal, found, expected)):
            differing.append(seed)
    return differing, sorted(waits)


def of_the_step_before(wait):
    return wait.kind == LATE and wait.age >= 1 and deferred_status.__name__.rpartition(".")[2] in wait.site


@pytest.mark.sweep
@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("call", ["samples", "share", "equal"])
@pytest.mark.parametrize("sync", ["bucketed", "naive", "flat", "overlap", "sharded", "full-shard"])
def test_a_step_waits_for_nothing(simulated_pool, tmp_path, sync, call, clip):
    found = simulated_pool(2).run(
        differences_and_waits, str(tmp_path / "store"), 2, sync, call, clip, world=False
    )
    assert found == [([], [])] * 2
