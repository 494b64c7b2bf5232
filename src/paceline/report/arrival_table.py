"""Who comes when to the exchange of a step, as a table."""

from __future__ import annotations

from paceline.report.sheet import Listing
from paceline.report.summary import Summary
from paceline.units import format_seconds

__all__ = ["who_waits"]

_RANKS_SHOWN = 16


def who_waits(summary: Summary) -> list[Listing]:
    """Return the table of arrivals; none for fewer than two ranks that have recorded their steps."""
    arrivals = summary.arrivals
    if not arrivals.ranks:
        return []
    shown = sorted(arrivals.ranks, key=lambda each: -each.late)[:_RANKS_SHOWN]
    slowed = {rank.rank: rank.slowed for rank in summary.ranks}
    head = [
        "rank",
        "comes last in",
        "after the others' median",
        "worst twentieth",
        "waits for ranks",
        "waits for the network",
        "slowed by it",
    ]
    rows = [
        [
            str(each.rank),
            f"{100 * each.last:.0f}\u00a0%",
            _signed(each.late),
            _signed(each.late_often),
            format_seconds(each.imbalance),
            format_seconds(each.transfer),
            format_seconds(slowed.get(each.rank, 0.0)),
        ]
        for each in shown
    ]
    told = (
        f"When each rank comes to the last exchange of a step, over {arrivals.steps} steps. Exposed communication is "
        "waiting until the last rank is there, waiting for the network after that, and backward that goes slower "
        "while calls are under way; per step, mean."
    )
    if arrivals.clock_error:
        told += f" Clocks of hosts are known to {format_seconds(arrivals.clock_error)}."
    if len(arrivals.ranks) > len(shown):
        told += f" The latest {len(shown)} of {len(arrivals.ranks)} ranks."
    return [Listing("Who waits for whom", [head, *rows], told)]


def _signed(seconds: float) -> str:
    return f"{'−' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"
