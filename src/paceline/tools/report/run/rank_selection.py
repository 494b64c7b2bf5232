"""Order of ranks from worst to best, and the few of many ranks that a page shows first."""

from __future__ import annotations

from dataclasses import dataclass

from paceline._core.format import plural
from paceline.tools.report.page.html_page import RankRow
from paceline.tools.report.run.run_summary import RunSummary

__all__ = ["RankSelection", "select_ranks"]

_FEW = 12
_MAX_RANKS = 256


@dataclass(frozen=True)
class RankSelection:
    """The ranks of a run, worst first.

    Attributes:
        ranks: the ranks on the page, worst first.
        shown: those shown before the reader chooses others.
        left_out: number of ranks that are not on the page.
        median: the median rank.
        by: what the order is by.
    """

    ranks: tuple[int, ...] = ()
    shown: frozenset[int] = frozenset()
    left_out: int = 0
    median: int = -1
    by: str = ""

    def rows(self) -> list[RankRow]:
        """Return the row of each rank on the page."""
        return [RankRow(rank, rank in self.shown) for rank in self.ranks]

    def label(self, rank: int) -> str:
        """Return a rank's label; the worst, the median and the best of many ranks are named so."""
        role = ""
        if len(self.ranks) > len(self.shown):
            role = {self.ranks[-1]: " (best)", self.median: " (median)", self.ranks[0]: " (worst)"}.get(
                rank, ""
            )
        return f"rank {rank}{role}"

    def caption(self) -> str:
        """Return a sentence on the order, and on the ranks that are hidden or left out."""
        if len(self.ranks) < 2:
            return ""
        text = f"Worst first, by {self.by}."
        hidden = len(self.ranks) - len(self.shown)
        if hidden:
            text += f" The worst {len(self.shown) - 2}, the median and the best are shown"
            text += f"; {plural(hidden, 'more rank')} can be chosen."
        if self.left_out:
            text += f" {plural(self.left_out, 'rank')} between them left out of this page."
        return text


def select_ranks(summary: RunSummary, worst: int = 8) -> RankSelection:
    """Return the ranks of a run, worst first: the latest at the exchange, or without arrivals the slowest to compute.

    Args:
        summary: the run's numbers.
        worst: how many of the worst are shown first, besides the median and the best, if there are many.
    """
    lateness = {each.rank: each.lateness for each in summary.arrivals.ranks}
    own_time = {each.rank: each.total - each.seconds["exposed"] for each in summary.ranks}
    known = lateness or own_time
    order = sorted((each.rank for each in summary.ranks), key=lambda rank: (-known.get(rank, 0.0), rank))
    if not order:
        return RankSelection()
    by = "arrival at the exchange" if lateness else "time without waiting for communication"
    middle = order[len(order) // 2]
    if len(order) <= _FEW:
        return RankSelection(tuple(order), frozenset(order), median=middle, by=by)
    kept = [*order[: _MAX_RANKS - 1], order[-1]] if len(order) > _MAX_RANKS else order
    if middle not in kept:
        kept[-2] = middle
    shown = frozenset([*order[:worst], middle, order[-1]])
    return RankSelection(tuple(kept), shown, len(order) - len(kept), middle, by)
