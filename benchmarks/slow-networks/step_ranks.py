"""What each rank of `step.py` runs: all contestants in turn, in one process.

    torchrun … benchmarks/slow-networks/step_ranks.py JOB.json

Phases: form a paceline group and a gloo group of the same processes; build every contestant and warm it up; let them
take turns; hold the parameters of all ranks against each other; rank 0 writes the slowest rank's seconds and what
each host's interface counted.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contestants import CONTESTANTS, Contestant, Stage
from workload import batch_of, digest_of

from paceline.testing.netlab.lab_network import InterfaceBytes, parse_traffic
from paceline.tools.bench.step.step_worker import print_tick
from paceline.tools.bench.turn_statistics import turn_order


@dataclass(frozen=True)
class Job:
    """What to measure: names of contestants, rounds, the steps of one turn at least, where rank 0 writes."""

    names: list[str]
    rounds: int
    steps: int
    out: str


def steps_of(contestant: Contestant, least: int) -> int:
    """Return how many steps a turn has: whole rounds of the contestant, and at least so many.

    A turn of one step would begin at a barrier each time, where no step can run into the next.
    """
    return -(-least // contestant.every) * contestant.every


def turn(contestant: Contestant, steps: int) -> tuple[float, InterfaceBytes]:
    """Return the seconds and the bytes that a turn of so many steps takes on this rank, both per step."""
    dist.barrier()
    before, started = _traffic(), time.perf_counter()
    for _ in range(steps):
        contestant.step()
    seconds = time.perf_counter() - started
    dist.barrier()  # before it all bytes of the others' turn have come
    passed = _traffic() - before
    return seconds / steps, InterfaceBytes(passed.sent // steps, passed.received // steps)


def measure(everybody: dict[str, Contestant], job: Job) -> dict[str, dict[str, Any]]:
    """Return, by contestant, seconds per step of each round, bytes [sent, received] of each host and round."""
    names, ranks = list(everybody), dist.get_world_size()
    seconds = torch.zeros(len(names), job.rounds, dtype=torch.float64)
    passed = torch.zeros(len(names), job.rounds, ranks, 2, dtype=torch.float64)
    gc.collect()
    gc.disable()
    for number in range(job.rounds):
        for index in turn_order(len(names), number):
            contestant = everybody[names[index]]
            seconds[index, number], traffic = turn(contestant, steps_of(contestant, job.steps))
            passed[index, number, dist.get_rank()] = torch.tensor([traffic.sent, traffic.received])
            print_tick()
    gc.enable()
    for table in (seconds, passed):
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return {
        name: {
            "seconds": seconds[index].tolist(),
            "passed": passed[index].tolist(),
            "expected_sent": contestant.sent,
            "every": contestant.every,
        }
        for index, (name, contestant) in enumerate(everybody.items())
    }


def check_equal(name: str, contestant: Contestant) -> None:
    """Raise unless what shall be equal on all ranks is, bit for bit."""
    agreed = contestant.model.parameters() if contestant.agreed is None else contestant.agreed()
    digests: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(digests, digest_of(agreed))
    if contestant.equal != (len(set(digests)) == 1):
        told = "differ" if contestant.equal else "are equal, though nothing was exchanged"
        raise RuntimeError(f"{name}: after whole rounds the parameters of the ranks {told}")


def build(stage: Stage, job: Job) -> dict[str, Contestant]:
    """Return all contestants that take part, warm: a first round, and the buckets that DDP lays anew after it."""
    everybody = {}
    for name in job.names:
        everybody[name] = CONTESTANTS[name](stage)
        turn(everybody[name], steps_of(everybody[name], 2))
        print_tick()
    return everybody


def _traffic() -> InterfaceBytes:
    return parse_traffic(Path("/proc/net/dev").read_text())


def main(job_file: str) -> None:
    """Do the job that a file describes."""
    job = Job(**json.loads(Path(job_file).read_text(encoding="utf-8")))
    torch.set_num_threads(1)
    dist.init_process_group("paceline")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gloo = dist.new_group(backend="gloo")
    assert isinstance(gloo, dist.ProcessGroup)
    everybody = build(Stage(rank, ranks, batch_of(rank), gloo), job)
    rows = measure(everybody, job)
    for name, contestant in everybody.items():
        check_equal(name, contestant)
    if rank == 0:
        Path(job.out).write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
