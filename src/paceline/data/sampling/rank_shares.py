"""Shares of the data in integer parts, and the order in which ranks take turns.

[Note: turns by share] Rank i with share qᵢ/D gets qᵢ of every D blocks. Its block j (counted from 0) may not be
assigned before qᵢ·n/D exceeds j, and must be when qᵢ·n/D reaches j + 1. A schedule that keeps all these windows exists
for any shares, and earliest deadline first finds it (unit jobs; Tijdeman, "The chairman assignment problem", 1980;
Steiner and Yeomans, Management Science 1993). So at every prefix every rank has its share rounded down or up, and is
never a whole block off. The order repeats every D blocks: one period is stored, whatever the number of blocks.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np

from paceline._core.format import plural
from paceline.data.sampling.shuffle import Indices
from paceline.errors import UsageError

__all__ = ["MAX_PARTS", "RankShares", "TurnOrder", "by_largest_remainder"]

MAX_PARTS = 1 << 16
"""Most parts in all: shares that are not multiples of 1/65536 or larger fractions are rounded."""

_SUM_TOLERANCE = 1e-6


@dataclass(frozen=True)
class RankShares:
    """Shares of the ranks, in integer parts.

    Attributes:
        parts: per rank, of their sum.

    Raises:
        UsageError: no parts, a negative one, or more in all than 65,536 and than there are ranks.

    Example:
        >>> RankShares.of([0.25, 0.25, 0.10, 0.40], ranks=4).parts
        (5, 5, 2, 8)
    """

    parts: tuple[int, ...]

    def __post_init__(self) -> None:
        if min(self.parts, default=0) < 0 or not 0 < self.whole <= max(MAX_PARTS, self.ranks):
            raise UsageError(
                f"shares in parts of {_first_values(self.parts)}",
                remedy=f"each is 0 or more, and their sum 1 to {MAX_PARTS}",
            )

    @classmethod
    def equal(cls, ranks: int) -> RankShares:
        """Return equal shares."""
        return cls((1,) * ranks)

    @classmethod
    def of(cls, values: Sequence[float] | RankShares | None, ranks: int) -> RankShares:
        """Return shares with these `values`.

        Fractions with a denominator up to 1000 (.25, 1/3) are kept exactly if 65,536 parts can express all of them;
        otherwise all are rounded to 1/65536.

        Args:
            values: one share per rank, each 0 or more, with sum 1; None: equal ones.
            ranks: number of ranks.

        Raises:
            UsageError: the number or the sum of the values is wrong, or one is negative or not a number.
        """
        if values is None:
            return cls.equal(ranks)
        if isinstance(values, RankShares):
            _check_number(values.parts, ranks)
            return values
        try:
            values = [float(value) for value in values]
        except (TypeError, ValueError) as error:
            raise UsageError(f"shares={values!r}", remedy="pass one number per rank, with sum 1") from error
        _check_number(values, ranks)
        for rank, value in enumerate(values):
            if not math.isfinite(value) or value < 0:
                raise UsageError(
                    f"share {value} of rank {rank}", remedy="a share is 0 or more, and the sum of all is 1"
                )
        total = math.fsum(values)
        if abs(total - 1) > _SUM_TOLERANCE:
            scaled = ", ".join(f"{value / total:.4g}" for value in values) if total > 0 else "0.5, 0.5"
            raise UsageError(
                f"shares {_first_values(values)} sum to {total:.6g}, not 1",
                remedy=f"pass for example {scaled}",
            )
        return cls(_parts(values))

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.parts)

    @cached_property
    def whole(self) -> int:
        """Sum of the parts."""
        return sum(self.parts)

    def __getitem__(self, rank: int) -> float:
        """Return the share of `rank`, between 0 and 1."""
        return self.parts[rank] / self.whole

    def __iter__(self) -> Iterator[float]:
        return (part / self.whole for part in self.parts)

    def __str__(self) -> str:
        return " ".join(f"{share:.4g}" for share in self)


def _check_number(values: Sequence[float], ranks: int) -> None:
    if len(values) != ranks:
        raise UsageError(
            f"{plural(len(values), 'share')} ({_first_values(values)}) for {plural(ranks, 'rank')}",
            remedy="pass one share per rank, in rank order",
        )


def _first_values(values: Sequence[float]) -> str:
    shown = ", ".join(f"{value:g}" for value in values[:8])
    return shown + ", …" * (len(values) > 8)


def _parts(values: Sequence[float]) -> tuple[int, ...]:
    fractions = [Fraction(value).limit_denominator(1000) for value in values]
    whole = math.lcm(*(fraction.denominator for fraction in fractions))
    close = all(abs(fraction - value) < 1e-9 for fraction, value in zip(fractions, values, strict=True))
    if close and whole <= MAX_PARTS and sum(fractions) == 1:
        return tuple(int(fraction * whole) for fraction in fractions)
    return by_largest_remainder(values, MAX_PARTS)


def by_largest_remainder(values: Sequence[float], whole: int) -> tuple[int, ...]:
    """Return integers in proportion to `values` with sum `whole`, each less than 1 off (Hamilton's method)."""
    total = math.fsum(values)
    exact = [value / total * whole for value in values]
    parts = [math.floor(value) for value in exact]
    by_rest = sorted(range(len(exact)), key=lambda rank: (parts[rank] - exact[rank], rank))
    for rank in by_rest[: whole - sum(parts)]:
        parts[rank] += 1
    return tuple(parts)


@dataclass(frozen=True)
class TurnOrder:
    """One period of turns; see [Note: turns by share].

    Attributes:
        owners: rank of each turn, ``[period]``.
        turns_of_rank: turns of each rank within the period, ascending.
    """

    owners: Indices
    turns_of_rank: tuple[Indices, ...]

    @property
    def period(self) -> int:
        """Number of turns until they repeat."""
        return len(self.owners)

    @classmethod
    def of(cls, shares: RankShares) -> TurnOrder:
        """Return the turns of `shares`."""
        return _turns(shares.parts)

    def counts(self, rank: int, turns: Indices) -> Indices:
        """Return the number of turns of `rank` among the first n, for each n in `turns`."""
        periods, rest = np.divmod(turns, self.period)
        own = self.turns_of_rank[rank]
        return periods * len(own) + np.searchsorted(own, rest)

    def nth(self, rank: int, indices: Indices) -> Indices:
        """Return the turns of `rank` with these `indices`, counted from 0."""
        own = self.turns_of_rank[rank]
        if len(own) == 1:  # as with equal shares, the usual case
            return indices * self.period + own
        periods, rest = np.divmod(indices, len(own))
        return periods * self.period + own[rest]


@lru_cache(maxsize=64)
def _turns(parts: tuple[int, ...]) -> TurnOrder:
    common = math.gcd(*parts)
    parts = tuple(part // common for part in parts)
    owners = np.array(_earliest_deadline_first(parts), dtype=np.int64)
    by_rank = np.argsort(owners, kind="stable")
    return TurnOrder(owners, tuple(np.split(by_rank, np.cumsum(parts)[:-1])))


def _earliest_deadline_first(parts: Sequence[int]) -> list[int]:
    """Return the rank of each turn in one period."""
    whole = sum(parts)
    waiting = [(0, rank, 0) for rank, part in enumerate(parts) if part]  # (release time, rank, index)
    ready: list[tuple[int, int, int]] = []  # (deadline, rank, index)
    owners = []
    for turn in range(whole):
        while waiting and waiting[0][0] <= turn:
            _, rank, index = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(index + 1) * whole // parts[rank]), rank, index))
        _, rank, index = heapq.heappop(ready)
        owners.append(rank)
        if index + 1 < parts[rank]:
            heapq.heappush(waiting, ((index + 1) * whole // parts[rank], rank, index + 1))
    return owners
