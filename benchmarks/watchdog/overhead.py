"""What being watched costs a training step: blocks of steps with and without a Watchdog, in turns.

    python benchmarks/watchdog/overhead.py run
    python benchmarks/watchdog/overhead.py table

Two ranks of the mini GPT of ``paceline train`` make blocks of steps with and without a Watchdog in the same processes
(A B B A), in several pairs of processes one after another.
"""

from __future__ import annotations

import os
import threading
import time
import timeit
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
from typer import Option

import paceline
from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from bench_harness.turns import ratio_of
from paceline._core.format import format_seconds
from paceline._core.step_state import StepState
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.models.gpt import GPT, token_loss
from paceline.tools.models.gpt_sizes import gpt_size
from paceline.world.control_collectives import barrier

RANKS = 2
STEPS, BATCH, CONTEXT = 8, 4, 128
"""Of a block; windows of a rank's batch, and tokens of a window."""

bench = Benchmark(__file__)


@bench.run
def run(
    rounds: Annotated[int, Option(min=1, help="Blocks of each kind in a pair of processes.")] = 30,
    pairs: Annotated[int, Option(min=1, help="Pairs of processes, one after another.")] = 4,
    json_file: JsonOption = None,
) -> None:
    """Time steps with and without a Watchdog."""
    path = bench.output(json_file, "overhead")
    found: list[dict[str, Any]] = []
    with ProgressBar("overhead", pairs) as tick:
        for _ in range(pairs):
            found.append(bench.start_ranks({"rounds": rounds}, RANKS))
            tick()
    all_of = {kind: [each for one in found for each in one["seconds"][kind]] for kind in ("with", "without")}
    state = StepState()
    bench.write(
        path,
        "watch-overhead",
        {"ranks": RANKS, "model": "mini", "batch": BATCH, "context": CONTEXT, "steps": STEPS},
        step_seconds={kind: median(each) for kind, each in all_of.items()},
        ratio=vars(ratio_of(all_of["with"], all_of["without"])),
        core_share=median(each["core_share"] for each in found),
        begin_seconds=min(timeit.repeat(lambda: state.begin_phase(1, "forward"), number=1000, repeat=50))
        / 1000,
        pairs=found,
    )


@bench.rank
def rank(job: dict[str, Any]) -> dict[str, Any] | None:
    """Time blocks of each kind (A B B A), and what the watchdog's thread uses of a core."""
    world = paceline.init(device="cpu")
    torch.manual_seed(0)
    model = paceline.DataParallel(GPT(gpt_size("mini", vocabulary=256, context=CONTEXT)), sync="sharded")
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-4, fused=True)
    tokens = torch.randint(256, (BATCH, CONTEXT + 1))

    def step() -> None:
        model.backward(token_loss(model(tokens[:, :-1]), tokens[:, 1:]), samples=BATCH)
        optim.step()
        optim.zero_grad()

    def block() -> float:
        step()  # what making a Watchdog has left in the caches is no part of being watched
        barrier()
        started = time.perf_counter()
        for _ in range(STEPS):
            step()
        barrier()
        return time.perf_counter() - started

    seconds: dict[str, list[float]] = {"without": [], "with": []}
    used, watched = 0.0, 0.0
    block()
    for number in range(job["rounds"] + 1):
        for kind in sorted(seconds, reverse=number % 2 == 1):
            if kind == "without":
                took = block()
            else:
                with paceline.Watchdog():
                    before, began = watchdog_cpu_seconds(), time.perf_counter()
                    took = block()
                    if number:
                        used += watchdog_cpu_seconds() - before
                        watched += time.perf_counter() - began
            if number:
                seconds[kind].append(took / STEPS)
    paceline.shutdown()
    return {"seconds": seconds, "core_share": used / watched} if world.rank == 0 else None


def watchdog_cpu_seconds() -> float:
    """Return the CPU seconds that the watchdog's thread has used (proc(5): schedstat)."""
    thread = next(each for each in threading.enumerate() if each.name == "paceline watchdog")
    schedstat = Path(f"/proc/{os.getpid()}/task/{thread.native_id}/schedstat").read_text(encoding="ascii")
    return int(schedstat.split()[0]) / 1e9


@bench.tables
def tables() -> dict[str, str]:
    """Return the block of README.md: a table of one row."""
    found = bench.read("overhead")
    ratio = found["ratio"]
    alone = [
        median(a / b for a, b in zip(each["seconds"]["with"], each["seconds"]["without"], strict=True))
        for each in found["pairs"]
    ]
    cell_of = {
        "a step, not watched": format_seconds(found["step_seconds"]["without"]),
        "watched ÷ not (95 % interval)": "{median:.3f} ({low:.3f} to {high:.3f})".format(**ratio),
        "in single pairs of processes": f"{min(alone):.3f} to {max(alone):.3f}",
        "of a core, the watcher": f"{found['core_share']:.2%}",
        "noting a phase": format_seconds(found["begin_seconds"]),
    }
    return {"overhead": table(list(cell_of), [list(cell_of.values())], words=0)}


if __name__ == "__main__":
    bench.main()
