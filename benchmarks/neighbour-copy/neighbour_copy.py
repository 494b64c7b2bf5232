"""A step with a sharded optimizer that keeps a copy of its neighbour's shard, against one without.

    python benchmarks/neighbour-copy/neighbour_copy.py run
    python benchmarks/neighbour-copy/neighbour_copy.py table

Ranks on one thread each train two copies of a GPT, one of each way, with clipping and virtual ranks. In every round
both ways take a turn of a few steps in the same processes.
"""

from __future__ import annotations

from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
from typer import Option

import paceline
from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from bench_harness.ranks import gather
from bench_harness.turns import alternating, ratio_of, seconds_of, take_turns
from paceline.data.leaf_random import seed_leaf
from paceline.parallel.data_parallel import DataParallel
from paceline.tools.bench.step.strategy_trainers import random_batch
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.models.gpt import GPT, token_loss
from paceline.tools.models.gpt_sizes import gpt_size
from paceline.tools.models.token_windows import TokenBatch
from paceline.world import init, shutdown

CASES = [  # model, ranks, backend, optimizer
    ("tiny", 2, "paceline", "adamw"),
    ("mini", 2, "paceline", "adamw"),
    ("mini", 2, "paceline", "muon and adamw"),
    ("mini", 4, "paceline", "adamw"),
    ("mini", 2, "gloo", "adamw"),
    ("mini", 4, "gloo", "adamw"),
]
COPY, PLAIN = "with the copy", "without"
STEPS, CONTEXT, WINDOWS = 4, 128, 4

bench = Benchmark(__file__)

_Optimizers = list[torch.optim.Optimizer]


@bench.run
def run(
    rounds: Annotated[int, Option(min=1, help="Turns of each way.")] = 24,
    json_file: JsonOption = None,
) -> None:
    """Measure steps of both ways on one host."""
    path = bench.output(json_file, "neighbour-copy")
    found = []
    for model, ranks, backend, optimizer in CASES:
        case = {"model": model, "ranks": ranks, "backend": backend, "optimizer": optimizer}
        title = f"{model}, {ranks} ranks, {backend}, {optimizer}"
        seconds = bench.start_ranks(case | {"rounds": rounds}, ranks, turns=2 * rounds, title=title)
        found.append(case | {"seconds": seconds})
    settings = {"rounds": rounds, "steps": STEPS, "context": CONTEXT, "windows": WINDOWS}
    bench.write(path, "neighbour-copy", settings, cases=found)


@bench.rank
def rank(job: dict[str, Any]) -> dict[str, list[float]] | None:
    """Return the seconds per step by way and round, of the slowest rank."""
    world = init(job["backend"])
    size = gpt_size(job["model"])
    batch = random_batch(size, WINDOWS, CONTEXT, world.rank, world.device)
    ways = {way: build(size, job["optimizer"], world.size, copy=way == COPY) for way in (COPY, PLAIN)}

    def turn(way: str) -> float:
        dist.barrier()
        measured = [seconds_of(lambda: run_step(*ways[way], batch, world.rank)) for _ in range(STEPS)]
        return median(max(each) for each in zip(*gather(measured), strict=True))

    for _ in range(2):
        for way in ways:
            turn(way)
    turns = {COPY: lambda: turn(COPY), PLAIN: lambda: turn(PLAIN)}
    seconds = take_turns(turns, job["rounds"], bench.tick, order=alternating)
    shutdown()
    return seconds if world.rank == 0 else None


def build(size: Any, optimizer: str, ranks: int, *, copy: bool) -> tuple[DataParallel, _Optimizers]:
    """Return a model and its optimizers."""
    torch.manual_seed(0)
    model = DataParallel(GPT(size), sync="sharded", virtual_ranks=ranks)
    matrices, rest = paceline.matrix_parameters(model)
    optimizers = []
    if optimizer == "adamw":
        rest = [*matrices, *rest]
    else:
        optimizers.append(paceline.ShardedOptimizer(model, torch.optim.Muon, matrices, lr=1e-3))
    optimizers.append(paceline.ShardedOptimizer(model, torch.optim.AdamW, rest, lr=3e-4, fused=True))
    if copy:
        for each in optimizers:
            each.keep_copy()
    return model, list(optimizers)


def run_step(model: DataParallel, optimizers: _Optimizers, batch: TokenBatch, leaf: int) -> None:
    """Run a step, until all parameters are there."""
    seed_leaf(0, 0, model.engine.step, leaf)
    model.backward(token_loss(model(batch.inputs), batch.targets), samples=len(batch.inputs))
    model.clip_grad_norm_(1.0)
    for each in optimizers:
        each.step()
    for each in optimizers:
        each.zero_grad()


def row(case: dict[str, Any]) -> list[str]:
    """Return the cells of a case."""
    seconds = case["seconds"]
    ratio = ratio_of(seconds[COPY], seconds[PLAIN])
    times = [f"{1e3 * median(seconds[way]):.1f}" for way in (PLAIN, COPY)]
    what = [case["model"], str(case["ranks"]), case["backend"], case["optimizer"]]
    return [*what, *times, f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"]


@bench.tables
def tables() -> dict[str, str]:
    """Return the table of all cases."""
    titles = ["model", "ranks", "backend", "optimizer", f"{PLAIN}, ms", f"{COPY}, ms", "ratio"]
    return {"steps": table(titles, [row(case) for case in bench.read("neighbour-copy")["cases"]], words=4)}


if __name__ == "__main__":
    bench.main()
