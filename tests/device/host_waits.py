"""Program of two ranks over NCCL: steps in which nothing may wait for the GPU: ``host_waits.py DEVICE OUT.json``.

Writes, for every case, where torch found the host waiting for the device (``set_sync_debug_mode``), or ""; what a
backward raises that fails on rank 1; and how many steps were skipped with NaN on rank 1, and what they changed.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import on_device as on
import torch
from two_ranks import STRATEGIES, start

import paceline

WARM_UP, STEPS = 9, 6
"""The first steps build the buckets, make the optimizer's state, and are read in time."""

COMPRESSIONS = {
    "bf16": paceline.Compression("bf16"),
    "int8": paceline.Compression("int8"),
    "int4": paceline.Compression("int4"),
    "topk": paceline.Compression("topk", keep=0.1),
    "topk-int2": paceline.Compression("topk-int2"),
    "powersgd": paceline.Compression("powersgd", rank=2),
}
LOOPS = {
    "LocalSGD": lambda *given: paceline.LocalSGD(*given, every=3, compression="int8"),
    "DiLoCo": lambda *given: paceline.DiLoCo(*given, every=3, warmup=3, delay=1),
}
Step = Callable[[int], object]


def wrapped(rank: int, device: str, guarded: bool = False, **options: object) -> Step:
    """Return a step with accumulation, unequal samples and clipping."""
    model = paceline.DataParallel(on.build("Plain", device).float(), **options)
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=on.RATE, fused=True)
    if guarded:
        paceline.NonFiniteGuard(model, optim, "skip")
    batches = [[each.float() for each in on.batch(number, [rank], device)] for number in range(2)]

    def step(number: int) -> None:
        with model.accumulate():
            model.backward(on.loss_of(model, *batches[0]), samples=on.SAMPLES + rank)
        model.backward(on.loss_of(model, *batches[1]), samples=on.SAMPLES + number % 3)
        model.clip_grad_norm_(1.0)
        optim.step()
        optim.zero_grad()

    return step


def with_muon(rank: int, device: str, **options: object) -> Step:
    """Return a step of Muon on hidden matrices and AdamW on the rest."""
    model = paceline.DataParallel(on.build("Plain", device).float(), **options)
    matrices, rest = paceline.matrix_parameters(model)
    muon = paceline.ShardedOptimizer(model, torch.optim.Muon, matrices, lr=on.RATE)
    adamw = paceline.ShardedOptimizer(model, torch.optim.AdamW, rest, lr=on.RATE, fused=True)
    inputs, targets = (each.float() for each in on.batch(0, [rank], device))

    def step(number: int) -> None:
        model.backward(on.loss_of(model, inputs, targets), samples=on.SAMPLES)
        for optim in (muon, adamw):
            optim.step()
            optim.zero_grad()

    return step


def with_masters(rank: int, device: str, **options: object) -> Step:
    """Return a step of a bfloat16 model whose optimizer updates float32 copies."""
    model = paceline.DataParallel(on.build("Plain", device).bfloat16(), **options)
    optim = paceline.ShardedOptimizer(
        model,
        torch.optim.AdamW,
        lr=on.RATE,
        fused=True,
        master_dtype=torch.float32,
        stochastic_rounding=True,
    )
    inputs, targets = (each.bfloat16() for each in on.batch(0, [rank], device))

    def step(number: int) -> None:
        model.backward(on.loss_of(model, inputs, targets), samples=on.SAMPLES)
        optim.step()
        optim.zero_grad()

    return step


def local(rank: int, device: str, name: str) -> Step:
    """Return a step of a bare model that is averaged every few steps."""
    model = on.build("Plain", device).float()
    optim = torch.optim.AdamW(model.parameters(), lr=on.RATE)
    LOOPS[name](model, optim)
    inputs, targets = (each.float() for each in on.batch(0, [rank], device))

    def step(number: int) -> None:
        on.loss_of(model, inputs, targets).backward()
        optim.step()
        optim.zero_grad()

    return step


def waits(step: Step) -> str:
    """Return where the host waits for the device after the first steps, or ""."""
    for number in range(WARM_UP):
        step(number)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(WARM_UP, WARM_UP + STEPS):
            step(number)
    except RuntimeError:
        return traceback.format_exc()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


class Fails(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        raise FloatingPointError("injected")


def failure(rank: int, device: str) -> list[str]:
    """Return what the failing step and the two after it raise."""
    model = paceline.DataParallel(on.build("Plain", device))
    optim = torch.optim.AdamW(model.parameters(), lr=on.RATE)
    inputs, targets = on.batch(0, [rank], device)
    found = []
    for number in range(WARM_UP + 3):
        loss = on.loss_of(model, inputs, targets)
        try:
            model.backward(Fails.apply(loss) if rank == 1 and number == WARM_UP else loss, samples=on.SAMPLES)
            optim.step()
            optim.zero_grad()
            found.append("")
        except (FloatingPointError, paceline.PacelineError) as error:
            found.append(f"{type(error).__name__} {getattr(error, 'step', None)}")
    assert not any(found[:WARM_UP])
    return found[WARM_UP:]


def skipped(rank: int, device: str) -> tuple[int, float]:
    """Return the skipped steps, and the largest change of a parameter by a step with NaN."""
    model = paceline.DataParallel(on.build("Plain", device))
    optim = torch.optim.AdamW(model.parameters(), lr=on.RATE, fused=True)
    guard = paceline.NonFiniteGuard(model, optim, "skip")
    inputs, targets = on.batch(0, [rank], device)
    change = 0.0
    for number in range(WARM_UP + 3):
        bad = number == WARM_UP
        before = [param.detach().clone() for param in model.parameters()]
        loss = on.loss_of(model, inputs, targets)
        model.backward(loss * math.nan if bad and rank == 1 else loss, samples=on.SAMPLES)
        optim.step()
        optim.zero_grad()
        if bad:
            change = on.max_difference(before, list(model.parameters()))
    return guard.skipped, change


def main(device: str, out: str) -> None:
    """Do all of it."""
    world = start("nccl", device)
    cases = {name: wrapped(world.rank, world.device, sync=name) for name in STRATEGIES}
    cases["guard"] = wrapped(world.rank, world.device, guarded=True)
    for shard in ("none", "optimizer"):
        for name, compression in COMPRESSIONS.items():
            sync = paceline.Sync(compression=compression, shard=shard)
            cases[f"{name}, shard {shard}"] = wrapped(world.rank, world.device, sync=sync)
    cases["Muon"] = with_muon(world.rank, world.device, sync="sharded")
    cases["Muon, zero2"] = with_muon(world.rank, world.device, sync="zero2")
    cases["masters"] = with_masters(world.rank, world.device, sync="sharded")
    cases["masters, bucketed"] = with_masters(world.rank, world.device, sync="bucketed")
    cases |= {name: local(world.rank, world.device, name) for name in LOOPS}
    found: dict[str, object] = {name: waits(step) for name, step in cases.items()}
    found["failure"] = failure(world.rank, world.device)
    found["skipped"] = skipped(world.rank, world.device)
    Path(f"{out}.{world.rank}").write_text(json.dumps(found), encoding="utf-8")
    paceline.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
