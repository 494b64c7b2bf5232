"""Shares of the data as whole parts, and the order in which they take turns.

[Note: turns by share] Rank i of share qᵢ/D gets qᵢ of every D blocks. Its block j (counted from 0) may not
come before qᵢ·n/D has passed j and must have come when qᵢ·n/D reaches j + 1. An order that keeps all these
windows exists for any shares, and taking the earliest deadline among what may come finds it (unit jobs;
Tijdeman, "The chairman assignment problem", 1980; Steiner and Yeomans, Management Science 1993). So at every
prefix every rank has its share rounded down or up, never a whole block off. The order repeats every D blocks:
one period is stored, whatever the number of blocks.

Shares learnt from how fast each rank is.

A step of a synchronous training lasts as long as its slowest rank, so it is shortest where every rank's batch
takes the same time: shares in proportion to samples per second. A rank's speed is the median over its steps of
samples / seconds without waiting, so that one step with a hiccup (a checkpoint, an evaluation) counts little.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from statistics import median

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError

__all__ = [
    "FINEST",
    "RankShares",
    "ThroughputEstimate",
    "TurnOrder",
    "blended",
    "largest_change",
    "shares_of",
]

FINEST = 1 << 16
"""Most parts: shares that are no fractions of at most so many parts are rounded to them."""


SUM_TOLERANCE = 1e-6


@dataclass(frozen=True)
class RankShares:
    """How much of the data each rank gets, in whole parts.

    Attributes:
        parts: per rank; their sum makes up the whole.

    Raises:
        UsageError: no parts, a negative one, or more in all than 65,536 and than there are ranks.

    Example:
        >>> RankShares.of([0.25, 0.25, 0.10, 0.40], ranks=4).parts
        (5, 5, 2, 8)
    """

    parts: tuple[int, ...]

    def __post_init__(self) -> None:
        if min(self.parts, default=0) < 0 or not 0 < self.whole <= max(FINEST, self.ranks):
            raise UsageError(
                f"shares in parts of {_told(self.parts)}",
                remedy=f"each is 0 or more, and all together are 1 to {FINEST}",
            )

    @classmethod
    def equal(cls, ranks: int) -> RankShares:
        """Return the same share for each of `ranks`."""
        return cls((1,) * ranks)

    @classmethod
    def of(cls, values: Sequence[float] | RankShares | None, ranks: int) -> RankShares:
        """Return the shares that `values` mean; None: all the same.

        Fractions of at most 1000 parts each (.25, 1/3) are taken as they are, where 65,536 parts express all
        of them; others are rounded to 1/65536.

        Args:
            values: one share a rank, each 0 or more, 1 in all.
            ranks: how many there must be.

        Raises:
            UsageError: too few or too many, a negative one, one that is no number, or a sum that is not 1.
        """
        if values is None:
            return cls.equal(ranks)
        if isinstance(values, RankShares):
            _check_number(len(values.parts), ranks, values.parts)
            return values
        try:
            values = [float(value) for value in values]
        except (TypeError, ValueError) as error:
            raise UsageError(f"shares={values!r}", remedy="pass one number a rank, 1 in all") from error
        _check_number(len(values), ranks, values)
        for rank, value in enumerate(values):
            if not math.isfinite(value) or value < 0:
                raise UsageError(
                    f"share {value} of rank {rank}", remedy="a share is 0 or more, and all together are 1"
                )
        total = math.fsum(values)
        if abs(total - 1) > SUM_TOLERANCE:
            scaled = ", ".join(f"{value / total:.4g}" for value in values) if total > 0 else "0.5, 0.5"
            raise UsageError(
                f"shares {_told(values)} sum to {total:.6g}, not 1", remedy=f"pass for example {scaled}"
            )
        return cls(_parts(values))

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.parts)

    @cached_property
    def whole(self) -> int:
        """Parts of all ranks."""
        return sum(self.parts)

    def __getitem__(self, rank: int) -> float:
        """Return the share of `rank`, between 0 and 1."""
        return self.parts[rank] / self.whole

    def __iter__(self):  # noqa: ANN204 - of floats
        return (part / self.whole for part in self.parts)

    def __str__(self) -> str:
        return " ".join(f"{share:.4g}" for share in self)


def _check_number(found: int, ranks: int, values: Sequence[float]) -> None:
    if found != ranks:
        raise UsageError(
            f"{found} share{'s' * (found != 1)} ({_told(values)}) for {ranks} rank{'s' * (ranks != 1)}",
            remedy="pass one share a rank, in rank order",
        )


def _told(values: Sequence[float]) -> str:
    shown = ", ".join(f"{value:g}" for value in values[:8])
    return shown + ", …" * (len(values) > 8)


def _parts(values: Sequence[float]) -> tuple[int, ...]:
    fractions = [Fraction(value).limit_denominator(1000) for value in values]
    whole = math.lcm(*(fraction.denominator for fraction in fractions))
    close = all(abs(fraction - value) < 1e-9 for fraction, value in zip(fractions, values, strict=True))
    if close and whole <= FINEST and sum(fractions) == 1:
        return tuple(int(fraction * whole) for fraction in fractions)
    return by_largest_remainder(values, FINEST)


def by_largest_remainder(values: Sequence[float], whole: int) -> tuple[int, ...]:
    """Return whole numbers in proportion to `values` that sum to `whole`, each less than 1 off (Hamilton)."""
    total = math.fsum(values)
    exact = [value / total * whole for value in values]
    parts = [math.floor(value) for value in exact]
    by_rest = sorted(range(len(exact)), key=lambda rank: (parts[rank] - exact[rank], rank))
    for rank in by_rest[: whole - sum(parts)]:
        parts[rank] += 1
    return tuple(parts)


@dataclass(frozen=True)
class TurnOrder:
    """One period of turns by share; see [Note: turns by share].

    Attributes:
        owners: whose turn it is, ``[period]``.
        turns_of_rank: at which places of the period each rank has its turns, ascending.
    """

    owners: NDArray[np.int64]
    turns_of_rank: tuple[NDArray[np.int64], ...]

    @property
    def period(self) -> int:
        """Number of turns until they repeat."""
        return len(self.owners)

    @classmethod
    def of(cls, shares: RankShares) -> TurnOrder:
        """Return the turns of `shares`."""
        return _turns(shares.parts)

    def count(self, rank: int, turns: int) -> int:
        """Return how many of the first `turns` are those of `rank`."""
        return int(self.counts(rank, np.array(turns)))

    def counts(self, rank: int, turns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return, for each of `turns`, how many of the first so many are those of `rank`."""
        periods, rest = np.divmod(turns, self.period)
        own = self.turns_of_rank[rank]
        return periods * len(own) + np.searchsorted(own, rest)

    def nth(self, rank: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return which turns the `numbers`-th ones of `rank` are, all counted from 0."""
        own = self.turns_of_rank[rank]
        if len(own) == 1:  # shares are equal, mostly
            return numbers * self.period + own
        periods, rest = np.divmod(numbers, len(own))
        return periods * self.period + own[rest]


@lru_cache(maxsize=64)
def _turns(parts: tuple[int, ...]) -> TurnOrder:
    common = math.gcd(*parts)
    parts = tuple(part // common for part in parts)
    owners = np.array(_earliest_deadline_first(parts), dtype=np.int64)
    by_rank = np.argsort(owners, kind="stable")
    return TurnOrder(owners, tuple(np.split(by_rank, np.cumsum(parts)[:-1])))


def _earliest_deadline_first(parts: Sequence[int]) -> list[int]:
    """Return whose turn it is, for one period of the `parts`."""
    whole = sum(parts)
    waiting = [(0, rank, 0) for rank, part in enumerate(parts) if part]  # (may come from, rank, its number)
    ready: list[tuple[int, int, int]] = []  # (must have come by, rank, its number)
    owners = []
    for turn in range(whole):
        while waiting and waiting[0][0] <= turn:
            _, rank, number = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(number + 1) * whole // parts[rank]), rank, number))
        _, rank, number = heapq.heappop(ready)
        owners.append(rank)
        if number + 1 < parts[rank]:
            heapq.heappush(waiting, ((number + 1) * whole // parts[rank], rank, number + 1))
    return owners


DAMPING = 0.5
"""How much of a new measurement counts beside the ones before."""


REMEMBERED = 4096
"""Steps that count for a speed, the latest ones."""


LEAST, MOST = 1 / 8, 2.0
"""A rank's share lies between these multiples of an equal share: it stays measurable, and its batch fits."""


WORTH_IT = 0.05
"""Data are dealt again where some share changes by more than this part of itself."""


@dataclass
class ThroughputEstimate:
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


def shares_of(speeds: Sequence[float]) -> RankShares:
    """Return shares in proportion to `speeds`, within bounds; equal ones while some speed is not known."""
    ranks = len(speeds)
    if not all(speed > 0 for speed in speeds):
        return RankShares.equal(ranks)
    return RankShares(by_largest_remainder(_within_bounds(speeds), FINEST))


def largest_change(before: RankShares, after: RankShares) -> float:
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
