"""Exposed communication as the report tells it, beside what synchronising costs: step time less the time without it.

    python benchmarks/exposed/measure.py

Hosts and links are played by `paceline.testing.netlab` (as root, on Linux), one rank on each, one thread a rank. In
every round three models take turns, one step each, all ranks beginning together: a bare one that sends nothing, one
that is synchronised, and one that is synchronised and has its timeline recorded; the last two change places each round.
Writes ``exposed.json`` beside this file.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from bench_harness.program import run_job, run_program
from paceline._core.files import write_json
from paceline.errors import UsageError
from paceline.tools.models.gpt_sizes import SIZES, GptSize
from paceline.tools.report.run.run_records import read_run
from paceline.tools.report.run.step_breakdown import mean_parts
from paceline.tools.report.run.trace_reader import read_timeline
from paceline.tools.result_files import check_writable, result_head

HERE = Path(__file__).parent
SIZE = GptSize("11m", 384, 1536, 6, 6, vocabulary=1000, context=128)
CASES = [
    (2, "1Gbit/s", "paceline", "bucketed", 5.0),
    (2, "1Gbit/s", "paceline", "flat", None),
    (2, "1Gbit/s", "gloo", "bucketed", 5.0),
    (2, "1Gbit/s", "gloo", "naive", None),
    (2, "200Mbit/s", "paceline", "bucketed", 5.0),
    (2, "200Mbit/s", "gloo", "bucketed", 5.0),
    (4, "200Mbit/s", "paceline", "bucketed", 5.0),
]
"""Ranks, rate of links, backend, strategy, bucket size in MiB."""
SHORT = [(2, None, "paceline", "bucketed", 1.0), (2, None, "gloo", "bucketed", 1.0)]
"""Short steps of a small model on one host, to see what recording costs at worst; with ten times the rounds."""


def main(
    batch: Annotated[int, typer.Option(help="Windows of 128 tokens a rank.")] = 2,
    rounds: Annotated[int, typer.Option(help="Turns of each contestant.")] = 30,
    only: Annotated[int | None, typer.Option(help="The first so many cases; else all.")] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the result goes.")] = HERE / "exposed.json",
) -> None:
    """Measure what synchronising costs, what the timeline says of it, and what recording costs."""
    if min(batch, rounds) < 1:
        raise UsageError(f"--batch {batch} --rounds {rounds}", remedy="give 1 or more of each")
    if only is not None and not 1 <= only <= len(CASES):
        raise UsageError(f"--only {only}", remedy=f"give a number of cases from 1 to {len(CASES)}")
    check_writable(out, make_folder=True)
    found = [run(case, {"batch": batch, "rounds": rounds, "size": asdict(SIZE)}) for case in CASES[:only]]
    short = {"batch": batch, "rounds": 10 * rounds, "size": asdict(SIZES["tiny"])}
    found += [run(case, short) for case in SHORT] if only is None else []
    settings = {"batch": batch, "rounds": rounds, "threads": 1, "model": asdict(SIZE)}
    write_json(out, result_head("exposed") | {"settings": settings, "cases": found})
    print(out)


def run(case: tuple[int, str | None, str, str, float | None], job: dict[str, Any]) -> dict[str, Any]:
    """Run one case and return its times: for each kind of step, by round, the mean over ranks."""
    ranks, rate, backend, strategy, bucket = case
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        told = job | {"backend": backend, "strategy": strategy, "bucket_mib": bucket, "timelines": folder}
        kinds = run_job(HERE / "ranks.py", told, hosts=ranks, rate=rate, turns=job["rounds"], title=strategy)
        Path(folder, "run.json").write_text("{}")
        traces = read_run(Path(folder)).spans_of_rank
    quiet = [line.quiet for line in read_timeline(traces[0]).steps]
    exposed = [mean_parts(read_timeline(each).steps)["exposed"] for each in traces.values()]
    return {
        "model": job["size"]["name"],
        "ranks": ranks,
        "rate": rate,
        "backend": backend,
        "strategy": strategy,
        "bucket_mib": bucket,
        "seconds": kinds,
        "quiet_rounds": quiet,
        "exposed_seconds": fmean(exposed),
    }


if __name__ == "__main__":
    run_program(main)
