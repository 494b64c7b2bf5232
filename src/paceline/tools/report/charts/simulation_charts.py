"""Chart of a simulated cluster: where the time of all nodes goes, and what an hour of useful work costs, by nodes.

Charts of runs in virtual time: loss over time for each setting beside DDP, and the time to the same loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

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
    stacked_panels,
)
from paceline.tools.report.charts.hub_charts import time_unit
from paceline.tools.simulate.async_rows import AsyncRow, LossPoint
from paceline.tools.simulate.cluster.cluster_simulation import LOSSES, ClusterRow

if TYPE_CHECKING:
    from paceline.tools.report.charts.chart_style import Axes

__all__ = ["cluster_chart", "loss_chart", "time_to_loss_chart"]

_COLOUR_OF: dict[str, str] = dict(zip(("useful", *LOSSES), [COLOURS[0], *COLOURS[1:], MUTED], strict=True))


_FAINT = 0.35


_FEW = 11
"""Numbers of nodes that are all written at the axis."""


@in_paceline_style
def cluster_chart(rows: Sequence[ClusterRow], *, title: str, price: float | None = None) -> Chart:
    """Return efficiency and its losses over nodes, and below it the cost of useful work.

    Efficiency has a band in which nine in ten jobs lie. The cost of an hour of useful work of a node is the price of an
    hour by the efficiency, or, without a price, hours of a node.

    Args:
        rows: two or more, by nodes. title: what is simulated. price: of an hour of a node.
    """
    figure, (top, below) = stacked_panels(width=10, height=7.4, heights=(2.2, 1.0))
    nodes = [row.nodes for row in rows]
    _shares(top, rows, nodes)
    top.set_title(title, loc="left", fontsize=11, fontweight="bold")
    moving = [row for row in rows if not row.stuck]
    at = [row.nodes for row in moving]
    rate = price or 1.0
    costs = [[rate / max(1e-9, share) for share in _band(row)] for row in moving]
    below.fill_between(
        at, [cost[0] for cost in costs], [cost[2] for cost in costs], color=COLOURS[0], alpha=0.2, lw=0
    )
    below.plot(at, [cost[1] for cost in costs], color=COLOURS[0], linewidth=1.8)
    below.set_ylabel("hours of a node" if price is None else "price")
    below.set_title("for one hour of useful work of a node", loc="left", fontsize=10)
    below.set_ylim(bottom=0)
    below.grid(axis="y")
    for axes in (top, below):
        _node_axis(axes, nodes)
    below.set_xlabel("nodes")
    return Chart(figure)


def _band(row: ClusterRow) -> tuple[float, float, float]:
    return row.efficiency.p95, row.efficiency.mean, row.efficiency.p5


def _shares(axes: Axes, rows: Sequence[ClusterRow], nodes: Sequence[int]) -> None:
    """Stack what the time goes into: useful work below, losses above it."""
    names = [name for name in ("useful", *LOSSES) if max(row.ledger[name] for row in rows) >= 0.002]
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
    told = {"useful": "useful (line: mean;\nband: nine in ten jobs)"}
    labels = [legend_patch(told.get(name, name), colour) for name, colour in zip(names, colours, strict=True)]
    for label in labels:
        label.set_alpha(0.55)
    axes.legend(
        handles=labels[::-1], loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=10
    )


def _node_axis(axes: Axes, nodes: Sequence[int]) -> None:
    from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.set_xlim(min(nodes), max(nodes))
    few = len(nodes) <= _FEW
    axes.xaxis.set_major_locator(FixedLocator(list(nodes)) if few else LogLocator(numticks=12))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_minor_formatter(NullFormatter())


_STYLES = ("-", (0, (5, 1.5)), (0, (1, 1)))


_SPREAD = 5.0


_TALLEST = 3.0
"""Times the loss at the beginning above which nothing is drawn: what diverges would hide all else."""


@in_paceline_style
def loss_chart(rows: Sequence[AsyncRow], *, title: str) -> Chart:
    """Return held-out loss over virtual time: a line for each setting, DDP dashed.

    Args:
        rows: one or more. title: what is simulated.
    """
    figure, (axes,) = stacked_panels(width=10, height=max(4.4, 1.6 + 0.21 * len(rows)))
    unit, scale = time_unit(max(row.seconds for row in rows))
    most = _TALLEST * rows[0].initial_loss
    ends: list[LineEnd] = []
    number = 0
    for row in rows:
        points = _drawable(row.points, most)
        if row.lockstep:
            colour, style, width = INK, (0, (4, 2)), 1.6
        else:
            colour, style = COLOURS[number % len(COLOURS)], _STYLES[number // len(COLOURS) % len(_STYLES)]
            number, width = number + 1, 1.8
        at, values = [each.seconds / scale for each in points], [each.loss for each in points]
        axes.plot(at, values, color=colour, linestyle=style, linewidth=width)
        if points:
            ends.append((at[-1], values[-1], row.name + (" (diverged)" if row.diverged else ""), colour))
    _loss_axis(axes, [point.loss for row in rows for point in _drawable(row.points, most)])
    _time_axis(axes)
    _make_room(axes, 0.03 * len(ends))
    axes.set_xlabel(f"virtual time ({unit})")
    axes.set_ylabel("held-out loss")
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.grid(axis="y")
    label_line_ends(axes, ends, wide=True)
    return Chart(figure)


@in_paceline_style
def time_to_loss_chart(rows: Sequence[AsyncRow], *, aim: str) -> Chart:
    """Return the virtual time to a loss as bars, with how many times as soon as DDP that is.

    Args:
        rows: one or more. aim: which loss, in words.
    """
    figure, (axes,) = stacked_panels(width=10, height=1.3 + 0.42 * len(rows))
    unit, scale = time_unit(max(row.seconds for row in rows))
    longest = max((row.seconds_to_target or 0.0) / scale for row in rows) or 1.0
    for place, row in enumerate(rows):
        time = row.seconds_to_target
        if time is not None:
            colour = MUTED if row.lockstep else COLOURS[0]
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
    axes.set_title(f"Time to {aim}", loc="left", fontsize=11, fontweight="bold")
    axes.invert_yaxis()
    return Chart(figure)


def _remark(row: AsyncRow) -> str:
    if row.diverged:
        return "diverged"
    if row.seconds_to_target is None:
        return f"never (ends at {row.loss:.4g})"
    faster = "" if row.speedup is None or row.lockstep else f", {row.speedup:.3g} × DDP"
    return format_seconds(row.seconds_to_target) + faster


def _drawable(points: Sequence[LossPoint], most: float) -> list[LossPoint]:
    """Return the points up to the first that is not finite or too high."""
    found = []
    for point in points:
        if not math.isfinite(point.loss) or point.loss > most:
            break
        found.append(point)
    return found


def _time_axis(axes: Axes) -> None:
    """Make the axis of time logarithmic: a setting that is twice as quick is as far left everywhere."""
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.margins(x=0.01)


def _make_room(axes: Axes, share: float) -> None:
    """Lower the vertical axis's beginning by a share of its length: names of lines need room."""
    axes.autoscale_view()
    low, high = axes.get_ylim()
    axes.set_ylim(
        low * (low / high) ** share if axes.get_yscale() == "log" else low - share * (high - low), high
    )


def _loss_axis(axes: Axes, values: Sequence[float]) -> None:
    """Make the axis of losses logarithmic where they go over several sizes."""
    positive = [value for value in values if value > 0]
    if len(positive) == len(values) and positive and max(positive) > _SPREAD * min(positive):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: "")
