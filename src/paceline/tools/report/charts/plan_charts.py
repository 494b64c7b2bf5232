"""Charts of plans: a step by phase and over bucket size, throughput over ranks, time lost over the checkpoint interval.

The first two follow the DDP paper (Li et al., PyTorch Distributed, arXiv 2006.15704: latency breakdown, bucket size).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.tools.plan.checkpoint_interval import CheckpointPlan
from paceline.tools.plan.strategy_advice import ScalingPoint
from paceline.tools.report.charts.chart_style import (
    COLOURS,
    INK,
    MARKERS,
    MUTED,
    Chart,
    LineEnd,
    in_paceline_style,
    label_line_ends,
    set_title,
    stacked_panels,
    time_unit,
)
from paceline.tools.report.charts.training_charts import StackedBar, breakdown_chart

if TYPE_CHECKING:
    from paceline.tools.report.charts.chart_style import Axes

__all__ = [
    "PredictedBucketLine",
    "PredictedStepBar",
    "bucket_chart",
    "checkpoint_chart",
    "scaling_chart",
    "step_chart",
]


@dataclass(frozen=True)
class PredictedStepBar:
    """Predicted and, where known, measured seconds of a step: (forward, backward, exposed, optimizer)."""

    label: str
    predicted: tuple[float, float, float, float]
    measured: tuple[float, float, float, float] | None = None


@dataclass(frozen=True)
class PredictedBucketLine:
    """Step times of a strategy by bucket size.

    Attributes:
        label: name of the strategy.
        points: (MiB, predicted seconds, low, high), ascending.
        measured: (MiB, seconds).
    """

    label: str
    points: Sequence[tuple[float, float, float, float]]
    measured: Sequence[tuple[float, float]] = ()


_PHASES = ("forward", "backward", "exposed", "optimizer")


def step_chart(bars: Sequence[PredictedStepBar], *, title: str) -> Chart:
    """Return a chart of a step's time by phase for each strategy: predicted bars, measured ones below them."""
    rows = []
    for bar in bars:
        rows.append(StackedBar(bar.label, _milliseconds(bar.predicted), "predicted" if bar.measured else ""))
        if bar.measured:
            off = 100 * (sum(bar.predicted) / sum(bar.measured) - 1)
            remark = f"measured; predicted {off:+.0f} %".replace("-", "−")
            rows.append(StackedBar("", _milliseconds(bar.measured), remark))
    return breakdown_chart({title: rows})


def _milliseconds(parts: Sequence[float]) -> dict[str, float]:
    return {phase: 1e3 * seconds for phase, seconds in zip(_PHASES, parts, strict=True)}


@in_paceline_style
def bucket_chart(
    lines: Sequence[PredictedBucketLine], *, title: str, bare: float, marked: Sequence[tuple[str, float]]
) -> Chart:
    """Return a chart of step time over bucket size: predicted lines with their range, measured markers.

    Args:
        lines: at least one.
        title: the model and the machine.
        bare: seconds of a step without synchronisation.
        marked: (name, MiB) of bucket sizes to mark on the axis.
    """
    figure, (axes,) = stacked_panels(width=10, height=4.6)
    ends: list[LineEnd] = []
    for line, colour, marker in zip(lines, COLOURS, MARKERS, strict=False):
        sizes, times, low, high = zip(*line.points, strict=True)
        axes.fill_between(sizes, _ms(low), _ms(high), color=colour, alpha=0.1, linewidth=0)
        axes.plot(sizes, _ms(times), color=colour, linewidth=2)
        if line.measured:
            at, seconds = zip(*line.measured, strict=True)
            axes.plot(
                at,
                _ms(seconds),
                marker,
                color=colour,
                markersize=7,
                markerfacecolor="none",
                markeredgewidth=1.8,
            )
        ends.append((sizes[-1], 1e3 * times[-1], line.label, colour))
    every = [size for line in lines for size, *_ in line.points]
    axes.plot([min(every), max(every)], _ms((bare, bare)), "--", color=MUTED, linewidth=1.3)
    ends.append((max(every), 1e3 * bare, "no synchronisation", MUTED))
    _axis(axes, min(every), max(every), [each for each in marked if min(every) <= each[1] <= max(every)])
    set_title(axes, title, pad=22 if marked else 8)
    axes.set(xlabel="bucket size (MiB)", ylabel="milliseconds of one step", ylim=(0, None))
    axes.grid(axis="y")
    label_line_ends(axes, ends, wide=True)
    return Chart(figure)


def _axis(axes: Axes, low: float, high: float, marked: Sequence[tuple[str, float]]) -> None:
    """Set ticks at powers of two or four, and draw a named line at each marked size."""
    axes.set_xscale("log")
    step = 2 if math.log2(high / low) <= 9 else 4
    ticks = [step**power for power in range(-4, 12) if low <= step**power <= high]
    axes.set_xticks(ticks, [f"{size:.3g}" for size in ticks])
    axes.minorticks_off()
    _mark(axes, marked)


