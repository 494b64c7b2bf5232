"""Charts of an asynchronous run: scores, contributions of workers, staleness and traffic."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from paceline._core.format import format_decimal
from paceline.tools.report.charts.chart_style import (
    COLOURS,
    INK,
    MUTED,
    Chart,
    ChartLine,
    LineEnd,
    in_paceline_style,
    label_line_ends,
    running_mean,
    stacked_panels,
    time_unit,
)
from paceline.tools.report.hub.downsample import Point
from paceline.tools.report.hub.hub_downtime import HubDowntime
from paceline.tools.report.hub.hub_traffic import ReservedRate

if TYPE_CHECKING:
    from paceline.tools.report.charts.chart_style import Axes

__all__ = [
    "ScoreCurves",
    "ShareBar",
    "contribution_chart",
    "escape_mathtext",
    "ignore_missing_glyphs",
    "score_chart",
    "staleness_histogram",
    "traffic_chart",
]

_MAX_COLOURED = 5  # workers up to which each has a colour; more are all grey
_LOG_FROM = 30.0  # largest value / median from which an axis is logarithmic
_SMOOTH_FROM = 60  # points


@dataclass(frozen=True)
class ScoreCurves:
    """Data of the score chart; times in seconds since the beginning.

    Attributes:
        global_model: scores of the global model.
        workers: scores of workers, largest contribution first.
        together: when all joined one; None: never. replaced: where a worker was replaced by the best.
        away: when the hub was not there.
    """

    global_model: Sequence[Point]
    workers: Sequence[ChartLine]
    merged_at: float | None = None
    replacements: Sequence[Point] = ()
    downtimes: Sequence[HubDowntime] = ()


@dataclass(frozen=True)
class ShareBar:
    """A bar: worker, share from 0 to 1, text behind the bar, and whether it stands for several workers."""

    name: str
    share: float
    remark: str
    several: bool = False


def escape_mathtext(text: str) -> str:
    """Return a text that matplotlib draws literally: no formula, and not hidden from legends by an underscore.

    Example:
        >>> escape_mathtext("_a $x$")
        '\\u2009_a \\\\$x\\\\$'
    """
    return ("\u2009" if text.startswith("_") else "") + text.replace("$", r"\$")


@contextmanager
def ignore_missing_glyphs() -> Iterator[None]:
    """Silence warnings about glyphs missing in matplotlib's font; the browser that shows the SVG has them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Gg]lyph.*missing from.*")
        yield


@in_paceline_style
def score_chart(curves: ScoreCurves, seconds: float, *, y: str, wide: bool = True) -> Chart:
    """Return a chart of scores over wall time: global model, workers (faint), replacements and downtimes.

    Args:
        curves: the data.
        seconds: length of the run.
        y: label of the y axis.
        wide: draw for a desktop page instead of a phone.
    """
    figure, (axes,) = stacked_panels(width=10 if wide else 4.2, height=3.8 if wide else 3.2)
    scale = _time_axis(axes, seconds, curves.downtimes)
    few = len(curves.workers) <= _MAX_COLOURED
    ends: list[LineEnd] = []
    for line, colour in zip(curves.workers, [*COLOURS[1:], *[MUTED] * len(curves.workers)], strict=False):
        colour = colour if few else MUTED
        faint = bool(curves.global_model)
        axes.plot(
            *_broken(line.points, curves.downtimes, scale),
            color=colour,
            linewidth=1.2 if faint else 1.8,
            alpha=(0.75 if few else 0.4) if faint else 1.0,
            marker="." if len(line.points) < 25 else "",
        )
        if few and line.points:
            at, value = line.points[-1]
            ends.append((at / scale, value, escape_mathtext(_short(line.label, 18)), colour))
    if curves.global_model:
        _plot_global(axes, curves.global_model, curves.downtimes, scale)
        ends.insert(
            0, (curves.global_model[-1][0] / scale, curves.global_model[-1][1], "global model", COLOURS[0])
        )
    if curves.replacements:
        axes.plot(
            [at / scale for at, _ in curves.replacements],
            [score for _, score in curves.replacements],
            "x",
            color=INK,
        )
    if curves.merged_at is not None:
        axes.axvline(curves.merged_at / scale, color=INK, linewidth=1, linestyle="--")
        axes.annotate(
            "all adopt the best", (curves.merged_at / scale, 1), (4, -4), xycoords=("data", "axes fraction"),
            textcoords="offset points", va="top", fontsize=9, color=MUTED,
        )  # fmt: skip
    all_points = [*curves.global_model, *(point for line in curves.workers for point in line.points)]
    _log_if_skewed(axes, [value for _, value in all_points])
    axes.set_ylabel(y)
    axes.grid(axis="y")
    label_line_ends(axes, ends, wide)
    return Chart(figure)


