"""A sharded step whose parameters are gathered during the next forward, against one that waits for them in `step()`.

    python benchmarks/parameter-gather/gather.py run      (as root, on Linux: plays the hosts with
                                                           `paceline.testing.netlab`)
    python benchmarks/parameter-gather/gather.py table

Two ranks on one thread each. In every round both ways take a turn of a few steps in the same processes; a turn begins
with a step that does not count, so that what a step leaves in flight delays one that does.
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
from paceline.parallel.data_parallel import DataParallel
from paceline.tools.bench.step.strategy_trainers import random_batch
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.models.gpt import GPT, token_loss
from paceline.tools.models.gpt_sizes import gpt_size
from paceline.tools.models.token_windows import TokenBatch
from paceline.world import init, shutdown

CASES = [  # rate of links, backend, windows of a rank
    (None, "paceline", 2),
    (None, "gloo", 2),
    ("5Gbit/s", "gloo", 2),
    ("1Gbit/s", "paceline", 2),
    ("1Gbit/s", "gloo", 2),
    ("1Gbit/s", "gloo", 8),
]
LATER, AT_ONCE = "in the next forward", "in step()"
STEPS, CONTEXT = 2, 64

bench = Benchmark(__file__)


@bench.run
def run(
    model: Annotated[str, Option(help="Size of the model.")] = "44m",
    rounds: Annotated[int, Option(min=1, help="Turns of each way.")] = 12,
    json_file: JsonOption = None,
) -> None:
    """Measure steps of both ways, on one host and over slower links."""
    path = bench.output(json_file, "gather")
    found = []
    for rate, backend, windows in CASES:
        case = {"model": model, "rate": rate, "backend": backend, "windows": windows}
        title = f"{model}, {backend}, {rate or 'one host'}"
        seconds = bench.start_ranks(case | {"rounds": rounds}, 2, rate=rate, turns=2 * rounds, title=title)
        found.append(case | {"seconds": seconds})
    bench.write(path, "gather", {"rounds": rounds, "steps": STEPS, "context": CONTEXT}, cases=found)


@bench.rank
def rank(job: dict[str, Any]) -> dict[str, list[list[float]]] | None:
    """Return the seconds of forward, backward and update by way and round, of the rank whose step was slowest."""
    world = init(job["backend"])
    size = gpt_size(job["model"])
    batch = random_batch(size, job["windows"], CONTEXT, world.rank, world.device)
    torch.manual_seed(0)
    model = DataParallel(GPT(size), sync="sharded")
    optimizer = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=3e-4, eps=1e-3, fused=True)

    def turn(later: bool) -> list[float]:
        dist.barrier()
        measured = [run_step(model, optimizer, batch, later) for _ in range(1 + STEPS)][1:]
        model.wait_for_parameters()
        each = gather(measured)
        slowest = [max((parts[at] for parts in each), key=sum) for at in range(STEPS)]
        return [median(phases) for phases in zip(*slowest, strict=True)] + [median(map(sum, slowest))]

    for _ in range(2):
        turn(later=False)
    turns = {LATER: lambda: turn(later=True), AT_ONCE: lambda: turn(later=False)}
    seconds = take_turns(turns, job["rounds"], bench.tick, order=alternating)
    shutdown()
    return seconds if world.rank == 0 else None


def run_step(
    model: DataParallel, optimizer: torch.optim.Optimizer, batch: TokenBatch, later: bool
) -> list[float]:
    """Run a step and return the seconds of its phases on this rank."""
    losses = list[torch.Tensor]()
    forward = seconds_of(lambda: losses.append(token_loss(model(batch.inputs), batch.targets)))
    backward = seconds_of(lambda: model.backward(losses.pop()))

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()
        if not later:
            model.wait_for_parameters()

    return [forward, backward, seconds_of(update)]


def row(case: dict[str, Any]) -> list[str]:
    """Return the cells of a case."""
    later, at_once = case["seconds"][LATER], case["seconds"][AT_ONCE]
    times = [f"{1e3 * median(turn[at] for turn in way):.0f}" for way in (at_once, later) for at in (3, 0, 2)]
    ratio = ratio_of([turn[3] for turn in later], [turn[3] for turn in at_once])
    return [
        case["rate"] or "one host",
        case["backend"],
        str(case["windows"]),
        *times,
        f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})",
    ]


@bench.tables
def tables() -> dict[str, str]:
    """Return the table of all cases."""
    titles = ["links", "backend", "windows"]
    titles += [f"{way}: {what}" for way in (AT_ONCE, LATER) for what in ("step, ms", "forward", "update")]
    return {
        "gather": table(
            [*titles, "ratio of steps"], [row(case) for case in bench.read("gather")["cases"]], words=3
        )
    }


if __name__ == "__main__":
    bench.main()
