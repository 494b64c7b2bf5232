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


def net(dtype=torch.float32):
    torch.manual_seed(3)
    norm = nn.LayerNorm(32) if dtype is torch.float32 else nn.Linear(32, 32)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), norm, nn.Linear(32, 3)).to(dtype)


def batches(rank, step, device, dtype):
    """Return the micro-batches of a step; ranks have other numbers of samples, which change from step to step."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    for size in (4 + rank, 5 + step % 3):
        x = torch.randn(size, 6, generator=generator)
        y = torch.randint(0, 3, (size,), generator=generator)
        x = x.to(dtype)
        if device != "cpu":
            x, y = x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
        yield x, y, size


def backward(model, rank, step, device, call, dtype):
    """Run a step's backwards: the first is accumulated."""
    for number, (x, y, size) in enumerate(batches(rank, step, device, dtype)):
        with model.accumulate() if number == 0 else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(model(x), y)
            if call == "samples":
                model.backward(loss, samples=size)
            elif call == "share":
                model.backward(loss)
            else:
                loss.backward()


def train(rank, device, sync, call, clip, dtype, simulator=None):
    """Return the parameters after a few steps."""
    low = dtype is torch.bfloat16
    model = paceline.DataParallel(
        net(dtype).to(device), sync=sync, reduce_dtype=torch.float32 if low else None
    )
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=0.1)
    for step in range(STEPS):
        if simulator is not None:
            simulator.next_step()
        backward(model, rank, step, device, call, dtype)
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
        differences_and_waits, str(tmp_path / "store"), 2, sync, call, clip, torch.float32, world=False
    )
    assert found == [([], [])] * 2


@pytest.mark.parametrize("sync", ["bucketed", "sharded", "full-shard"])
def test_a_step_in_bfloat16_waits_for_nothing(simulated_pool, tmp_path, sync):
    case = sync, "samples", True, torch.bfloat16
    found = simulated_pool(2).run(differences_and_waits, str(tmp_path / "store"), 2, *case, world=False)
    assert found == [([], [])] * 2


def waits_if_read_in_time(rank, size, path):
    with simulated_world(rank, size, path) as simulator:
        model = paceline.DataParallel(net().to("sim"), find_unused_parameters=True)
        for step in range(STEPS):
            simulator.next_step()
            backward(model, rank, step, "sim", "samples", torch.float32)
            model.zero_grad()
        return {
            wait.site.rpartition("/")[2].partition(":")[0]
            for wait in simulator.synchronisations
            if wait.step == STEPS
        }


def test_reading_in_time_is_counted(simulated_pool, tmp_path):
    found = simulated_pool(2).run(waits_if_read_in_time, str(tmp_path / "store"), world=False)
    assert found == [{"gradient_collectives.py"}] * 2
