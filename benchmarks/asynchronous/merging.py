"""Merging by quorum beside merging on arrival and synchronous rounds, while workers crash and return, in virtual time.

    python benchmarks/asynchronous/merging.py run
    python benchmarks/asynchronous/merging.py chart
    python benchmarks/asynchronous/merging.py table

Least squares, 16 machines whose speeds differ by 20 %: real gradients, the code of hub and workers that runs, simulated
clocks and links. Every row is the same to the bit each time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Annotated, Any

from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from paceline.async_dp.hub.hub_settings import HubOptimizer, HubRules, MergeRules
from paceline.parallel.local_sgd.sync_schedule import SyncSchedule
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.report.charts.chart_style import (
    COLOURS,
    Chart,
    in_paceline_style,
    set_title,
    stacked_panels,
)
from paceline.tools.simulate.async_results import seconds_to_loss
from paceline.tools.simulate.async_settings import AsyncPlan
from paceline.tools.simulate.async_simulation import simulate_async
from paceline.tools.simulate.learning_tasks import LinearTask
from paceline.tools.simulate.simulated_machines import SimulatedMachine, draw_churn, relative_step_times

CHURN = (0.0, 0.05, 0.1, 0.25, 0.5)
"""Shares of the workers that are absent at a time."""

WORKERS, SECONDS, STEP_SECONDS, TARGET = 16, 60.0, 0.1, 0.3

PLAIN, MOMENTUM = HubOptimizer(), HubOptimizer("delayed-nesterov", 1.0, 0.5)
WAYS = {
    "on arrival, averaging": (MergeRules(), PLAIN),
    "on arrival, delayed Nesterov": (MergeRules(), MOMENTUM),
    "quorum 50 %, averaging": (MergeRules("quorum", 0.5), PLAIN),
    "quorum 50 %, delayed Nesterov": (MergeRules("quorum", 0.5), MOMENTUM),
    "synchronous rounds, averaging": (MergeRules("quorum", 1.0), PLAIN),
    "synchronous rounds, delayed Nesterov": (MergeRules("quorum", 1.0), MOMENTUM),
}


bench = Benchmark(__file__)


def train(way: str, churn: float, seed: int) -> dict[str, Any]:
    """Simulate, and return the time to the target and counts of merges."""
    merge, outer = WAYS[way]
    factors = relative_step_times(WORKERS, [1.0], spread=0.2)
    plan = AsyncPlan(
        machines=[SimulatedMachine(STEP_SECONDS * factor, 0.1) for factor in factors],
        seconds=SECONDS,
        cadence=SyncSchedule(10, 1, 5),
        rules=HubRules(merge=merge, outer=outer),
        stagger=merge.on == "arrival",
        churn=draw_churn(churn, WORKERS, SECONDS, seed),
        score_every=SECONDS / 120,
        seed=seed,
    )
    found = simulate_async(plan, LinearTask(width=64, steepness=100.0, noise=0.5, seed=seed))
    merges = [each for each in found.decisions if each["kind"] == "merge"]
    return {
        "seconds_to_target": seconds_to_loss(found.points, TARGET),
        "loss": found.loss,
        "updates": found.updates,
        "merges": len(merges),
        "late": sum(len(each["late"]) for each in merges),
        "grace": fmean(each["grace"] for each in merges) if merges else 0.0,
        "digest": found.digest,
    }


@bench.run
def run(
    seeds: Annotated[int, Option(min=1, help="Trainings of each row.")] = 3,
    json_file: JsonOption = None,
) -> None:
    """Train with each way of merging at each share of absent workers."""
    path = bench.output(json_file, "merging")
    logging.getLogger("paceline.async_dp").setLevel(logging.ERROR)
    rows = []
    with ProgressBar("merging in virtual time", len(CHURN) * len(WAYS) * seeds) as tick:
        for share in CHURN:
            for way in WAYS:
                runs = []
                for seed in range(seeds):
                    runs.append(train(way, share, seed))
                    tick()
                rows.append({"churn": share, "way": way, "runs": runs})
    settings = {"workers": WORKERS, "seconds": SECONDS, "step_seconds": STEP_SECONDS, "target": TARGET}
    bench.write(path, "asynchronous-merging", settings, rows=rows)


# ---------------------------------------------------------------------- results


def times_of(row: dict[str, Any]) -> list[float]:
    """Return the time to the target of every seed; infinity where it was not reached."""
    times = [each["seconds_to_target"] for each in row["runs"]]
    return [math.inf if each is None else each for each in times]


def cell(row: dict[str, Any]) -> str:
    """Return the median time to the target, and the final loss if it is not reached."""
    middle = median(times_of(row))
    return f"{middle:.1f}" if middle < math.inf else f"not ({median(e['loss'] for e in row['runs']):.3g})"


@bench.tables
def tables() -> dict[str, str]:
    """Return the block of README.md: a row per way of merging, a column per share of absent workers."""
    rows = bench.read("merging")["rows"]
    of = {(row["way"], row["churn"]): row for row in rows}
    lines = [
        [way, *(cell(of[way, share]) for share in CHURN), merges_text([of[way, share] for share in CHURN])]
        for way in WAYS
    ]
    titles = ["merged", *(f"{share:.0%} absent" for share in CHURN), "updates a merge; late"]
    return {"merging": table(titles, lines)}


def merges_text(rows: Sequence[dict[str, Any]]) -> str:
    """Return how many updates a merge had, and the share of late ones, over all runs."""
    runs = [each for row in rows for each in row["runs"] if each["merges"]]
    if not runs:
        return "1"
    updates, merges = sum(each["updates"] for each in runs), sum(each["merges"] for each in runs)
    return f"{updates / merges:.1f}; {sum(each['late'] for each in runs) / updates:.0%}"


@bench.charts
def charts() -> dict[str, Chart]:
    """Return the chart: time to the target against the share of absent workers."""
    return {"merging.png": draw(bench.read("merging"))}


@in_paceline_style
def draw(result: dict[str, Any]) -> Chart:
    """Return the medians and the range of the seeds."""
    figure, (axes,) = stacked_panels(width=9, height=5)
    settings = result["settings"]
    for number, way in enumerate(WAYS):
        rows = [row for row in result["rows"] if row["way"] == way and median(times_of(row)) < math.inf]
        shares, style = [100 * row["churn"] for row in rows], "o-" if number % 2 else "o--"
        colour = COLOURS[number // 2]
        axes.plot(
            shares, [median(times_of(row)) for row in rows], style, color=colour, markersize=5, label=way
        )
        for share, row in zip(shares, rows, strict=True):
            reached = [each for each in times_of(row) if each < math.inf]
            axes.plot([share] * 2, [min(reached), max(reached)], color=colour, alpha=0.35, linewidth=4)
    axes.set_ylim(bottom=0)
    set_title(axes, f"virtual seconds to a loss of {settings['target']:g}, {settings['workers']} workers")
    axes.set_xlabel("workers absent at a time, %")
    axes.legend(fontsize=8, ncols=3, loc="lower right")
    return Chart(figure)


if __name__ == "__main__":
    bench.main()