def _mark(axes: Axes, marked: Sequence[tuple[str, float]]) -> None:
    """Draw a named vertical line at each marked place."""
    for name, place in marked:
        axes.axvline(place, color=MUTED, linewidth=1, linestyle=":")
        axes.annotate(
            name,
            (place, 1.0),
            (0, 3),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=MUTED,
        )


def _ms(seconds: Sequence[float]) -> list[float]:
    return [1e3 * each for each in seconds]


@in_paceline_style
def scaling_chart(points: Sequence[ScalingPoint], title: str) -> Chart:
    """Return a chart of samples per second and scaling efficiency over ranks.

    Args:
        points: two or more, in order of ranks.
        title: the planned training.
    """
    figure, (top, below) = stacked_panels(width=9, height=6.4, heights=(1.4, 1.0))
    ranks = [point.ranks for point in points]
    rates = [point.samples_per_second for point in points]
    reached = [point.efficiency for point in points]
    alone = [rate / share for rate, share in zip(rates, reached, strict=True)]
    off = [
        [rate * (1 - point.seconds / point.high) for rate, point in zip(rates, points, strict=True)],
        [rate * (point.seconds / point.low - 1) for rate, point in zip(rates, points, strict=True)],
    ]
    top.plot(ranks, alone, color=MUTED, linestyle=(0, (4, 3)), label="linear scaling")
    top.errorbar(
        ranks, rates, yerr=off, color=COLOURS[0], marker="o", capsize=4, linewidth=2, label="predicted"
    )
    top.set_ylabel("samples per second")
    set_title(top, title)
    top.set_ylim(bottom=0)
    top.legend(frameon=False, loc="upper left")
    bars = [
        [100 * (point.efficiency - point.least) for point in points],
        [100 * (point.most - point.efficiency) for point in points],
    ]
    shares = [100 * share for share in reached]
    below.errorbar(ranks, shares, yerr=bars, color=COLOURS[1], marker="s", capsize=4, linewidth=2)
    below.set_ylabel("efficiency (%)")
    below.set_ylim(0, max(105, max(high + low for high, low in zip(shares, bars[1], strict=True)) + 5))
    below.set_xlabel("ranks")
    for axes in (top, below):
        axes.set_xticks(ranks)
        axes.grid(axis="y")
    return Chart(figure)


_REACH, _INTERVALS = 16.0, 129


@in_paceline_style
def checkpoint_chart(plan: CheckpointPlan, *, title: str) -> Chart:
    """Return a chart of the time lost over the interval between saves, with the advised and the present interval.

    The band is what the failures that were counted leave open. Intervals at which saves wait for each other are grey.

    Args:
        plan: how often to save.
        title: of what.
    """
    from matplotlib.ticker import LogLocator

    figure, (axes,) = stacked_panels(width=10, height=4.6)
    marked = [(f"every {plan.every}", plan.seconds)]
    if plan.present is not None:
        marked.append(("now", plan.present.interval))
    low = min(plan.best / _REACH, *(0.8 * at for _, at in marked))
    high = max(plan.best * _REACH, *(1.25 * at for _, at in marked))
    rows = [plan.losses(low * (high / low) ** (at / (_INTERVALS - 1))) for at in range(_INTERVALS)]
    unit, scale = time_unit(plan.best)
    at = [row.interval / scale for row in rows]
    axes.fill_between(
        at, [100 * row.low for row in rows], [100 * row.high for row in rows],
        color=INK, alpha=0.1, linewidth=0,
    )  # fmt: skip
    lines = {
        "in all": ([row.total for row in rows], INK, 2.2),
        "saves": ([row.saves for row in rows], COLOURS[0], 1.5),
        "lost work": ([row.work for row in rows], COLOURS[1], 1.5),
        "restarts": ([row.restarts for row in rows], COLOURS[2], 1.5),
    }
    ends: list[LineEnd] = []
    for name, (shares, colour, width) in lines.items():
        percent = [100 * share for share in shares]
        axes.plot(at, percent, color=colour, linewidth=width)
        ends.append((at[-1], percent[-1], name, colour))
    axes.set_xscale("log")
    axes.set_xlim(at[0], at[-1])
    xlabel = f"training between two saves ({unit})"
    if (shortest := plan.costs.shortest / scale) > at[0]:
        axes.axvspan(at[0], shortest, color=MUTED, alpha=0.12, linewidth=0)
        xlabel += "; grey: a save waits for the one before"
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    _mark(axes, [(name, place / scale) for name, place in marked])
    set_title(axes, title, pad=22)
    axes.set(xlabel=xlabel, ylabel="% of all time lost")
    free = [row for row in rows if row.interval >= plan.costs.shortest] or rows
    shares = [row.total for row in (free[0], free[-1], *(plan.losses(place) for _, place in marked))]
    axes.set_ylim(0, min(100.0, 1.1 * max(100 * max(shares), 1e-3)))
    axes.grid(axis="y")
    label_line_ends(axes, ends, wide=True)
    return Chart(figure)
