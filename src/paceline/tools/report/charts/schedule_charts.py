"""Charts of collective schedules: messages over time, and predicted next to measured times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline._core.format import format_seconds
from paceline.collectives.schedule import Schedule
from paceline.collectives.simulated_cost import ScheduleCost, TimedMessage
from paceline.tools.report.charts.chart_style import (
    COLOURS,
    INK,
    MUTED,
    PAPER,
    Chart,
    in_paceline_style,
    legend_patch,
    set_title,
    stacked_panels,
)

if TYPE_CHECKING:
    from paceline.tools.report.charts.chart_style import Axes

__all__ = ["CostBar", "schedule_chart", "schedule_cost_chart"]

_COPY, _ADD = COLOURS[0], COLOURS[1]
_MAX_LABELLED, _MAX_HEADS = 64, 700  # messages up to which arrows have chunk labels and heads
_MIN_LABELLED_SHARE = 0.07  # of the whole time: shorter arrows have no space for a label


@in_paceline_style
def schedule_chart(schedule: Schedule, price: ScheduleCost, *, title: str) -> Chart:
    """Return a chart with time to the right, ranks downwards and an arrow per message, from its start to its end.

    Blue messages replace the receiver's data, orange ones are added to it. Arrows carry the numbers of their chunks
    if there are few.
    """
    figure, (axes,) = stacked_panels(width=10, height=max(2.6, 0.42 * schedule.ranks + 1.3))
    axes.set(xlim=(0, price.seconds or 1), ylim=(schedule.ranks - 0.5, -0.5))
    axes.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    axes.xaxis.set_major_formatter(lambda seconds, _: format_seconds(seconds))
    for rank in range(schedule.ranks):
        axes.axhline(rank, color=MUTED, linewidth=0.5, alpha=0.5, zorder=0)
    for number, (start, end) in enumerate(price.rounds):
        if number % 2 == 0:
            axes.axvspan(start, end, color=MUTED, alpha=0.06, linewidth=0, zorder=0)
    for timed in price.messages:
        _arrow(axes, timed, head=len(price.messages) <= _MAX_HEADS)
        long = timed.end - timed.start > _MIN_LABELLED_SHARE * price.seconds
        if long and len(price.messages) <= _MAX_LABELLED and schedule.chunks > 1:
            _label_chunks(axes, timed)
    kinds = {any(send.add for send in timed.message.sends) for timed in price.messages}
    handles = [
        legend_patch("added", _ADD) if add else legend_patch("replaces", _COPY)
        for add in sorted(kinds, reverse=True)
    ]
    if len(kinds) > 1:
        axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, frameon=False)
    set_title(axes, title, pad=26 if len(kinds) > 1 else 8)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return Chart(figure)


def _colour(timed: TimedMessage) -> str:
    return _ADD if any(send.add for send in timed.message.sends) else _COPY


def _arrow(axes: Axes, timed: TimedMessage, *, head: bool) -> None:
    style: dict[str, Any] = {"arrowstyle": "-|>" if head else "-", "shrinkA": 0, "shrinkB": 0}
    style |= {"color": _colour(timed), "linewidth": 1.3, "alpha": 0.85}
    axes.annotate("", (timed.end, timed.message.dst), (timed.start, timed.message.src), arrowprops=style)


def _label_chunks(axes: Axes, timed: TimedMessage) -> None:
    names = [
        str(send.chunk) if send.width == 1 else f"{send.chunk}–{send.chunk + send.width - 1}"
        for send in timed.message.sends
    ]
    along = 0.24  # near the tail: arrows of one round overlap less there
    at = timed.start + along * (timed.end - timed.start)
    row = timed.message.src + along * (timed.message.dst - timed.message.src)
    axes.annotate(
        ", ".join(names),
        (at, row),
        ha="center",
        va="center",
        fontsize=8,
        color=_colour(timed),
        bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.6},
    )


@dataclass(frozen=True)
class CostBar:
    """A bar of `schedule_cost_chart`.

    Attributes:
        label: name of the schedule.
        predicted: seconds by the cost model.
        measured: seconds of each run, if any.
    """

    label: str
    predicted: float
    measured: Sequence[float] = ()


@in_paceline_style
def schedule_cost_chart(rows: Sequence[CostBar], *, title: str) -> Chart:
    """Return a chart of predicted times as bars, with a dot per measured time and measured / predicted."""
    figure, (axes,) = stacked_panels(width=10, height=0.42 * len(rows) + 1.3)
    longest = max(max([row.predicted, *row.measured]) for row in rows)
    places = range(len(rows))
    axes.barh(places, [row.predicted for row in rows], color=COLOURS[5], height=0.62, zorder=1)
    for place, row in zip(places, rows, strict=True):
        axes.plot(row.measured, [place] * len(row.measured), "o", color=INK, markersize=5, zorder=3)
        text = format_seconds(row.predicted)
        if row.measured:
            middle = median(row.measured)
            text = f"predicted {text}, measured {format_seconds(middle)} ({middle / row.predicted:.2f}×)"
        edge = max([row.predicted, *row.measured])
        axes.annotate(text, (edge, place), (8, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(places, [row.label for row in rows])
    axes.set(xlim=(0, 1.65 * longest), ylim=(len(rows) - 0.4, -0.6))
    axes.xaxis.set_major_formatter(lambda seconds, _: format_seconds(seconds))
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    set_title(axes, title)
    axes.tick_params(axis="y", length=0)
    return Chart(figure)
