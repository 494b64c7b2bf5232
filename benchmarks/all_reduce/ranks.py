"""What each rank of `measure.py` runs: all contestants in turn, in one process, every result checked.

    mpiexec -n 2 python -m mpi4py benchmarks/all_reduce/ranks.py JOB.json

Phases: form an MPI world, a paceline group and a gloo group of the same processes; at each size check what everybody
computes, then let them take turns; rank 0 writes the slowest rank's times.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from figures import ARENA, BEST, COPY, COPY_ALONE, GLOO, HALVES, MPICH, ORDINARY, PASS, contestants_at
from mpi4py import MPI

from bench_harness.turns import InterleavedTimes
from paceline.tools.bench.collectives import exact_buffers
from paceline.tools.bench.turn_statistics import turn_order


class Ranks:
    """The processes that take part, as an MPI world, a paceline group (torch's default group) and a gloo group."""

    def __init__(self, rendezvous: str) -> None:
        self.mpi = MPI.COMM_WORLD
        self.rank, self.size = self.mpi.rank, self.mpi.size
        dist.init_process_group(
            "paceline", init_method=f"file://{rendezvous}", rank=self.rank, world_size=self.size
        )
        self.ours, self.gloo = dist.group.WORLD, dist.new_group(backend="gloo")

    def rest(self) -> None:
        """Sleep until all ranks are here: gloo's barrier."""
        dist.barrier(group=self.gloo)


@dataclass(frozen=True)
class Contestant:
    """One way to do it.

    Attributes:
        run: does it once, in `buffer`.
        meet: the barrier at which an iteration begins.
        buffer: what it reduces, or copies to.
        source: what it copies from; None: it is an all-reduce, or makes of ones what an all-reduce makes of them.
        alone: rank 0 does it while the others sleep.
        shares: False: no rank needs another one's numbers.
    """

    run: Callable[[], object]
    meet: Callable[[], object]
    buffer: torch.Tensor
    source: torch.Tensor | None = None
    alone: bool = False
    shares: bool = True


def contestants(ranks: Ranks, numel: int) -> dict[str, Contestant]:
    """Return everybody, on two buffers: an ordinary tensor, and one that the backend allocated.

    Each begins at its own library's barrier, after which it is fastest: after another one, gloo's threads sleep
    deeper and MPI's ranks start apart.
    """
    ordinary = torch.zeros(numel)
    arena = ranks.ours.allocate_tensor(numel)
    memory, halves = ordinary.numpy(), ordinary.chunk(2)

    def reduce_halves() -> None:
        for work in [dist.all_reduce(half, group=ranks.gloo, async_op=True) for half in halves]:
            work.wait()

    everybody = {
        GLOO: Contestant(lambda: dist.all_reduce(ordinary, group=ranks.gloo), ranks.rest, ordinary),
        HALVES: Contestant(reduce_halves, ranks.rest, ordinary),
        ORDINARY: Contestant(lambda: dist.all_reduce(ordinary), dist.barrier, ordinary),
        ARENA: Contestant(lambda: dist.all_reduce(arena), dist.barrier, arena),
        MPICH: Contestant(lambda: ranks.mpi.Allreduce(MPI.IN_PLACE, memory), ranks.mpi.Barrier, ordinary),
        COPY: Contestant(lambda: arena.copy_(ordinary), dist.barrier, arena, ordinary),
        COPY_ALONE: Contestant(lambda: arena.copy_(ordinary), dist.barrier, arena, ordinary, alone=True),
        PASS: Contestant(lambda: arena.mul_(ranks.size), dist.barrier, arena, shares=False),
    }
    return {name: everybody[name] for name in contestants_at(ordinary.nbytes)}


def check(ranks: Ranks, name: str, contestant: Contestant) -> None:
    """Run it once on numbers that differ between places and ranks, and look at every place of what comes out."""
    copies = contestant.source is not None
    exact_buffers.write_pattern(contestant.source if copies else contestant.buffer, ranks.rank)
    time_calls(ranks, contestant, 1)
    if contestant.alone and ranks.rank:
        return
    right = (
        exact_buffers.holds_pattern(contestant.buffer, ranks.rank)
        if copies
        else exact_buffers.holds_sum(contestant.buffer, ranks.size)
    )
    if not right:
        raise RuntimeError(f"{name} is wrong at {contestant.buffer.nbytes} bytes")


def turn(ranks: Ranks, name: str, contestant: Contestant, calls: int) -> list[float]:
    """Return what each of `calls` iterations took on this rank, and check what they made of ones (or copied)."""
    contestant.buffer.fill_(1.0)
    if contestant.source is not None:
        contestant.source.fill_(2.0)
    seconds = time_calls(ranks, contestant, calls)
    expected = 2.0 if contestant.source is not None else float(ranks.size) ** calls
    if not (contestant.alone and ranks.rank) and not exact_buffers.all_equal(contestant.buffer, expected):
        raise RuntimeError(f"{name} is wrong at {contestant.buffer.nbytes} bytes after {calls} calls")
    return seconds


def time_calls(ranks: Ranks, contestant: Contestant, calls: int) -> list[float]:
    """Return what each of `calls` iterations took on this rank."""
    absent = contestant.alone and ranks.rank > 0
    seconds = []
    for _ in range(calls):
        contestant.meet()
        started = time.perf_counter()
        if not absent:
            contestant.run()
        seconds.append(time.perf_counter() - started)
        if contestant.alone:
            ranks.rest()
    return seconds


def measure(ranks: Ranks, nbytes: int, rounds: int, calls: int) -> dict[str, Any]:
    """Return the times of all contestants at one size."""
    everybody = contestants(ranks, nbytes // 4)
    for name, contestant in everybody.items():
        if contestant.shares:
            check(ranks, name, contestant)
        _tick(ranks)
    names = list(everybody)
    seconds = np.zeros((len(names), rounds, calls))
    gc.collect()
    gc.disable()
    for number in range(rounds):
        for index in turn_order(len(names), number):
            seconds[index, number] = turn(ranks, names[index], everybody[names[index]], calls)
            _tick(ranks)
    gc.enable()
    ranks.mpi.Allreduce(MPI.IN_PLACE, seconds, op=MPI.MAX)
    times = InterleavedTimes.of(nbytes, dict(zip(names, seconds.tolist(), strict=True)))
    return times.with_best(BEST, [GLOO, HALVES]).to_json()


def _tick(ranks: Ranks) -> None:
    if ranks.rank == 0:
        print("tick", flush=True)


def main(job_file: str) -> None:
    """Do the job that a file describes."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    ranks = Ranks(job["rendezvous"])
    rows = [measure(ranks, *size) for size in job["sizes"]]
    if ranks.rank == 0:
        Path(job["out"]).write_text(json.dumps(rows), encoding="utf-8")
    ranks.rest()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
