"""A step with as many virtual ranks as real ones, against one without.

    python benchmarks/virtual-ranks/virtual_ranks.py run
    python benchmarks/virtual-ranks/virtual_ranks.py table

Ranks on one thread each train two copies of a GPT, one of each way, with clipping. In every round both ways take a turn
of a few steps in the same processes. Both seed the random numbers of each micro-batch.
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

CASES = [  # model, ranks, backend, strategy
    ("tiny", 2, "paceline", "bucketed"),
    ("mini", 2, "paceline", "bucketed"),
    ("mini", 2, "paceline", "sharded"),
    ("mini", 4, "paceline", "bucketed"),
    ("mini", 2, "gloo", "bucketed"),
    ("mini", 2, "gloo", "sharded"),
]
VIRTUAL, REAL = "virtual ranks", "real ranks"
STEPS, CONTEXT, WINDOWS = 4, 128, 4

bench = Benchmark(__file__)


@bench.run
def run(
    rounds: Annotated[int, Option(min=1, help="Turns of each way.")] = 16,
    json_file: JsonOption = None,
) -> None:
    """Measure steps of both ways on one host."""
    path = bench.output(json_file, "virtual-ranks")
    found = []
    for model, ranks, backend, strategy in CASES:
        case = {"model": model, "ranks": ranks, "backend": backend, "strategy": strategy}
        title = f"{model}, {ranks} ranks, {backend}, {strategy}"
        seconds = bench.start_ranks(case | {"rounds": rounds}, ranks, turns=2 * rounds, title=title)
        found.append(case | {"seconds": seconds})
    settings = {"rounds": rounds, "steps": STEPS, "context": CONTEXT, "windows": WINDOWS}
    bench.write(path, "virtual-ranks", settings, cases=found)


@bench.rank
def rank(job: dict[str, Any]) -> dict[str, list[float]] | None:
    """Return the seconds per step by way and round, of the slowest rank."""
    world = init(job["backend"])
    size = gpt_size(job["model"])
    batch = random_batch(size, WINDOWS, CONTEXT, world.rank, world.device)
    ways = {
        way: build(size, job["strategy"], world.size if way == VIRTUAL else None) for way in (VIRTUAL, REAL)
    }

    def turn(way: str) -> float:
        dist.barrier()
        measured = [seconds_of(lambda: run_step(*ways[way], batch, world.rank)) for _ in range(STEPS)]
        return median(max(each) for each in zip(*gather(measured), strict=True))

    for _ in range(2):
        for way in ways:
            turn(way)
    turns = {VIRTUAL: lambda: turn(VIRTUAL), REAL: lambda: turn(REAL)}
    seconds = take_turns(turns, job["rounds"], bench.tick, order=alternating)
    shutdown()
    return seconds if world.rank == 0 else None


def build(size: Any, strategy: str, virtual: int | None) -> tuple[DataParallel, torch.optim.Optimizer]:
    """Return a model and its optimizer."""
    torch.manual_seed(0)
    model = DataParallel(GPT(size), sync=strategy, virtual_ranks=virtual)
    return model, paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=3e-4, fused=True)


def run_step(model: DataParallel, optimizer: torch.optim.Optimizer, batch: TokenBatch, leaf: int) -> None:
    """Run a step."""
    seed_leaf(0, 0, model.engine.step, leaf)
    model.backward(token_loss(model(batch.inputs), batch.targets), samples=len(batch.inputs))
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


def row(case: dict[str, Any]) -> list[str]:
    """Return the cells of a case."""
    seconds = case["seconds"]
    ratio = ratio_of(seconds[VIRTUAL], seconds[REAL])
    times = [f"{1e3 * median(seconds[way]):.1f}" for way in (REAL, VIRTUAL)]
    what = [case["model"], str(case["ranks"]), case["backend"], case["strategy"]]
    return [*what, *times, f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"]


@bench.tables
def tables() -> dict[str, str]:
    """Return the table of all cases."""
    titles = ["model", "ranks", "backend", "strategy", f"{REAL}, ms", f"{VIRTUAL}, ms", "ratio"]
    return {"steps": table(titles, [row(case) for case in bench.read("virtual-ranks")["cases"]], words=4)}


if __name__ == "__main__":
    bench.main()
