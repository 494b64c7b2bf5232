"""The plan that ``sync="auto"`` settles on, compared with every point of a sweep and with torch DDP's default.

    python benchmarks/tuner/tuner.py run [--only one-host]      (as root, on Linux)
    python benchmarks/tuner/tuner.py table

Three settings: four hosts on links of 1 Gbit/s and of 200 Mbit/s (`paceline.testing.netlab`, a rank on each), and two
ranks on one host. In each, ``auto`` first searches by itself; then all variants take turns in the same processes,
``auto`` with what it settled on. Each setting has a result of its own.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from bench_harness.strategy_steps import GPT_11M, build_trainers, time_trainers
from paceline.errors import unknown
from paceline.parallel.data_parallel import DataParallel
from paceline.tools.bench.step.step_strategies import AUTO, NO_SYNC, StrategyVariant
from paceline.tools.bench.step.strategy_trainers import random_batch, run_until_tuned
from paceline.tools.bench.turn_statistics import RoundTimes, median_ratio, round_times
from paceline.world import init, shutdown

SETTINGS = {  # ranks, rate of links, title
    "4x1Gbit": (4, "1Gbit/s", "4 hosts, 1 Gbit/s"),
    "4x200Mbit": (4, "200Mbit/s", "4 hosts, 200 Mbit/s"),
    "one-host": (2, None, "one host, 2 ranks"),
}
SEARCHED, DEFAULT, DDP = StrategyVariant(AUTO), StrategyVariant("bucketed", 25.0), StrategyVariant("ddp")
VARIANTS = [
    SEARCHED,
    StrategyVariant(NO_SYNC),
    *map(StrategyVariant, ("naive", "flat", "overlap")),
    *(StrategyVariant("bucketed", size) for size in (1.0, 5.0, 25.0, float("inf"))),
    *(StrategyVariant("sharded", size) for size in (1.0, 5.0, 25.0, float("inf"))),
    DDP,
]
"""The sweep: every strategy but full-shard, at sizes from many small buckets to one; and torch DDP's default."""

bench = Benchmark(__file__)


@bench.run
def run(
    only: Annotated[str | None, Option(help="One setting; default: all.")] = None,
    batch: Annotated[int, Option(min=1, help="Windows of 128 tokens a rank.")] = 2,
    rounds: Annotated[int, Option(min=1, help="Turns of each variant.")] = 5,
    steps: Annotated[int, Option(min=1, help="Steps of a turn, of which the median counts.")] = 5,
    out: Annotated[
        Path, Option(metavar="FOLDER", help="Write a JSON file per setting there.")
    ] = bench.folder,
) -> None:
    """Let auto search, then time it in turns with the sweep."""
    if only is not None and only not in SETTINGS:
        raise unknown("setting", only, SETTINGS)
    path_of = {
        name: bench.output(out / f"{name}.json", name) for name in ([only] if only is not None else SETTINGS)
    }
    sizes = {"batch": batch, "rounds": rounds, "steps": steps}
    for name, path in path_of.items():
        ranks, rate, _ = SETTINGS[name]
        with tempfile.TemporaryDirectory(prefix="paceline-cache-") as cache:
            turns = 1 + (1 + rounds) * len(VARIANTS)
            found = bench.start_ranks(sizes | {"cache": cache}, ranks, rate=rate, turns=turns, title=name)
        settings = {"ranks": ranks, "rate": rate, **sizes, "threads": 1}
        settings |= {"model": asdict(GPT_11M), "parameters": GPT_11M.parameters()}
        bench.write(path, "tuner", settings, **found)


