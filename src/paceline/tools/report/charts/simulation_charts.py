"""Charts of simulations: efficiency and cost of a cluster over nodes; loss over virtual time, and time to a loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from paceline._core.format import format_seconds
from paceline.tools.report.charts.chart_style import (
    COLOURS,
    INK,
    MUTED,
    Chart,
    LineEnd,
    in_paceline_style,
    label_line_ends,
    legend_patch,
    set_title,
    stacked_panels,
    time_unit,
)
from paceline.tools.simulate.async_results import AsyncRow, LossPoint
from paceline.tools.simulate.cluster.cluster_simulation import LOSSES, ClusterRow

if TYPE_CHECKING:
    from paceline.tools.report.charts.chart_style import Axes

__all__ = ["cluster_chart", "loss_chart", "time_to_loss_chart"]

_COLOUR_OF: dict[str, str] = dict(
    zip(("useful", *LOSSES), [*COLOURS, MUTED, "#8a5a44", "#6a4c93"], strict=True)
)


_FAINT = 0.35
_MAX_TICKS = 11  # numbers of nodes up to which each has a tick


_TITLE_OF = {"restart": "recovery by restart", "live": "live recovery"}
_LINE_OF_WAY = {None: (COLOURS[0], "-"), "restart": (COLOURS[1], (0, (5, 1.5))), "live": (COLOURS[0], "-")}


@in_paceline_style
def cluster_chart(rows: Sequence[ClusterRow], *, title: str, price: float | None = None) -> Chart:
    """Return a chart of efficiency and its losses over nodes, and of the cost of one useful node hour.

    Each way of recovery from failures has a panel with its losses, and a line in the panel of costs. Efficiency has a
    band with 90 % of the jobs. The cost of a useful node hour is the price of an hour divided by the efficiency or,
    without a price, in node hours.

    Args:
        rows: in order of nodes, two or more numbers of them, for each of them one or both ways of recovery.
        title: the simulated training.
        price: price of a node hour.
    """
    ways = list(dict.fromkeys(row.recovery for row in rows))
    figure, (*panels, below) = stacked_panels(
        width=10, height=7.4 if len(ways) == 1 else 10.0, heights=(*[2.2] * len(ways), 1.0)
    )
    nodes = sorted({row.nodes for row in rows})
    names = _losses_shown(rows)
    for number, (axes, way) in enumerate(zip(panels, ways, strict=True)):
        shown = [row for row in rows if row.recovery == way]
        _shares(axes, shown, names, nodes, legend=number == 0)
        if number == 0:
            set_title(axes, title, pad=24 if len(ways) > 1 else None)
        if len(ways) > 1:
            axes.text(0, 1.02, _TITLE_OF[way or ""], transform=axes.transAxes, fontsize=10)
        _costs(below, shown, price or 1.0, _LINE_OF_WAY[way if len(ways) > 1 else None])
    below.set_ylabel("node hours" if price is None else "price")
    below.set_title("per useful node hour", loc="left", fontsize=10)
    if len(ways) > 1:
        below.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=10)
    below.set_ylim(bottom=0)
    below.grid(axis="y")
    for axes in (*panels, below):
        _node_axis(axes, nodes)
    below.set_xlabel("nodes")
    return Chart(figure)


def _costs(axes: Axes, rows: Sequence[ClusterRow], rate: float, line: tuple[str, Any]) -> None:
    """Draw the cost of a useful node hour of one way of recovery, where jobs end."""
    colour, style = line
    moving = [row for row in rows if not row.stuck]
    at = [row.nodes for row in moving]
    costs = [[rate / max(1e-9, share) for share in _band(row)] for row in moving]
    axes.fill_between(
        at, [cost[0] for cost in costs], [cost[2] for cost in costs], color=colour, alpha=0.2, lw=0
    )
    label = _TITLE_OF.get(rows[0].recovery or "")
    axes.plot(at, [cost[1] for cost in costs], color=colour, linestyle=style, linewidth=1.8, label=label)


def _band(row: ClusterRow) -> tuple[float, float, float]:
    return row.efficiency.p95, row.efficiency.mean, row.efficiency.p5


def _losses_shown(rows: Sequence[ClusterRow]) -> list[str]:
    """Return useful work and the losses that can be seen."""
    return [name for name in ("useful", *LOSSES) if max(row.ledger[name] for row in rows) >= 0.002]


def _shares(
    axes: Axes, rows: Sequence[ClusterRow], names: Sequence[str], nodes: Sequence[int], *, legend: bool
) -> None:
    """Stack useful work and the losses above it."""
    parts = [[100 * max(0.0, row.ledger[name]) for row in rows] for name in names]
    colours = [_COLOUR_OF[name] for name in names]
    for area in axes.stackplot(nodes, parts, colors=colours):
        area.set_alpha(_FAINT)
        area.set_linewidth(0)
    low, high = (
        [100 * value for value in of]
        for of in zip(*((row.efficiency.p5, row.efficiency.p95) for row in rows), strict=True)
    )
    axes.fill_between(nodes, low, high, color=COLOURS[0], alpha=0.4, lw=0)
    axes.plot(nodes, [100 * row.efficiency.mean for row in rows], color=INK, linewidth=1.8)
    axes.set_ylim(0, 100)
    axes.set_ylabel("% of all time")
    if not legend:
        return
    legend_names = {"useful": "useful (line: mean;\nband: 90 % of jobs)"}
    labels = [
        legend_patch(legend_names.get(name, name), colour)
        for name, colour in zip(names, colours, strict=True)
    ]
    for label in labels:
        label.set_alpha(0.55)
    axes.legend(
        handles=labels[::-1], loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=10
    )


def _node_axis(axes: Axes, nodes: Sequence[int]) -> None:
    from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.set_xlim(min(nodes), max(nodes))
    few = len(nodes) <= _MAX_TICKS
    axes.xaxis.set_major_locator(FixedLocator(list(nodes)) if few else LogLocator(numticks=12))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_minor_formatter(NullFormatter())


_STYLES = ("-", (0, (5, 1.5)), (0, (1, 1)))
_LOG_FROM = 5.0  # largest / smallest loss from which the axis is logarithmic
_MAX_LOSS_RATIO = 3.0  # times the initial loss above which diverging curves are cut


@in_paceline_style
def loss_chart(rows: Sequence[AsyncRow], *, title: str) -> Chart:
    """Return a chart of held-out loss over virtual time: a line per setting, DDP dashed.

    Args:
        rows: one or more.
        title: the simulated training.
    """
    figure, (axes,) = stacked_panels(width=10, height=max(4.4, 1.6 + 0.21 * len(rows)))
    unit, scale = time_unit(max(row.seconds for row in rows))
    highest = _MAX_LOSS_RATIO * rows[0].initial_loss
    ends: list[LineEnd] = []
    number = 0
    for row in rows:
        points = _drawable(row.points, highest)
        if row.is_ddp:
            colour, style, width = INK, (0, (4, 2)), 1.6
        else:
            colour, style = COLOURS[number % len(COLOURS)], _STYLES[number // len(COLOURS) % len(_STYLES)]
            number, width = number + 1, 1.8
        at, values = [each.seconds / scale for each in points], [each.loss for each in points]
        axes.plot(at, values, color=colour, linestyle=style, linewidth=width)
        if points:
            ends.append((at[-1], values[-1], row.name + (" (diverged)" if row.diverged else ""), colour))
    _loss_axis(axes, [point.loss for row in rows for point in _drawable(row.points, highest)])
    _time_axis(axes)
    _make_room(axes, 0.03 * len(ends))
    axes.set_xlabel(f"virtual time ({unit})")
    axes.set_ylabel("held-out loss")
    set_title(axes, title)
    axes.grid(axis="y")
    label_line_ends(axes, ends, wide=True)
    return Chart(figure)


@in_paceline_style
def time_to_loss_chart(rows: Sequence[AsyncRow], *, aim: str) -> Chart:
    """Return a bar chart of the virtual time to a loss, with the speedup over DDP.

    Args:
        rows: one or more.
        aim: description of the loss, for the title.
    """
    figure, (axes,) = stacked_panels(width=10, height=1.3 + 0.42 * len(rows))
    unit, scale = time_unit(max(row.seconds for row in rows))
    longest = max((row.seconds_to_target or 0.0) / scale for row in rows) or 1.0
    for place, row in enumerate(rows):
        time = row.seconds_to_target
        if time is not None:
            colour = MUTED if row.is_ddp else COLOURS[0]
            axes.barh(place, time / scale, height=0.66, color=colour)
        axes.annotate(
            _remark(row), ((time or 0.0) / scale, place), (5, 0), textcoords="offset points", va="center",
            fontsize=10, color=INK if time is not None else MUTED,
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.spines["left"].set_visible(False)
    axes.set_xlim(0, longest * 1.25)
    axes.set_xlabel(f"virtual time ({unit})")
    set_title(axes, f"Time to {aim}")
    axes.invert_yaxis()
    return Chart(figure)


def _remark(row: AsyncRow) -> str:
    if row.diverged:
        return "diverged"
    if row.seconds_to_target is None:
        return f"never (ends at {row.loss:.4g})"
    faster = "" if row.speedup is None or row.is_ddp else f", {row.speedup:.3g}× DDP"
    return format_seconds(row.seconds_to_target) + faster


def _drawable(points: Sequence[LossPoint], highest: float) -> list[LossPoint]:
    """Return the points before the first one that is not finite or too high."""
    return list(takewhile(lambda point: math.isfinite(point.loss) and point.loss <= highest, points))


def _time_axis(axes: Axes) -> None:
    """Make the time axis logarithmic, so that equal speedups are equal distances."""
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.margins(x=0.01)


def _make_room(axes: Axes, share: float) -> None:
    """Extend the y axis downwards by a share of its length, to fit the labels of lines."""
    axes.autoscale_view()
    low, high = axes.get_ylim()
    axes.set_ylim(
        low * (low / high) ** share if axes.get_yscale() == "log" else low - share * (high - low), high
    )


def _loss_axis(axes: Axes, values: Sequence[float]) -> None:
    """Make the loss axis logarithmic if losses span a wide range."""
    if values and min(values) > 0 and max(values) > _LOG_FROM * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: "")
