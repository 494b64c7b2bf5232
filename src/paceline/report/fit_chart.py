"""A fit beside what was measured: times against size, and what was held out as predicted ÷ measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.plan.accuracy import Checked
from paceline.plan.fit import Fit
from paceline.plan.fitting import Point
from paceline.report.canvas import (
    COLOURS,
    MARKERS,
    MUTED,
    PAPER,
    Chart,
    End,
    drawn,
    log_ticks,
    name_lines,
    stacked_panels,
)
from paceline.units import format_seconds, format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["MOST_SERIES", "Series", "fit_chart"]

MOST_SERIES = len(COLOURS)
_STEPS = 200


@dataclass(frozen=True)
class Series:
    """What is drawn in one colour.

    Attributes:
        label: its name, such as ``"4 ranks"``.
        fit: the curve.
        points: measurements by one number of ranks, at least one.
        checked: those of them that were held out, with their predictions.
    """

    label: str
    fit: Fit
    points: Sequence[Point]
    checked: Sequence[Checked] = ()


@drawn
def fit_chart(series: Sequence[Series], title: str) -> Chart:
    """Return the chart: filled points were measured, hollow ones are predictions for sizes that were held out.

    Args:
        series: at most `MOST_SERIES`.
        title: what was measured, on what.
    """
    figure, (above, below) = stacked_panels(width=10, height=7.2, heights=(1.8, 1.0))
    below.axhline(1.0, color=MUTED, linewidth=1)
    ends: list[End] = []
    for each, colour, marker in zip(series, COLOURS, MARKERS, strict=False):
        ends.append(_curve(above, each, colour))
        _marks(above, [(point.nbytes, point.seconds) for point in each.points], colour, marker, colour)
        _marks(above, [(found.nbytes, found.predicted) for found in each.checked], colour, marker, PAPER)
        ratios = [(found.nbytes, found.predicted / found.seconds) for found in each.checked]
        _marks(below, ratios, colour, marker, PAPER)
    for axes in (above, below):
        axes.set(xscale="log", yscale="log")
        axes.xaxis.set_major_formatter(lambda nbytes, _: format_size(nbytes))
        axes.minorticks_off()
        axes.grid(axis="y")
    name_lines(above, ends, wide=True)
    above.yaxis.set_major_formatter(lambda seconds, _: format_seconds(seconds))
    above.set_title(title, loc="left", fontsize=11, fontweight="bold")
    low, high = below.get_ylim()
    below.set_ylim(min(low, 0.85), max(high, 1.18))
    log_ticks(below, (1, 2, 5) if high > 5 * low else (1, 1.1, 1.2, 1.5, 2, 3, 5, 6, 7, 8, 9))
    below.yaxis.set_major_formatter(lambda times, _: f"{times:g}×")
    below.set(xlabel="bytes", ylabel="held out: predicted ÷ measured", xlim=above.get_xlim())
    return Chart(figure)


def _curve(axes: Axes, series: Series, colour: str) -> End:
    """Draw the fit over the sizes that it was made from, and return its end."""
    ranks = series.points[0].ranks
    sizes = [float(size) for size in np.geomspace(series.fit.low, series.fit.high, _STEPS)]
    seconds = [series.fit.seconds(size, ranks) for size in sizes]
    axes.plot(sizes, seconds, color=colour, linewidth=2)
    return sizes[-1], seconds[-1], series.label, colour


def _marks(axes: Axes, points: Sequence[tuple[float, float]], colour: str, marker: str, face: str) -> None:
    sizes, values = [size for size, _ in points], [value for _, value in points]
    axes.plot(sizes, values, " ", color=colour, marker=marker, mfc=face, markersize=5)
