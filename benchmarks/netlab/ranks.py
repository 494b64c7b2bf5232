"""What each rank of `measure.py` runs: all contestants in turn, in one process, every result checked.

    torchrun … benchmarks/netlab/ranks.py JOB.json

Phases: form a paceline group and a gloo group of the same processes; at each size check what everybody computes, then
let them take turns; rank 0 writes the slowest rank's times, and what the hosts' interfaces counted.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from figures import ARENA, BEST, GLOO, HALVES, ORDINARY, Row, contestants_at

from paceline.testing.netlab.lab_network import InterfaceBytes, parse_traffic
from paceline.tools.bench.collectives import exact_buffers
from paceline.tools.bench.step.step_worker import print_tick
from paceline.tools.bench.turn_statistics import InterleavedTimes, turn_order

Contestant = tuple[Callable[[], object], Callable[[], object], torch.Tensor]
"""How to all-reduce; the barrier of the same library, at which an iteration begins; what is reduced."""


def contestants(gloo: dist.ProcessGroup, nbytes: int) -> dict[str, Contestant]:
    """Return everybody, on two buffers: an ordinary tensor, and one that the backend allocated."""
    ordinary, arena = torch.zeros(nbytes // 4), dist.group.WORLD.allocate_tensor(nbytes // 4)
    halves = ordinary.chunk(2)

    def meet_gloo() -> None:
        dist.barrier(group=gloo)

    def reduce_halves() -> None:
        for work in [dist.all_reduce(half, group=gloo, async_op=True) for half in halves]:
            work.wait()

    everybody = {
        GLOO: (lambda: dist.all_reduce(ordinary, group=gloo), meet_gloo, ordinary),
        HALVES: (reduce_halves, meet_gloo, ordinary),
        ORDINARY: (lambda: dist.all_reduce(ordinary), dist.barrier, ordinary),
        ARENA: (lambda: dist.all_reduce(arena), dist.barrier, arena),
    }
    return {name: everybody[name] for name in contestants_at(nbytes)}


def turn(name: str, contestant: Contestant, calls: int) -> tuple[list[float], InterfaceBytes]:
    """Return what each of `calls` iterations took on this rank, and what its host sent and received meanwhile."""
    run, meet, buffer = contestant
    buffer.fill_(1.0)
    dist.barrier()
    before, seconds = _traffic(), []
    for _ in range(calls):
        meet()
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    dist.barrier()
    passed = _traffic() - before
    if not exact_buffers.all_equal(buffer, float(dist.get_world_size()) ** calls):
        raise RuntimeError(f"{name} is wrong at {buffer.nbytes} bytes after {calls} calls")
    return seconds, passed


def _traffic() -> InterfaceBytes:
    return parse_traffic(Path("/proc/net/dev").read_text())


def measure(gloo: dist.ProcessGroup, nbytes: int, rounds: int, calls: int) -> dict[str, Any]:
    """Return the times of all contestants at one size, and the bytes of the host that sent or received most."""
    everybody = contestants(gloo, nbytes)
    for name, (run, _, buffer) in everybody.items():
        exact_buffers.write_pattern(buffer, dist.get_rank())
        run()
        if not exact_buffers.holds_sum(buffer, dist.get_world_size()):
            raise RuntimeError(f"{name} is wrong at {nbytes} bytes")
        print_tick()
    names = list(everybody)
    seconds = torch.zeros(len(names), rounds, calls, dtype=torch.float64)
    passed = torch.zeros(len(names), rounds, 2, dtype=torch.float64)
    gc.collect()
    gc.disable()
    for number in range(rounds):
        for index in turn_order(len(names), number):
            times, traffic = turn(names[index], everybody[names[index]], calls)
            seconds[index, number] = torch.tensor(times)
            passed[index, number] = torch.tensor([traffic.sent / calls, traffic.received / calls])
            print_tick()
    gc.enable()
    for table in (seconds, passed):
        dist.all_reduce(table, op=dist.ReduceOp.MAX, group=gloo)
    times = InterleavedTimes.of(nbytes, dict(zip(names, seconds.tolist(), strict=True))).with_best(
        BEST, [GLOO, HALVES]
    )
    counted = {
        name: tuple(median(way) for way in zip(*turns, strict=True))
        for name, turns in zip(names, passed.tolist(), strict=True)
    }
    return Row(times, counted).to_json()


def main(job_file: str) -> None:
    """Do the job that a file describes."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    dist.init_process_group("paceline")
    gloo = dist.new_group(backend="gloo")
    rows = [measure(gloo, *size) for size in job["sizes"]]
    if dist.get_rank() == 0:
        Path(job["out"]).write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
