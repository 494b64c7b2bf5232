"""One case: contestants are checked, warmed up, timed in turns and checked again, on every rank.

[Note: start] An iteration begins at a barrier of the contestant's own group, the smallest collective that it has. A
rank that comes late would otherwise be counted as the operation's time on all the others. Two things it can't do.
Ranks leave a barrier apart from each other, by about what a message takes (20 to 100 µs on a loaded machine), and that
difference is part of the measured time: for the smallest sizes read it as an upper bound. And it leaves the library
awake: connections polled, threads running. A program that computes for a while between collectives may wait longer.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline.tools.bench.collectives.backend_calls import Carrier, Contestant, call_of
from paceline.tools.bench.collectives.benchmark_cases import TURNS, Case, iterations_for, turns_of
from paceline.tools.bench.collectives.benchmarked_backends import backend_of
from paceline.tools.bench.collectives.collectives_rows import Row, summarize
from paceline.tools.bench.collectives.collectives_settings import CollectiveSettings
from paceline.tools.bench.collectives.exact_buffers import Buffers, allocate, fill, is_right
from paceline.tools.bench.turn_order import turn_order
from paceline.world import World

__all__ = ["Field", "measure_case"]


@dataclass(frozen=True)
class Field:
    """What all cases of a process set share.

    Attributes:
        world: this process's place; its default group, gloo, carries what is said about the measurement.
        settings: how to measure.
        carriers: the backends that are open, by name.
    """

    world: World
    settings: CollectiveSettings
    carriers: Mapping[str, Carrier]


def measure_case(field: Field, case: Case, tick: Callable[[], None]) -> list[Row]:
    """Measure a case and return its rows on rank 0, none elsewhere; `tick` is called `TURNS` times.

    All ranks must call it with the same case.
    """
    everybody = _contestants(field, case)
    before = [_check(each) for each in everybody]
    once = [_warm_up(each, field.settings.warmup) for each in everybody]
    iterations = iterations_for(field.settings, _slowest(once))
    mine = _take_turns(everybody, turns_of(iterations), tick)
    after = [
        _check(each) for each in everybody
    ]  # whatever came before: a rank that stayed out would be waited for
    right = torch.tensor([before, after], dtype=torch.float64).amin(dim=0).view(-1, 1)
    told = torch.cat([mine, right], dim=1)
    every = _gather(field.world, told)
    if every is None:
        return []
    seconds, verdicts = every[:, :, :-1], every[:, :, -1]  # [rank, contestant, iteration], [rank, contestant]
    return [
        Row(
            backend=each.carrier.name,
            op=case.op,
            ranks=case.ranks,
            nbytes=case.nbytes,
            dtype=field.settings.dtype,
            times=summarize(seconds[:, at].T.tolist()),
            correct=bool(verdicts[:, at].all()),
        )
        for at, each in enumerate(everybody)
    ]


def _contestants(field: Field, case: Case) -> list[Contestant]:
    """Return who takes part; those whose buffers are alike share them."""
    dtype, world = getattr(torch, field.settings.dtype), field.world
    shared: dict[tuple[str, bool, bool], Buffers] = {}
    found = []
    for name in case.backends:
        carrier, kind = field.carriers[name], backend_of(name).buffers_for(case.op)
        if kind not in shared:
            numel, new = case.nbytes // field.settings.itemsize, carrier.allocator(dtype)
            shared[kind] = allocate(case.op, world.rank, world.size, numel, new, in_place=kind[2])
        found.append(Contestant(carrier, shared[kind], call_of(carrier, shared[kind])))
    return found


def _check(contestant: Contestant) -> bool:
    """Run it once on numbers that show what went where; return whether this rank got the right ones."""
    fill(contestant.buffers)
    contestant.carrier.meet()
    contestant.run()
    contestant.carrier.finish()
    return is_right(contestant.buffers)


def _warm_up(contestant: Contestant, calls: int) -> float:
    """Return what the last of some calls took on this rank; afterwards the buffers hold zeros.

    Zeros stay zeros under every operation, however often it is repeated in place.
    """
    contestant.buffers.given.zero_()
    contestant.buffers.taken.zero_()
    return [_timed(contestant) for _ in range(calls)][-1]


def _take_turns(
    everybody: Sequence[Contestant], turns: Sequence[int], tick: Callable[[], None]
) -> torch.Tensor:
    """Return this rank's seconds ``[contestant, iteration]`` in float64."""
    seconds: list[list[float]] = [[] for _ in everybody]
    gc.collect()
    gc.disable()
    try:
        for number, calls in enumerate(turns):
            for index in turn_order(len(everybody), number):
                everybody[
                    index
                ].buffers.given.zero_()  # after another one's turn: in this rank's caches again
                seconds[index] += [_timed(everybody[index]) for _ in range(calls)]
            for _ in range(number * TURNS // len(turns), (number + 1) * TURNS // len(turns)):
                tick()
    finally:
        gc.enable()
    return torch.tensor(seconds, dtype=torch.float64)


def _timed(contestant: Contestant) -> float:
    """Return what one call took on this rank; see [Note: start]."""
    contestant.carrier.meet()
    started = time.perf_counter()
    contestant.run()
    contestant.carrier.finish()
    return time.perf_counter() - started


def _slowest(seconds: Sequence[float]) -> list[float]:
    """Return for each number the largest of all ranks, the same on every rank."""
    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.tolist()


def _gather(world: World, mine: torch.Tensor) -> torch.Tensor | None:
    """Return all ranks' tensors, stacked, on rank 0; None elsewhere.

    One gather of tensors whose shape all ranks know: nothing is pickled, and no rank waits for another's size.
    """
    every = [torch.empty_like(mine) for _ in range(world.size)] if world.rank == 0 else None
    dist.gather(mine, every, dst=0)
    return None if every is None else torch.stack(every)
