"""What each rank of `measure.py` runs: all-reduces of several sizes, and training steps of several strategies in turn.

    torchrun … benchmarks/simulate/ranks.py JOB.json

Rank 0 writes, for all-reduces, the median over calls of the slowest rank's time; for strategies, the slowest rank's
seconds a step of each round, computing alone among them, and what hosts are like that share this machine.
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
from strategies import ALONE, STRATEGIES

import paceline
from paceline.cost_model.profile_entries import Source
from paceline.parallel.comm import Comm
from paceline.tools.bench.step.step_worker import print_tick
from paceline.tools.bench.step_parts.contention import measure_contention
from paceline.tools.bench.step_parts.exchange_times import Exchanger
from paceline.tools.bench.step_parts.model_compute_times import WrappedModel, measure_model_step
from paceline.tools.bench.step_parts.training_workload import reference_workload
from paceline.tools.bench.turn_statistics import turn_order
from paceline.tools.models.gpt import GPT, token_loss
from paceline.tools.models.gpt_sizes import gpt_size

Step = Callable[[], object]


def all_reduces(sizes: list[int], calls: int) -> dict[int, float]:
    """Return by size the median over calls of the slowest rank's seconds."""
    found = {}
    for nbytes in sizes:
        buffer, seconds = torch.zeros(nbytes // 4), torch.zeros(calls, dtype=torch.float64)
        for call in range(-1, calls):  # the first one warms up
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(buffer)
            if call >= 0:
                seconds[call] = time.perf_counter() - started
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        found[nbytes] = median(seconds.tolist())
        print_tick()
    return found


def contestant(name: str, job: dict[str, Any]) -> Step:
    """Return one training step of a strategy, warm; each has a model of its own."""
    torch.manual_seed(0)
    size = gpt_size(job["model"])
    net = GPT(size)
    tokens = torch.randint(
        size.vocabulary, (job["batch"], size.context + 1), generator=torch.Generator().manual_seed(1)
    )
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    strategy = STRATEGIES[name]
    model = net if strategy is None else paceline.DataParallel(net, sync=strategy.sync)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        token_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):  # learns the order of the buckets
        step()
    return step


def host(job: dict[str, Any]) -> dict[str, float]:
    """Return what the computing of a step and exchanges do to each other, and the share of it that is backward."""
    size = gpt_size(job["model"])
    workload = reference_workload(size, job["batch"], size.context, "cpu")
    source = Source("benchmarks/simulate/measure.py", "")
    step = measure_model_step(workload, "cpu", job["steps"] * job["rounds"], source)
    exchanger, wrapped = Exchanger("paceline", "gloo", Comm(), "cpu"), WrappedModel(workload, "cpu")
    beside = measure_contention(
        exchanger, "all-reduce", wrapped, step, network="lab", rounds=job["rounds"], source=source
    )
    whole = step.forward + step.backward + step.optimizer
    return {
        "backward": step.backward / whole,
        "computing_slows": beside.computing_slows,
        "calls_slow": beside.calls_slow,
    }


def turn(step: Step, steps: int) -> float:
    """Return the seconds a step of a turn takes on this rank."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - started) / steps


def strategies(job: dict[str, Any]) -> dict[str, Any]:
    """Return by strategy, for each round, the slowest rank's seconds a step, and what hosts are like."""
    names = [ALONE, *job["strategies"]]
    steps = {name: contestant(name, job) for name in names}
    print_tick()
    rounds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    for number in range(job["rounds"]):
        for index in turn_order(len(names), number):
            slowest = torch.tensor(turn(steps[names[index]], job["steps"]), dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            rounds[names[index]].append(float(slowest))
            print_tick()
    gc.enable()
    measured = host(job)
    print_tick()
    return {"rounds": rounds, "host": measured}


def main(job_file: str) -> None:
    """Do the job that a file describes."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    if job["sizes"]:
        found["all_reduce"] = all_reduces(job["sizes"], job["calls"])
    if job["strategies"]:
        found |= strategies(job)
    if dist.get_rank() == 0:
        Path(job["out"]).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
