"""Draws the pictures of three ideas, from the code and from committed results.

    python docs/pictures/draw.py

Writes `worlds.png` (which variables tell a process its place, as `paceline.world` reads them), `exactness.png` (the
error of gradients on uneven data, from benchmarks/loader/exact.json) and `overlap.png` (work and exchange at the same
time, from benchmarks/exchange) beside this file.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from paceline.tools.report.charts.chart_style import COLOURS, MUTED, Chart, in_paceline_style, stacked_panels
from paceline.world.environment import MPICH, OPEN_MPI, SLURM, TORCHRUN

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "benchmarks"
FACTS = ("rank", "size", "local_rank", "local_size", "node", "nodes")
EXCHANGES = {
    "ring-4-ranks": "4 ranks on one machine, 400 MB each",
    "ring-2-hosts": "2 hosts, 200 Mbit/s, 20 MB each",
}


@in_paceline_style
def worlds() -> Chart:
    """Draw which variable of which launcher tells what."""
    launchers = (TORCHRUN, SLURM, OPEN_MPI, MPICH)
    figure, (axes,) = stacked_panels(12, 3.2)
    for column, launcher in enumerate(launchers):
        for row, fact in enumerate(FACTS):
            value = getattr(launcher, fact)
            axes.text(
                column,
                row,
                value or "·",
                ha="center",
                va="center",
                fontsize=8,
                color=COLOURS[0] if value else MUTED,
            )
    axes.set_xticks(range(len(launchers)), [launcher.name for launcher in launchers])
    axes.set_yticks(range(len(FACTS)), [fact.replace("_", " ") for fact in FACTS])
    axes.set_xlim(-0.5, len(launchers) - 0.5)
    axes.set_ylim(len(FACTS) - 0.5, -0.5)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    return Chart(figure)


@in_paceline_style
def exactness() -> Chart:
    """Draw the error of the gradient, on a logarithmic axis, for each way of training on uneven data."""
    rows = json.loads((RESULTS / "loader" / "exact.json").read_text(encoding="utf-8"))["rows"]
    rows = [row for row in rows if "accumulation" not in row["name"]]
    figure, (axes,) = stacked_panels(10, 4)
    colours = [COLOURS[0] if row["name"].startswith("Paceline") else COLOURS[1] for row in rows]
    axes.barh(
        [row["name"] for row in rows], [row["error"] for row in rows], left=1e-17, color=colours, height=0.6
    )
    axes.set_xscale("log")
    axes.set_xlim(1e-17, 10)
    axes.invert_yaxis()
    axes.set_xlabel("largest relative error of a gradient")
    for at, row in enumerate(rows):
        error = row["error"]
        axes.annotate(
            f"{error:.0%}" if error > 1e-3 else f"{error:.0e}",
            (error, at),
            (4, 0),
            textcoords="offset points",
            va="center",
        )
    return Chart(figure)


@in_paceline_style
def overlap() -> Chart:
    """Draw seconds of work and exchange one after the other, and at the same time."""
    figure, panels = stacked_panels(10, 3.6, [1.0] * len(EXCHANGES))
    for axes, (name, title) in zip(panels, EXCHANGES.items(), strict=True):
        rows = json.loads((RESULTS / "exchange" / f"{name}.json").read_text(encoding="utf-8"))["rows"]
        work, exchange, both = (
            median(row[key] for row in rows) for key in ("work_seconds", "seconds", "both_seconds")
        )
        axes.barh(["one after the other"], [work], color=COLOURS[0], label="work")
        axes.barh(["one after the other"], [exchange], left=work, color=COLOURS[1], label="exchange")
        axes.barh(["at the same time"], [both], color=COLOURS[2], label="both")
        axes.set_title(title, loc="left", fontsize=11)
        axes.invert_yaxis()
    panels[0].legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=9)
    panels[-1].set_xlabel("seconds of a round, medians of ranks")
    return Chart(figure)


if __name__ == "__main__":
    for draw in (worlds, exactness, overlap):
        print(draw().save(HERE / f"{draw.__name__}.png").relative_to(HERE.parents[1]))
