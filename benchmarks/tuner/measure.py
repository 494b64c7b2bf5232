"""What ``sync="auto"`` settles on, beside every point of a sweep in the same processes, and torch DDP's default.

    python benchmarks/tuner/measure.py

Three settings: four hosts on links of 1 Gbit/s and of 200 Mbit/s (`paceline.testing.netlab`, as root, on Linux, a
rank on each), and two ranks on one host. In each, ``auto`` first searches by itself; then all contestants take
turns, `auto` with what it settled on. Writes ``4x1Gbit.json``, ``4x200Mbit.json`` and ``one-host.json`` beside this
file.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from bench_harness.program import run_job, run_program
from paceline._core.files import write_json
from paceline.errors import UsageError, unknown
from paceline.tools.bench.step.step_strategies import AUTO, NO_SYNC, StrategyVariant
from paceline.tools.models.gpt_sizes import GptSize
from paceline.tools.result_files import check_writable, result_head

HERE = Path(__file__).parent
SIZE = GptSize("11m", 384, 1536, 6, 6, vocabulary=1000, context=128)
SETTINGS = {
    "4x1Gbit": (4, "1Gbit/s"),
    "4x200Mbit": (4, "200Mbit/s"),
    "one-host": (2, None),
}
CONTESTANTS = [
    StrategyVariant(AUTO),
    StrategyVariant(NO_SYNC),
    StrategyVariant("naive"),
    StrategyVariant("flat"),
    StrategyVariant("overlap"),
    *(StrategyVariant("bucketed", size) for size in (1.0, 5.0, 25.0, float("inf"))),
    *(StrategyVariant("sharded", size) for size in (1.0, 5.0, 25.0, float("inf"))),
    StrategyVariant("ddp"),
]
"""The sweep: every strategy but full-shard, at sizes from many small buckets to one; and torch DDP's default."""


def main(
    only: Annotated[str | None, typer.Option(help="One setting; else all.")] = None,
    batch: Annotated[int, typer.Option(help="Windows of 128 tokens a rank.")] = 2,
    rounds: Annotated[int, typer.Option(help="Turns of each contestant.")] = 5,
    steps: Annotated[int, typer.Option(help="Steps of a turn, of which the median counts.")] = 5,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the files go.")] = HERE,
) -> None:
    """Let auto search, then time it in turns with the sweep."""
    if only is not None and only not in SETTINGS:
        raise unknown("setting", only, SETTINGS)
    if min(batch, rounds, steps) < 1:
        raise UsageError(
            f"--batch {batch} --rounds {rounds} --steps {steps}", remedy="give 1 or more of each"
        )
    names = list(SETTINGS) if only is None else [only]
    for name in names:
        check_writable(out / f"{name}.json", make_folder=True)
    for name in names:
        ranks, rate = SETTINGS[name]
        found = run(ranks, rate, {"batch": batch, "rounds": rounds, "steps": steps})
        settings = {
            "ranks": ranks,
            "rate": rate,
            "batch": batch,
            "rounds": rounds,
            "steps": steps,
            "threads": 1,
        }
        settings |= {"model": asdict(SIZE), "parameters": SIZE.parameters()}
        write_json(out / f"{name}.json", result_head("tuner") | {"settings": settings, **found})
        print(out / f"{name}.json")


def run(ranks: int, rate: str | None, job: dict[str, Any]) -> dict[str, Any]:
    """Start the ranks, on hosts if there is a rate, and return what rank 0 wrote."""
    turns = 1 + job["rounds"] * len(CONTESTANTS)
    with tempfile.TemporaryDirectory(prefix="paceline-cache-") as cache:
        told = job | {
            "size": asdict(SIZE),
            "entries": [entry.to_json() for entry in CONTESTANTS],
            "cache": cache,
        }
        return run_job(HERE / "ranks.py", told, hosts=ranks, rate=rate, turns=turns)


if __name__ == "__main__":
    run_program(main)