@bench.rank
def rank(job: dict[str, Any]) -> dict[str, Any] | None:
    """Return what auto settled on after how many steps, and the seconds of all variants."""
    os.environ["XDG_CACHE_HOME"] = job["cache"]  # nothing of earlier runs
    world = init()
    trainers = build_trainers(VARIANTS, GPT_11M, world)
    batch = random_batch(GPT_11M, job["batch"], GPT_11M.context, world.rank, world.device)
    auto = trainers[VARIANTS.index(SEARCHED)]
    searched = run_until_tuned(auto, batch)
    bench.tick()
    seconds = time_trainers(trainers, batch, world, rounds=job["rounds"], steps=job["steps"], tick=bench.tick)
    shutdown()
    if world.rank != 0:
        return None
    assert isinstance(auto.model, DataParallel), "it is Paceline's"
    tuning = auto.model.tuning
    assert tuning is not None, "there is something to tune"
    assert tuning.settled is not None, "it has settled"
    return {
        "searched": searched,
        "sentences": [sentence.partition(" Kept in ")[0] for sentence in tuning.sentences],
        "settled": tuning.settled.to_json({}),
        "entries": [variant.to_json() for variant in VARIANTS],
        "seconds": seconds,
    }


# ---------------------------------------------------------------------- results

Rounds = dict[StrategyVariant, list[RoundTimes]]


def step_seconds(rounds: list[RoundTimes]) -> float:
    """Return the median step."""
    return median(each.step for each in rounds)


def settled_variant(plan: dict[str, Any]) -> StrategyVariant:
    """Return the variant of the sweep that has this plan."""
    size = float(plan["bucket_mib"])
    if plan["shard"] == "optimizer":
        return StrategyVariant("sharded", size)
    if size == 0:
        return StrategyVariant("overlap" if plan["overlap"] else "naive")
    return StrategyVariant("bucketed", size) if plan["overlap"] else StrategyVariant("flat")


def summary_row(title: str, result: dict[str, Any], rounds: Rounds) -> list[str]:
    """Return the row of a setting; its best is the point of the sweep with the least median step, not torch's."""
    sweep = [variant for variant in rounds if variant.strategy not in (AUTO, NO_SYNC, "ddp")]
    best = min(sweep, key=lambda variant: step_seconds(rounds[variant]))
    pairs = [(SEARCHED, best), (SEARCHED, DEFAULT), (DDP, SEARCHED), (DDP, best)]
    settled = settled_variant(result["settled"]["plan"]).label
    ratios = [f"{median_ratio(rounds[own], rounds[other]):.3f}" for own, other in pairs]
    return [title, settled, str(result["searched"]), best.label, *ratios]


def sweep_table(rounds: Rounds) -> str:
    """Return the table of a setting, the fastest first."""
    rows = [
        [
            f"**{variant.label}**" if variant == SEARCHED else variant.label,
            f"{step_seconds(own):.3g}",
            *(f"{median_ratio(rounds[other], own):.3f}" for other in (SEARCHED, DDP)),
        ]
        for variant, own in sorted(rounds.items(), key=lambda each: step_seconds(each[1]))
    ]
    return table(["", "s per step", "auto ÷", "DDP's default ÷"], rows)


@bench.tables
def tables() -> dict[str, str]:
    """Return the summary, and of each setting the sweep and what auto said."""
    rows, blocks = [], {}
    for name, (_, _, title) in SETTINGS.items():
        result = bench.read(name)
        variants = map(StrategyVariant.from_json, result["entries"])
        rounds = {
            variant: [round_times(turn) for turn in turns]
            for variant, turns in zip(variants, result["seconds"], strict=True)
        }
        rows.append(summary_row(title, result, rounds))
        blocks[name] = sweep_table(rounds)
        blocks[f"{name} said"] = "\n".join(f"> {sentence}" for sentence in result["sentences"])
    titles = ["network", "auto settled on", "after steps", "best of the sweep", "auto ÷ best"]
    titles += ["auto ÷ Paceline's default", "torch DDP's default ÷ auto", "÷ best"]
    return {"summary": table(titles, rows, words=2), **blocks}


if __name__ == "__main__":
    bench.main()
