"""Draw what `step.py` found: seconds and bytes of a step, by contestant.

    python benchmarks/slow-networks/chart.py

Reads ``step-4x200Mbit.json`` beside this file and writes a PNG of the same name.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from figures import NO_SYNC, StepResult, StepRow

from paceline.tools.report.charts.chart_style import (
    COLOUR_OF_PHASE,
    INK,
    PAPER,
    Chart,
    in_paceline_style,
    legend_patch,
    stacked_panels,
)

if TYPE_CHECKING:
    from paceline.tools.report.charts.chart_style import Axes

COMPUTING, WAITING, BYTES = (COLOUR_OF_PHASE[phase] for phase in ("forward", "exposed", "backward"))


@in_paceline_style
def draw(result: StepResult) -> Chart:
    """Return the chart: a bar per contestant, above its time, below what a host sends."""
    rows = result.rows
    figure, (times, sent) = stacked_panels(width=10, height=1.9 + 0.62 * len(rows), heights=(1.0, 1.0))
    settings = result.settings
    _draw_times(times, result)
    _draw_sent(sent, [row for row in rows if row.expected_sent])
    millions = settings["parameters"] / 1e6
    title = f"One training step, {millions:.0f} M parameters, {settings['hosts']} hosts, links of {settings['rate']}"
    times.set_title(title, loc="left", fontsize=11, fontweight="bold")
    return Chart(figure)


def _draw_times(axes: Axes, result: StepResult) -> None:
    rows = result.rows
    alone = next((row.median for row in rows if row.name == NO_SYNC), 0.0)
    computing = [min(alone, row.median) for row in rows]
    waiting = [row.median - part for row, part in zip(rows, computing, strict=True)]
    _bars(axes, rows, computing, COMPUTING)
    axes.barh(range(len(rows)), waiting, left=computing, color=WAITING, height=0.7, edgecolor=PAPER)
    for place, row in enumerate(rows):
        ratio = result.speedup(row)
        remark = "" if ratio is None else f"   DDP's best ÷ {ratio.median:.2f}"
        _remark(axes, row.median, place, f"{row.median:.2f} s{remark}")
    axes.set_xlim(0, 1.35 * max(row.median for row in rows))
    axes.set_xlabel("seconds of one step")
    parts = [
        legend_patch("as without synchronisation", COMPUTING),
        legend_patch("waiting beyond that", WAITING),
    ]
    axes.legend(handles=parts, loc="lower right", frameon=False, fontsize=9)


def _draw_sent(axes: Axes, rows: list[StepRow]) -> None:
    _bars(axes, rows, [row.sent / 1e6 for row in rows], BYTES)
    for place, row in enumerate(rows):
        axes.plot([row.expected_sent / 1e6] * 2, [place - 0.42, place + 0.42], color=INK, linewidth=2)
        _remark(axes, row.sent / 1e6, place, f"{row.sent / 1e6:.3g} MB, {row.sent_ratio:.3f} of expected")
    axes.set_xscale("log")
    low, high = (edge(row.sent / 1e6 for row in rows) for edge in (min, max))
    axes.set_xlim(min(1.0, low / 2), 12 * high)
    axes.xaxis.set_major_formatter(lambda megabytes, _: f"{megabytes:g}")
    axes.set_xlabel("MB that a host sends in one step, at its interface (line: expected)")


def _bars(axes: Axes, rows: list[StepRow], values: list[float], colour: str) -> None:
    axes.barh(range(len(rows)), values, color=colour, height=0.7, edgecolor=PAPER)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.spines["left"].set_visible(False)
    axes.invert_yaxis()


def _remark(axes: Axes, value: float, place: int, text: str) -> None:
    axes.annotate(text, (value, place), (6, 0), textcoords="offset points", va="center", fontsize=9.5)


def main(
    folder: Annotated[Path, typer.Argument(help="Where the results lie.")] = Path(__file__).parent,
) -> None:
    """Draw the results in a folder."""
    path = folder / "step-4x200Mbit.json"
    print(draw(StepResult.load(path)).save(path.with_suffix(".png")))


if __name__ == "__main__":
    typer.run(main)
