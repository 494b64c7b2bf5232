"""Charts of collectives: time and bandwidth by message size, and fits next to measurements.

Colours stand for backends; markers and dashes stand for numbers of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline._core.format import format_seconds, format_size
from paceline.cost_model.collective_prediction import CheckedPrediction, CollectiveFit
from paceline.cost_model.fit_measurements import MeasuredPoint
from paceline.tools.report.charts.chart_style import (
    COLOURS,
    MARKERS,
    MUTED,
    PAPER,
    Chart,
    LineEnd,
    in_paceline_style,
    label_line_ends,
    set_log_ticks,
    set_title,
    stacked_panels,
)

if TYPE_CHECKING:
    from paceline.tools.report.charts.chart_style import Axes

__all__ = ["MAX_FIT_SERIES", "BackendSeries", "FitSeries", "bandwidth_by_size", "fit_chart", "time_by_size"]

_DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))


@dataclass(frozen=True)
class BackendSeries:
    """Measurements of one backend with one number of processes.

    Attributes:
        backend: name of the backend.
        ranks: number of processes.
        points: (bytes, seconds) or (bytes, bytes per second).
    """

    backend: str
    ranks: int
    points: Sequence[tuple[float, float]]

    @property
    def label(self) -> str:
        """Label at the end of the line."""
        return f"{self.backend}, {self.ranks} ranks"


@in_paceline_style
def time_by_size(lines: Sequence[BackendSeries], *, title: str) -> Chart:
    """Return a chart of call time over message size, both logarithmic.

    Args:
        lines: one per backend and number of processes; points are (bytes, seconds).
        title: the measurement and its machine.
    """
    chart, axes = _chart(lines, title, scale="log")
    axes.yaxis.set_major_formatter(lambda seconds, _: format_seconds(seconds))
    axes.set(ylabel="time")
    return chart


@in_paceline_style
def bandwidth_by_size(lines: Sequence[BackendSeries], *, title: str, bandwidth: str) -> Chart:
    """Return a chart of bandwidth over message size (logarithmic).

    Args:
        lines: one per backend and number of processes; points are (bytes, bytes per second).
        title: the measurement and its machine.
        bandwidth: name of the bandwidth, such as ``"busbw"``.
    """
    scaled = [
        BackendSeries(line.backend, line.ranks, [(size, rate / 1e9) for size, rate in line.points])
        for line in lines
    ]
    chart, axes = _chart(scaled, title, scale="linear")
    axes.set(ylabel=f"{bandwidth} (GB/s)")
    return chart


def _chart(lines: Sequence[BackendSeries], title: str, scale: str) -> tuple[Chart, Axes]:
    figure, (axes,) = stacked_panels(width=10, height=max(4.2, 0.24 * len(lines) + 1.2))
    backends = list(dict.fromkeys(line.backend for line in lines))
    ranks = sorted({line.ranks for line in lines})
    axes.set(xscale="log", yscale=scale)
    ends: list[LineEnd] = []
    for line in lines:
        colour = COLOURS[backends.index(line.backend) % len(COLOURS)]
        at = ranks.index(line.ranks)
        sizes, values = zip(*line.points, strict=True)
        axes.plot(
            sizes,
            values,
            linestyle=_DASHES[at % len(_DASHES)],
            marker=MARKERS[at % len(MARKERS)],
            color=colour,
            markersize=5,
            linewidth=2,
        )
        ends.append((sizes[-1], values[-1], line.label, colour))
    if scale == "linear":
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(lambda nbytes, _: format_size(nbytes))
    axes.minorticks_off()
    axes.grid(axis="y")
    set_title(axes, title)
    axes.set(xlabel="bytes (S)")
    label_line_ends(axes, ends, wide=True)
    return Chart(figure), axes


MAX_FIT_SERIES = len(COLOURS)


_STEPS = 200


@dataclass(frozen=True)
class FitSeries:
    """A fit and its measurements, drawn in one colour.

    Attributes:
        label: such as ``"4 ranks"``.
        fit: the curve.
        points: one or more measurements with the same number of ranks.
        checked: the held-out points among them, with their predictions.
    """

    label: str
    fit: CollectiveFit
    points: Sequence[MeasuredPoint]
    checked: Sequence[CheckedPrediction] = ()


@in_paceline_style
def fit_chart(series: Sequence[FitSeries], title: str) -> Chart:
    """Return a chart of fits: filled markers are measurements, hollow ones predictions for held-out sizes.

    The lower panel shows predicted / measured of the held-out sizes.

    Args:
        series: at most `MAX_FIT_SERIES`.
        title: the measurement and its machine.
    """
    figure, (above, below) = stacked_panels(width=10, height=7.2, heights=(1.8, 1.0))
    below.axhline(1.0, color=MUTED, linewidth=1)
    ends: list[LineEnd] = []
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
    label_line_ends(above, ends, wide=True)
    above.yaxis.set_major_formatter(lambda seconds, _: format_seconds(seconds))
    set_title(above, title)
    low, high = below.get_ylim()
    below.set_ylim(min(low, 0.85), max(high, 1.18))
    set_log_ticks(below, (1, 2, 5) if high > 5 * low else (1, 1.1, 1.2, 1.5, 2, 3, 5, 6, 7, 8, 9))
    below.yaxis.set_major_formatter(lambda times, _: f"{times:g}×")
    below.set(xlabel="bytes", ylabel="held out: predicted ÷ measured", xlim=above.get_xlim())
    return Chart(figure)


def _curve(axes: Axes, series: FitSeries, colour: str) -> LineEnd:
    """Draw a fit over the sizes that it was fitted to; return its end."""
    ranks = series.points[0].ranks
    sizes = [float(size) for size in np.geomspace(series.fit.low, series.fit.high, _STEPS)]
    seconds = [series.fit.seconds(size, ranks) for size in sizes]
    axes.plot(sizes, seconds, color=colour, linewidth=2)
    return sizes[-1], seconds[-1], series.label, colour


def _marks(axes: Axes, points: Sequence[tuple[float, float]], colour: str, marker: str, face: str) -> None:
    sizes, values = [size for size, _ in points], [value for _, value in points]
    axes.plot(sizes, values, " ", color=colour, marker=marker, mfc=face, markersize=5)
