"""Chart of a plan: samples per second over ranks beside what they would do alone, and the efficiency with its range."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.plan.advise import Point
from paceline.report.canvas import COLOURS, MUTED, Chart, drawn, stacked_panels

__all__ = ["scaling_chart"]


@drawn
def scaling_chart(points: Sequence[Point], title: str) -> Chart:
    """Return the chart.

    Args:
        points: two or more, by ranks, one rank among them or not. title: what is planned.
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
    top.plot(ranks, alone, color=MUTED, linestyle=(0, (4, 3)), label="each as fast as alone")
    top.errorbar(
        ranks, rates, yerr=off, color=COLOURS[0], marker="o", capsize=4, linewidth=2, label="predicted"
    )
    top.set_ylabel("samples per second")
    top.set_title(title, loc="left", fontsize=12, fontweight="bold")
    top.set_ylim(bottom=0)
    top.legend(frameon=False, loc="upper left")
    bars = [
        [100 * (point.efficiency - point.least) for point in points],
        [100 * (point.most - point.efficiency) for point in points],
    ]
    shares = [100 * share for share in reached]
    below.errorbar(ranks, shares, yerr=bars, color=COLOURS[1], marker="s", capsize=4, linewidth=2)
    below.set_ylabel("% of alone")
    below.set_ylim(0, max(105, max(high + low for high, low in zip(shares, bars[1], strict=True)) + 5))
    below.set_xlabel("ranks")
    for axes in (top, below):
        axes.set_xticks(ranks)
        axes.grid(axis="y")
    return Chart(figure)
