"""Draw what `measure.py` found: time against size, and how many times faster than gloo.

    python benchmarks/netlab/chart.py

Reads every JSON file beside this file and writes a PNG of the same name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from figures import ARENA, BEST, ORDINARY, Result

from paceline.tools.report.charts import training_charts

LABEL_OF_NAME = {ARENA: "paceline, arena", BEST: "gloo", ORDINARY: "paceline, ordinary"}


def draw(result: Result) -> training_charts.Chart:
    """Return the chart of a measurement."""
    rows = [row.times for row in result.rows]
    times, ratios = [], []
    for name, label in LABEL_OF_NAME.items():
        times.append(training_charts.ChartLine(label, [(row.nbytes, row.seconds[name]) for row in rows]))
        if name != BEST:
            ratios.append(
                training_charts.ChartLine(label, [(row.nbytes, row.ratio(BEST, name).median) for row in rows])
            )
    title = (
        f"All-reduce of float32, {result.hosts} hosts × {result.ranks_per_host} ranks, links of {result.rate}"
    )
    return training_charts.time_and_ratio_chart(times, ratios, title=title, ratio="times faster than gloo")


def main(
    folder: Annotated[Path, typer.Argument(help="Where the results lie.")] = Path(__file__).parent,
) -> None:
    """Draw every result in a folder."""
    for path in sorted(folder.glob("*.json")):
        print(draw(Result.load(path)).save(path.with_suffix(".png")))


if __name__ == "__main__":
    typer.run(main)