def _plot_global(axes: Axes, points: Sequence[Point], downtimes: Sequence[HubDowntime], scale: float) -> None:
    at, values = _broken(points, downtimes, scale)
    colour = COLOURS[0]
    if len(points) <= _SMOOTH_FROM:
        axes.plot(
            at, values, color=colour, linewidth=2.2, marker="o" if len(points) < 25 else "", markersize=4
        )
        return
    axes.plot(at, values, color=colour, alpha=0.3, linewidth=1)
    smooth = running_mean([value for _, value in points], len(points) // 80)
    smoothed = [(x, value) for (x, _), value in zip(points, smooth, strict=True)]
    axes.plot(*_broken(smoothed, downtimes, scale), color=colour, linewidth=2.2)


@in_paceline_style
def contribution_chart(shares: Sequence[ShareBar], *, wide: bool = True) -> Chart:
    """Return a bar chart of workers' shares, from top to bottom; `wide` for a desktop page instead of a phone."""
    figure, (axes,) = stacked_panels(width=10 if wide else 4.2, height=0.3 * len(shares) + 0.7)
    places, values = range(len(shares)), [100 * each.share for each in shares]
    colours = [MUTED if each.several else COLOURS[0] for each in shares]
    axes.barh(places, values, color=colours, height=0.68)
    for place, (value, each) in enumerate(zip(values, shares, strict=True)):
        axes.annotate(
            escape_mathtext(each.remark),
            (value, place),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
        )
    length = 24 if wide else 14
    axes.set_yticks(places, [escape_mathtext(_short(each.name, length)) for each in shares])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_xlim(0, max([*values, 1.0]) * (1.45 if wide else 1.6))
    axes.set_ylim(len(shares) - 0.4, -0.6)
    axes.set_xlabel("% of all")
    axes.spines["left"].set_visible(False)
    return Chart(figure)


@in_paceline_style
def staleness_histogram(rows: Sequence[tuple[float, float, int]], *, wide: bool = True) -> Chart:
    """Return a histogram of staleness.

    Args:
        rows: lower edge, upper edge and count of each bar.
        wide: draw for a desktop page instead of a phone.
    """
    figure, (axes,) = stacked_panels(width=10 if wide else 4.2, height=2.6)
    whole = sum(count for _, _, count in rows) or 1
    axes.bar(range(len(rows)), [100 * count / whole for *_, count in rows], color=COLOURS[0], width=0.9)
    names = [f"{begin:g}–{end:g}" if math.isfinite(end) else f"≥ {begin:g}" for begin, end, _ in rows]
    axes.set_xticks(range(len(rows)), names, fontsize=11 if wide else 8, rotation=0 if wide else 45)
    axes.tick_params(axis="x", length=0)
    for place, (_, _, count) in enumerate(rows):
        if count and (wide or len(rows) < 7):
            axes.annotate(
                f"{count:,}", (place, 100 * count / whole), (0, 3), textcoords="offset points",
                ha="center", fontsize=9, color=MUTED,
            )  # fmt: skip
    axes.margins(y=0.12)
    axes.set(xlabel="staleness (rounds)", ylabel="% of updates")
    return Chart(figure)


@in_paceline_style
def traffic_chart(
    received: Sequence[Point],
    sent: Sequence[Point],
    reserved: Sequence[ReservedRate],
    downtimes: Sequence[HubDowntime],
    seconds: float,
    *,
    wide: bool = True,
) -> Chart:
    """Return a chart of bytes per second over wall time, with the reserved rate dashed.

    Args:
        received: (seconds since the beginning, bytes per second) received by the hub.
        sent: the same for sent bytes.
        reserved: periods with a reserved rate, since the beginning.
        downtimes: downtimes of the hub, since the beginning.
        seconds: length of the run.
        wide: draw for a desktop page instead of a phone.
    """
    figure, (axes,) = stacked_panels(width=10 if wide else 4.2, height=2.8)
    scale = _time_axis(axes, seconds, downtimes)
    ends: list[LineEnd] = []
    for label, points, colour in (("in", received, COLOURS[0]), ("out", sent, COLOURS[1])):
        axes.plot(
            *_broken(points, downtimes, scale),
            color=colour,
            linewidth=1.5,
            marker="." if len(points) < 25 else "",
        )
        if points:
            ends.append((points[-1][0] / scale, points[-1][1], label, colour))
    for each in reserved:
        axes.hlines(each.rate, each.begin / scale, each.end / scale, color=INK, linewidth=1.2, linestyle="--")
    if reserved:
        ends.append((reserved[-1].end / scale, reserved[-1].rate, "reserved", INK))
    rates = [rate for _, rate in [*received, *sent]] + [each.rate for each in reserved]
    axes.set_ylim(0, 1.08 * max([*rates, 1.0]))
    axes.yaxis.set_major_formatter(lambda rate, _: f"{format_decimal(rate)}/s")
    axes.grid(axis="y")
    label_line_ends(axes, ends, wide)
    return Chart(figure)


def _time_axis(axes: Axes, seconds: float, downtimes: Sequence[HubDowntime]) -> float:
    """Label the time axis, shade downtimes of the hub, and return the seconds per unit."""
    unit, scale = time_unit(seconds)
    axes.set_xlabel(f"wall time ({unit})")
    axes.set_xlim(-0.02 * max(seconds, 1.0) / scale, 1.01 * max(seconds, 1.0) / scale)
    for each in downtimes:
        axes.axvspan(each.since / scale, each.until / scale, color=MUTED, alpha=0.22, linewidth=0)
    return scale


def _broken(
    points: Sequence[Point], downtimes: Sequence[HubDowntime], scale: float
) -> tuple[list[float], list[float]]:
    """Return times and values of a line with gaps at downtimes of the hub."""
    at, values, gaps = [], [], [each.until for each in downtimes]
    passed = 0
    for x, value in points:
        while passed < len(gaps) and gaps[passed] <= x:
            if at:
                at.append(gaps[passed] / scale)
                values.append(math.nan)
            passed += 1
        at.append(x / scale)
        values.append(value)
    return at, values


def _log_if_skewed(axes: Axes, values: Sequence[float]) -> None:
    """Make the y axis logarithmic if a few large values would flatten the rest."""
    if values and min(values) > 0 and max(values) > _LOG_FROM * median(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: "")


def _short(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"
