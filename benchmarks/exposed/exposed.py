"""Exposed communication as the report shows it, and what synchronising costs: step time less the time without it.

    python benchmarks/exposed/exposed.py run      (as root, on Linux: plays the hosts with `paceline.testing.netlab`)
    python benchmarks/exposed/exposed.py table

One rank runs on each host, on one thread. In every round three models take turns, one step each, which all ranks start
together: a bare one that sends nothing, one that is synchronised, and one that is synchronised and has its timeline
recorded; the last two swap places each round.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import torch.distributed as dist
from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from bench_harness.strategy_steps import GPT_11M
from bench_harness.turns import ratio_of
from paceline._core.step_state import step_state
from paceline.parallel.data_parallel import DataParallel
from paceline.profiling.rank_timeline import RankTimeline
from paceline.tools.bench.step.step_strategies import NO_SYNC, StrategyVariant
from paceline.tools.bench.step.strategy_trainers import StrategyTrainer, build_trainer, random_batch, run_step
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.models.gpt_sizes import SIZES, GptSize
from paceline.tools.models.token_windows import TokenBatch
from paceline.tools.report.run.run_records import read_run
from paceline.tools.report.run.step_breakdown import mean_parts
from paceline.tools.report.run.trace_reader import read_timeline
from paceline.world import init, shutdown
from paceline.world.control_collectives import sum_over_ranks

CASES = [  # ranks, rate of links, backend, strategy, bucket size in MiB
    (2, "1Gbit/s", "paceline", "bucketed", 5.0),
    (2, "1Gbit/s", "paceline", "flat", None),
    (2, "1Gbit/s", "gloo", "bucketed", 5.0),
    (2, "1Gbit/s", "gloo", "naive", None),
    (2, "200Mbit/s", "paceline", "bucketed", 5.0),
    (2, "200Mbit/s", "gloo", "bucketed", 5.0),
    (4, "200Mbit/s", "paceline", "bucketed", 5.0),
]
SHORT = [(2, None, "paceline", "bucketed", 1.0), (2, None, "gloo", "bucketed", 1.0)]
"""Short steps of a small model on one host: what recording costs at worst; with ten times the rounds."""

bench = Benchmark(__file__)


@bench.run
def run(
    batch: Annotated[int, Option(min=1, help="Windows of 128 tokens a rank.")] = 2,
    rounds: Annotated[int, Option(min=1, help="Turns of each model.")] = 30,
    only: Annotated[
        int | None, Option(min=1, max=len(CASES), help="Number of cases, from the first; default: all.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Measure what synchronising costs, what the timeline reports of it, and what recording costs."""
    path = bench.output(json_file, "exposed")
    found = [
        measure(case, {"batch": batch, "rounds": rounds, "size": asdict(GPT_11M)}) for case in CASES[:only]
    ]
    if only is None:
        short = {"batch": batch, "rounds": 10 * rounds, "size": asdict(SIZES["tiny"])}
        found += [measure(case, short) for case in SHORT]
    settings = {"batch": batch, "rounds": rounds, "threads": 1, "model": asdict(GPT_11M)}
    bench.write(path, "exposed", settings, cases=found)


def measure(case: tuple[int, str | None, str, str, float | None], job: dict[str, Any]) -> dict[str, Any]:
    """Return the times of one case: for each kind of step, by round, the mean over ranks."""
    described = dict(zip(("ranks", "rate", "backend", "strategy", "bucket_mib"), case, strict=True))
    ranks, rate, _, strategy, _ = case
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        whole = job | described | {"timelines": folder}
        seconds = bench.start_ranks(whole, ranks, rate=rate, turns=job["rounds"], title=strategy)
        Path(folder, "run.json").write_text("{}")
        traces = read_run(Path(folder)).spans_of_rank
    return {
        "model": job["size"]["name"],
        **described,
        "seconds": seconds,
        "quiet_rounds": [line.quiet for line in read_timeline(traces[0]).steps],
        "exposed_seconds": fmean(
            mean_parts(read_timeline(each).steps)["exposed"] for each in traces.values()
        ),
    }


@bench.rank
def rank(job: dict[str, Any]) -> dict[str, list[float]] | None:
    """Return the seconds of steps by round, means over ranks: bare, synchronised, and recorded too."""
    world, size = init(job["backend"]), GptSize(**job["size"])
    variant = StrategyVariant(job["strategy"], job["bucket_mib"])
    bare, synced, recorded = (
        build_trainer(each, size, world.device, 0) for each in (StrategyVariant(NO_SYNC), variant, variant)
    )
    batch = random_batch(size, job["batch"], size.context, world.rank, world.device)
    for trainer in (bare, synced, recorded):
        for _ in range(3):
            run_step(trainer, batch)
    times: dict[str, list[float]] = {"bare": [], "synced": [], "recorded": []}
    assert isinstance(recorded.model, DataParallel), "the strategy is one of Paceline's"
    with RankTimeline(job["timelines"], recorded.model):
        recorder = step_state.recorder
        assert recorder is not None, "the timeline is being recorded"
        turns = [(synced, "synced", None), (recorded, "recorded", recorder)]
        for _ in range(job["rounds"]):
            for trainer, name, own_recorder in ((bare, "bare", None), *turns):
                step_state.recorder = own_recorder
                times[name].append(time_step(trainer, batch))
            turns.reverse()
            bench.tick()
        step_state.recorder = recorder
    mean = sum_over_ranks(torch.tensor(list(times.values()), dtype=torch.float64)) / world.size
    shutdown()
    return dict(zip(times, mean.tolist(), strict=True)) if world.rank == 0 else None


def time_step(trainer: StrategyTrainer, batch: TokenBatch) -> float:
    """Return the seconds of one step that all ranks start together."""
    dist.barrier()
    started = time.perf_counter()
    run_step(trainer, batch)
    if step_state.recorder is not None:
        step_state.recorder.flush()  # writing the line is part of what recording costs
    return time.perf_counter() - started


def row(case: dict[str, Any]) -> list[str]:
    """Return the cells of a case; quiet steps are left out, as in the report."""
    usual = [turn for turn, quiet in enumerate(case["quiet_rounds"]) if not quiet]
    recorded, bare, synced = (
        [case["seconds"][kind][turn] for turn in usual] for kind in ("recorded", "bare", "synced")
    )
    cost, exposed = fmean(recorded) - fmean(bare), case["exposed_seconds"]
    ratio = ratio_of(recorded, synced)
    return [
        case["model"],
        str(case["ranks"]),
        case["rate"] or "one host",
        case["backend"],
        case["strategy"] + (f", {case['bucket_mib']:g} MiB" if case["bucket_mib"] else ""),
        *(f"{1e3 * each:.1f}" for each in (fmean(recorded), fmean(bare), cost, exposed)),
        f"{exposed / cost:.3f}",
        f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})",
    ]


@bench.tables
def tables() -> dict[str, str]:
    """Return a table for each result."""
    titles = ["model", "ranks", "links", "backend", "strategy", "step, ms", "without synchronisation, ms"]
    titles += [
        "difference, ms",
        "exposed as reported, ms",
        "reported ÷ difference",
        "recorded ÷ not recorded",
    ]
    results = bench.find("exposed*").items()
    return {name: table(titles, [row(case) for case in result["cases"]], words=5) for name, result in results}


if __name__ == "__main__":
    bench.main()
