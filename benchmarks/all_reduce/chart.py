"""Draw what `measure.py` found: time against size, and how many times faster than gloo.

    python benchmarks/all_reduce/chart.py

Reads every ``<ranks>-ranks.json`` beside this file and writes ``<ranks>-ranks.png``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from figures import ARENA, BEST, COPY, MPICH, ORDINARY, Result

from paceline.tools.report.charts import training_charts

LABEL_OF_NAME = {
    ARENA: "paceline, arena",
    BEST: "gloo",
    ORDINARY: "paceline, ordinary",
    MPICH: "MPICH",
    COPY: "copy_",
}


def draw(result: Result) -> training_charts.Chart:
    """Return the chart of a measurement."""
    times, ratios = [], []
    for name, label in LABEL_OF_NAME.items():
        faint = name == COPY
        times.append(
            training_charts.ChartLine(label, [(row.nbytes, row.seconds[name]) for row in result.rows], faint)
        )
        if name not in (BEST, COPY):
            points = [(row.nbytes, row.ratio(BEST, name).median) for row in result.rows]
            ratios.append(training_charts.ChartLine(label, points))
    title = f"All-reduce of float32 between {result.ranks} processes of one machine"
    return training_charts.time_and_ratio_chart(times, ratios, title=title, ratio="times faster than gloo")


def main(
    folder: Annotated[Path, typer.Argument(help="Where the results lie.")] = Path(__file__).parent,
) -> None:
    """Draw every result in a folder."""
    for path in sorted(folder.glob("*-ranks.json")):
        print(draw(Result.load(path)).save(path.with_suffix(".png")))


if __name__ == "__main__":
    typer.run(main)
