"""Chart of a simulated cluster: where the time of all nodes goes, and what an hour of useful work costs, by nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.report.canvas import COLOURS, INK, MUTED, Chart, drawn, stacked_panels, swatch
from paceline.simulate.cluster.run import LOSSES, ClusterRow

if TYPE_CHECKING:
    from paceline.report.canvas import Axes

__all__ = ["by_nodes"]

_COLOUR_OF: dict[str, str] = dict(zip(("useful", *LOSSES), [COLOURS[0], *COLOURS[1:], MUTED], strict=True))
_FAINT = 0.35
_FEW = 11
"""Numbers of nodes that are all written at the axis."""


@drawn
def by_nodes(rows: Sequence[ClusterRow], *, title: str, price: float | None = None) -> Chart:
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
    labels = [swatch(told.get(name, name), colour) for name, colour in zip(names, colours, strict=True)]
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
