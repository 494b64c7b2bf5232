"""Shares in proportion to the measured throughput of ranks.

A step of synchronous training lasts as long as its slowest rank, so it is shortest if every rank's batch takes the
same time: shares in proportion to samples per second. A rank's throughput is the median over its steps of samples /
seconds without waiting, so that a single slow step (a checkpoint, an evaluation) counts little.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from statistics import median

import torch
from torch.distributed import ProcessGroup

from paceline._core.step_state import wait_counters
from paceline.data.sampling.rank_shares import MAX_PARTS, RankShares, by_largest_remainder
from paceline.world.control_collectives import gather_rows

__all__ = ["MeasuredShares", "blend_speeds", "largest_share_change", "shares_from_speeds"]

log = logging.getLogger("paceline.data")

SMOOTHING = 0.5
"""Weight of a new measurement relative to earlier ones."""

MIN_MULTIPLE, MAX_MULTIPLE = 1 / 8, 2.0
"""Bounds of a rank's share as multiples of an equal share: it stays measurable, and its batch fits."""

_MAX_STEPS = 4096  # the latest ones, from which a throughput is computed
_MIN_CHANGE = 0.05  # relative change of a share for which data is redistributed

_NO_WAITS = (
    "shares stay as they are: the time that ranks wait for each other is known with paceline.DataParallel on CPUs "
    "only, and not with full-shard"
)


class MeasuredShares:
    """Measures this rank's throughput, and derives the shares of all ranks.

    Args:
        every: steps between two updates; None: between epochs.

    Attributes:
        every: as above.
        speeds: samples per second of each rank; None: not known.
    """

    def __init__(self, every: int | None = None) -> None:
        self.every = every
        self.speeds: list[float] | None = None
        self._rates: deque[float] = deque(maxlen=_MAX_STEPS)
        self._waits = wait_counters.waits
        self._warned = False

    def record(self, samples: int, seconds: float) -> None:
        """Record one step: its samples, and its seconds without waiting."""
        if samples > 0 and seconds > 0:
            self._rates.append(samples / seconds)

    def take_rate(self) -> float:
        """Return samples per second since the last call, 0 if nothing was measured."""
        rate = median(self._rates) if self._rates else 0.0
        self._rates.clear()
        return rate

    def update(self, before: RankShares, rank: int, group: ProcessGroup | None) -> RankShares | None:
        """Gather the throughput of all ranks and return new shares; None: keep those `before`.

        All ranks call this at the same step.
        """
        waits, self._waits = wait_counters.waits - self._waits, wait_counters.waits
        own = torch.tensor([self.take_rate(), float(waits)], dtype=torch.float64)
        rates, waits_of_rank = zip(*(row.tolist() for row in gather_rows(own, group)), strict=True)
        if not any(rates):
            return None
        if not all(waits_of_rank):
            if rank == 0 and not self._warned:
                log.warning(_NO_WAITS)
            self._warned = True
            return None
        self.speeds = blend_speeds(self.speeds, rates)
        shares = shares_from_speeds(self.speeds)
        return shares if largest_share_change(before, shares) > _MIN_CHANGE else None


def blend_speeds(before: Sequence[float] | None, now: Sequence[float]) -> list[float]:
    """Return exponentially smoothed speeds; a rank without a new measurement keeps its old one."""
    if before is None:
        before = [0.0] * len(now)
    return [
        new if not old else old if not new else old + SMOOTHING * (new - old)
        for old, new in zip(before, now, strict=True)
    ]


def shares_from_speeds(speeds: Sequence[float]) -> RankShares:
    """Return shares in proportion to `speeds`, within bounds; equal ones while a speed is not known."""
    if not all(speed > 0 for speed in speeds):
        return RankShares.equal(len(speeds))
    return RankShares(by_largest_remainder(_bounded_shares(speeds), MAX_PARTS))


def largest_share_change(before: RankShares, after: RankShares) -> float:
    """Return the largest relative change of a rank's share."""
    return max(
        abs(new - old) / old if old else float(new > 0) for old, new in zip(before, after, strict=True)
    )


def _bounded_shares(speeds: Sequence[float]) -> list[float]:
    """Return shares that sum to 1: at a bound, or in proportion to the speeds of the ranks within bounds."""
    ranks = len(speeds)
    low, high = MIN_MULTIPLE / ranks, MAX_MULTIPLE / ranks
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
