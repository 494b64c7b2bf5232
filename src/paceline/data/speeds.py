"""Shares learnt from how fast each rank is.

A step of a synchronous training lasts as long as its slowest rank, so it is shortest where every rank's batch
takes the same time: shares in proportion to samples per second. A rank's speed is the median over its steps of
samples / seconds without waiting, so that one step with a hiccup (a checkpoint, an evaluation) counts little.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from paceline.data.shares import FINEST, Shares, by_largest_remainder

__all__ = ["Pace", "blended", "largest_change", "shares_of"]

DAMPING = 0.5
"""How much of a new measurement counts beside the ones before."""

REMEMBERED = 4096
"""Steps that count for a speed, the latest ones."""

LEAST, MOST = 1 / 8, 2.0
"""A rank's share lies between these multiples of an equal share: it stays measurable, and its batch fits."""

WORTH_IT = 0.05
"""Data are dealt again where some share changes by more than this part of itself."""


@dataclass
class Pace:
    """What one rank measured of itself since it last told the others."""

    rates: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def note(self, samples: int, seconds: float) -> None:
        """Take note of one step: its samples, and its seconds without waiting."""
        if samples > 0 and seconds > 0:
            self.rates.append(samples / seconds)

    def take(self) -> float:
        """Return samples per second, 0 where nothing was measured, and begin anew."""
        rate = median(self.rates) if self.rates else 0.0
        self.rates.clear()
        return rate


def blended(before: Sequence[float] | None, now: Sequence[float]) -> list[float]:
    """Return speeds that follow new measurements with damping; a rank that measured nothing keeps its own."""
    if before is None:
        before = [0.0] * len(now)
    return [
        new if not old else old if not new else old + DAMPING * (new - old)
        for old, new in zip(before, now, strict=True)
    ]


def shares_of(speeds: Sequence[float]) -> Shares:
    """Return shares in proportion to `speeds`, within bounds; equal ones while some speed is not known."""
    ranks = len(speeds)
    if not all(speed > 0 for speed in speeds):
        return Shares.equal(ranks)
    return Shares(by_largest_remainder(_within_bounds(speeds), FINEST))


def largest_change(before: Shares, after: Shares) -> float:
    """Return by how much the share that changes most does, as a fraction of what it was."""
    return max(
        abs(new - old) / old if old else float(new > 0) for old, new in zip(before, after, strict=True)
    )


def _within_bounds(speeds: Sequence[float]) -> list[float]:
    """Return shares that sum to 1: at a bound, or in proportion to the speeds of those that are at none."""
    ranks = len(speeds)
    low, high = LEAST / ranks, MOST / ranks
    fixed: dict[int, float] = {}
    while True:
        free = [rank for rank in range(ranks) if rank not in fixed]
        left, total = 1 - sum(fixed.values()), sum(speeds[rank] for rank in free)
        found = {rank: left * speeds[rank] / total for rank in free}
        excess = sum(max(0.0, share - high) for share in found.values())
        lack = sum(max(0.0, low - share) for share in found.values())
        outside = {
            rank: high if share > high else low
            for rank, share in found.items()
            if (share > high and excess >= lack) or (share < low and lack > excess)
        }
        if not outside:
            return [fixed.get(rank, found.get(rank, 0.0)) for rank in range(ranks)]
        fixed |= outside
