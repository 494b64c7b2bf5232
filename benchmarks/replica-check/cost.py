"""The cost of `paceline.ReplicaCheck` and `paceline.NonFiniteGuard`: a training step with and without them, in turns.

    python benchmarks/replica-check/cost.py run
    python benchmarks/replica-check/cost.py table

Two ranks train the `mini` GPT (2 windows of 64 tokens a rank, clipping, fused AdamW) on the default backend, with one
model and one optimizer per strategy. In each turn one of the two is hooked on and removed again. `ReplicaCheck`
compares after every step here, to be measurable; its default is every 200th. A turn's time is the slower rank's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
from typer import Option

import paceline
from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from bench_harness.turns import Ratio, alternating, ratios_to, seconds_of, take_turns
from paceline.parallel.engine.gradient_finite_check import peak_of
from paceline.parallel.replica_digests import tensor_digest
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.bench.step.strategy_trainers import random_batch
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.models.gpt import GPT, token_loss
from paceline.tools.models.gpt_sizes import gpt_size

RANKS, SIZE, BATCH, CONTEXT, STEPS = 2, "mini", 2, 64, 2
STRATEGIES = ("bucketed", "sharded")
NEITHER = "neither"

bench = Benchmark(__file__)


@bench.run
def run(
    rounds: Annotated[int, Option(min=1, help="Turns of each, for each strategy.")] = 120,
    json_file: JsonOption = None,
) -> None:
    """Time steps with and without, on two ranks."""
    path = bench.output(json_file, "cost")
    rows = bench.start_ranks({"rounds": rounds}, RANKS, timeout=1800)
    settings = {"ranks": RANKS, "size": SIZE, "batch_size": BATCH, "context": CONTEXT, "steps": STEPS}
    bench.write(path, "drift-cost", settings, packages=("paceline", "torch", "xxhash"), rows=rows)
    print(tables_of(rows)["cost"])


@bench.rank
def rank(job: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Time all strategies."""
    world, rounds = paceline.init(device="cpu"), job["rounds"]
    with ProgressBar("drift", (rounds + 1) * len(STRATEGIES), shown=world.rank == 0) as tick:
        rows = [measure(strategy, rounds, world.rank, tick) for strategy in STRATEGIES]
    paceline.shutdown()
    return rows if world.rank == 0 else None


def measure(strategy: str, rounds: int, rank: int, tick: Callable[[], object]) -> dict[str, Any]:
    """Return the seconds of a step in every turn, and the ratios to a step with neither."""
    torch.manual_seed(0)
    size = gpt_size(SIZE)
    model = paceline.DataParallel(GPT(size), sync=strategy)
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-4, fused=True)
    batch = random_batch(size, BATCH, CONTEXT, seed=rank, device="cpu")
    hooks: dict[str, Callable[[], Any]] = {
        NEITHER: lambda: None,
        "NonFiniteGuard": lambda: paceline.NonFiniteGuard(model, optim),
        "NonFiniteGuard, source=False": lambda: paceline.NonFiniteGuard(model, optim, source=False),
        "ReplicaCheck, every step": lambda: paceline.ReplicaCheck(model, optim, every=1),
    }

    def turn(name: str) -> float:
        hook = hooks[name]()
        dist.barrier()
        started = time.perf_counter()
        for _ in range(STEPS):
            model.backward(token_loss(model(batch.inputs), batch.targets), samples=BATCH)
            model.clip_grad_norm_(1.0)
            optim.step()
            optim.zero_grad()
        slowest = torch.tensor((time.perf_counter() - started) / STEPS, dtype=torch.float64)
        if hook is not None:
            hook.remove()
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.item()

    def alone_ms(work: Callable[[torch.Tensor], Any]) -> float:
        def on_all_parameters() -> None:
            for param in model.parameters():
                work(param.detach())

        return median(seconds_of(on_all_parameters) * 1e3 for _ in range(50))

    turns = {name: lambda name=name: turn(name) for name in sorted(hooks)}
    times = take_turns(turns, rounds, tick, order=alternating)
    seconds = {name: times[name] for name in hooks}
    return {
        "strategy": strategy,
        "step_ms": {name: median(each) * 1e3 for name, each in seconds.items()},
        "ratio": ratios_to(seconds, NEITHER),
        "hash_ms": alone_ms(tensor_digest),
        "peak_ms": alone_ms(peak_of),
        "compared_mb": sum(param.nbytes for param in model.parameters()) / 1e6,
        "seconds": seconds,
    }


def tables_of(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return the table of steps, and a sentence about hashing and measuring gradients by themselves."""
    cells = [
        [row["strategy"], name, f"{ms:.1f}", f"{Ratio(**row['ratio'][name]):.3f}" if name != NEITHER else ""]
        for row in rows
        for name, ms in row["step_ms"].items()
    ]
    hashed, measured = (max(row[name] for row in rows) for name in ("hash_ms", "peak_ms"))
    step = min(row["step_ms"][NEITHER] for row in rows)
    alone = (
        f"By themselves, hashing {rows[0]['compared_mb']:.0f} MB of parameters takes {hashed:.1f} ms "
        f"({hashed / step / 200:.3%} of the time, after every 200th step), and measuring as\nmany bytes of gradients "
        f"{measured:.1f} ms ({measured / step:.1%} of a step)."
    )
    return {
        "cost": table(["strategy", "hooked on", "step, ms", "÷ neither (95 % interval)"], cells),
        "alone": alone,
    }


@bench.tables
def tables() -> dict[str, str]:
    """Return the blocks of README.md."""
    return tables_of(bench.read("cost")["rows"])


if __name__ == "__main__":
    bench.main()
