"""What `paceline.ReplicaCheck` and `paceline.NonFiniteGuard` cost: a training step with and without them, in turns.

    python benchmarks/drift/cost.py

Two ranks train the `mini` GPT (3.3 M parameters, 2 windows of 64 tokens a rank, clipping, fused AdamW) on the
default backend. One model and one optimizer a strategy: in each turn of some steps nothing, a `Finite`, or a `Drift` is
hooked on, and taken off again. `Drift` compares after every step here, so that its cost is seen at all; by default it
is after every 200th. A turn's time is that of the slower rank. Beside it the time that hashing, and measuring
gradients, take by themselves. Writes ``cost.json`` beside this file.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

import paceline
from bench_harness.program import run_program
from bench_harness.turns import ratio_of
from paceline._core.files import write_json
from paceline.health.replica_check import tensor_digest
from paceline.launch.process.local_ranks import run_ranks
from paceline.parallel.engine.finite_check import peak_of
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.bench.step.strategy_trainers import random_batch
from paceline.tools.models.gpt import GPT, token_loss
from paceline.tools.models.gpt_sizes import gpt_size
from paceline.tools.result_files import check_writable, result_head

HERE = Path(__file__).parent
RANKS, SIZE, BATCH, CONTEXT, STEPS = 2, "mini", 2, 64, 2
STRATEGIES = ("bucketed", "sharded")
PLAIN, FINITE, CLIPPED, DRIFT = "neither", "Finite", "Finite, source=False", "Drift, every step"

Hooks = dict[str, Callable[[], Any]]


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each, for each strategy.")] = 120,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Write the result there.")] = HERE / "cost.json",
    told: Annotated[Path | None, typer.Option(hidden=True, help="Be a rank, and write there.")] = None,
) -> None:
    """Time steps with and without, on two ranks."""
    if told is not None:
        measure(rounds, told)
        return
    check_writable(out, make_folder=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        arguments = [__file__, "--rounds", str(rounds), "--told", str(file)]
        run_ranks(arguments, RANKS, env={"OMP_NUM_THREADS": "1"}, timeout=1800)
        rows = json.loads(file.read_text(encoding="utf-8"))
    result = result_head("drift-cost", ["paceline", "torch", "xxhash"]) | {
        "settings": {"ranks": RANKS, "size": SIZE, "batch_size": BATCH, "context": CONTEXT, "steps": STEPS},
        "rows": rows,
    }
    write_json(out, result)
    print(json.dumps([{**row, "seconds": "…"} for row in rows], indent=1))


def measure(rounds: int, told: Path) -> None:
    """Time all strategies as a rank; rank 0 writes."""
    torch.set_num_threads(1)
    world = paceline.init(device="cpu")
    with ProgressBar("drift", (rounds + 1) * len(STRATEGIES), shown=world.rank == 0) as tick:
        rows = [take_turns(strategy, rounds, world.rank, tick) for strategy in STRATEGIES]
    if world.rank == 0:
        told.write_text(json.dumps(rows), encoding="utf-8")
    paceline.shutdown()


def take_turns(strategy: str, rounds: int, rank: int, tick: Callable[[], object]) -> dict[str, Any]:
    """Return the seconds of a step of every turn, and the ratios to a step with neither."""
    torch.manual_seed(0)
    size = gpt_size(SIZE)
    model = paceline.DataParallel(GPT(size), sync=strategy)
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-4, fused=True)
    batch = random_batch(size, BATCH, CONTEXT, seed=rank, device="cpu")
    hooks: Hooks = {
        PLAIN: lambda: None,
        FINITE: lambda: paceline.NonFiniteGuard(model, optim),
        CLIPPED: lambda: paceline.NonFiniteGuard(model, optim, source=False),
        DRIFT: lambda: paceline.ReplicaCheck(model, optim, every=1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in hooks}
    gc.disable()
    for number in range(rounds + 1):
        for name in sorted(hooks, reverse=number % 2 == 1):
            taken = turn(model, optim, batch, hooks[name]())
            if number:  # the first round is warming up
                seconds[name].append(taken)
        gc.collect()
        tick()
    gc.enable()
    ratios = {name: ratio_of(each, seconds[PLAIN]) for name, each in seconds.items() if name != PLAIN}
    return {
        "strategy": strategy,
        "step_ms": {name: median(each) * 1e3 for name, each in seconds.items()},
        "ratio": {name: {"median": r.median, "low": r.low, "high": r.high} for name, r in ratios.items()},
        "hash_ms": alone_ms(model, tensor_digest),
        "peak_ms": alone_ms(model, peak_of),
        "compared_mb": sum(param.nbytes for param in model.parameters()) / 1e6,
        "seconds": seconds,
    }


def turn(model: paceline.DataParallel, optim: paceline.ShardedOptimizer, batch: Any, hook: Any) -> float:
    """Return the seconds that a step took on the slower rank, over a turn of some."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(STEPS):
        model.backward(token_loss(model(batch.inputs), batch.targets), samples=BATCH)
        model.clip_grad_norm_(1.0)
        optim.step()
        optim.zero_grad()
    taken = torch.tensor((time.perf_counter() - started) / STEPS, dtype=torch.float64)
    if hook is not None:
        hook.remove()
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken.item()


def alone_ms(model: paceline.DataParallel, work: Callable[[torch.Tensor], Any]) -> float:
    """Return the milliseconds that `work` on all parameters takes, the median of 50."""
    taken = []
    for _ in range(50):
        started = time.perf_counter()
        for param in model.parameters():
            work(param.detach())
        taken.append((time.perf_counter() - started) * 1e3)
    return median(taken)


if __name__ == "__main__":
    run_program(main)
