"""The slowest rank: compares the time that each rank works in a step, without its waits for others."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from typing import Annotated, Any

from paceline._core.json_codec import Meta, Positive, decode
from paceline.errors import UsageError
from paceline.health.heartbeat import Integer, MalformedFrame

__all__ = ["StepTimeSummary", "StepTimes", "Straggler", "find_slowest"]

_WINDOW = 25
"""Samples kept per rank; each covers one step, or several short ones."""

_FEWEST = 3
"""Samples below which a rank's time counts as unknown."""


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for.

    Attributes:
        rank: its number.
        host: the name of its host.
        factor: its working time per step over the median of the other ranks'.
        seconds: that working time.
    """

    rank: int
    host: str
    factor: float
    seconds: float


class StepTimes:
    """Working seconds per step of every rank, over its latest steps."""

    def __init__(self) -> None:
        self._latest: dict[int, tuple[int, float]] = {}
        self._samples: dict[int, deque[float]] = {}

    def add(self, rank: int, rounds: int, busy_seconds: float) -> None:
        """Record how many steps a rank has made in total, and the seconds that it worked for them."""
        before = self._latest.get(rank)
        if before is not None and rounds <= before[0]:
            return
        self._latest[rank] = rounds, busy_seconds
        if before is not None and before[0] > 0:  # the first step builds things
            per_step = (busy_seconds - before[1]) / (rounds - before[0])
            self._samples.setdefault(rank, deque(maxlen=_WINDOW)).append(per_step)

    def medians(self) -> dict[int, float]:
        """Return the median working seconds per step, of the ranks with enough samples."""
        return {rank: median(each) for rank, each in self._samples.items() if len(each) >= _FEWEST}


def find_slowest(seconds: Mapping[int, float]) -> tuple[int, float] | None:
    """Return the slowest rank and the ratio of its time to the median of the others'; None for fewer than two.

    Example:
        >>> find_slowest({0: 1.0, 1: 1.3, 2: 1.0})
        (1, 1.3)
    """
    if len(seconds) < 2:
        return None
    rank = max(seconds, key=lambda each: (seconds[each], -each))
    others = median(value for each, value in seconds.items() if each != rank)
    return (rank, seconds[rank] / others) if others > 0 else None


_BINS_PER_E = 100  # so that a bin is 1 % wide
_MOST_BINS = 64


@dataclass(frozen=True)
class StepTimeSummary:
    """Working seconds per step of many ranks: the slowest of them, and how many there are in each bin 1 % wide.

    Attributes:
        counts: ranks by bin; bin b is around e^(b/100) seconds.
        rank, seconds: of the slowest; −1 and 0: none.
    """

    counts: dict[int, int] = field(default_factory=dict)
    rank: int = -1
    seconds: float = 0.0

    @classmethod
    def of(cls, seconds: Mapping[int, float]) -> StepTimeSummary:
        """Return the summary of each rank's seconds per step."""
        known = {rank: each for rank, each in seconds.items() if each > 0}
        if not known:
            return cls()
        slowest = max(known, key=lambda rank: (known[rank], -rank))
        counts: dict[int, int] = {}
        for each in known.values():
            number = round(_BINS_PER_E * math.log(each))
            counts[number] = counts.get(number, 0) + 1
        return cls(counts, slowest, known[slowest])

    def merged(self, other: StepTimeSummary) -> StepTimeSummary:
        """Return the summary of the ranks of both; at most 64 bins, of which the outermost hold what is beyond."""
        if not self.counts or not other.counts:
            return self if self.counts else other
        counts = dict(self.counts)
        for number, count in other.counts.items():
            counts[number] = counts.get(number, 0) + count
        while len(counts) > _MOST_BINS:
            low, high = min(counts), max(counts)
            outer = low if counts[low] <= counts[high] else high
            count = counts.pop(outer)
            counts[min(counts, key=lambda number: abs(number - outer))] += count
        slowest = min((self, other), key=lambda each: (-each.seconds, each.rank))
        return StepTimeSummary(counts, slowest.rank, slowest.seconds)

    def slowest(self) -> tuple[int, float] | None:
        """Return the slowest rank and the ratio of its time to the median of the others', to 1 %; None if unknown."""
        total = sum(self.counts.values())
        if total < 2:
            return None
        numbers = sorted(self.counts)
        counts = [self.counts[number] for number in numbers]
        counts[-1] -= 1  # the slowest itself
        middles = ((total - 2) // 2, (total - 1) // 2)
        reached = list(accumulate(counts))
        low, high = (next(n for n, last in zip(numbers, reached, strict=True) if last > m) for m in middles)
        return self.rank, self.seconds / math.exp((low + high) / 2 / _BINS_PER_E)

    def record(self) -> list[Any]:
        """Return this summary as JSON."""
        return [self.rank, self.seconds, *([n, c] for n, c in self.counts.items())] if self.counts else []

    @classmethod
    def parse(cls, values: list[Any], ranks: int) -> StepTimeSummary:
        """Return the summary in a message from a world of `ranks` ranks.

        Raises:
            MalformedFrame: a value is invalid.
        """
        if not values:
            return cls()
        try:
            found = decode({"head": values[:2], "counts": values[2:]}, _TimesRecord, "times")
        except UsageError as error:
            raise MalformedFrame(str(error).partition("\n")[0]) from None
        rank, seconds = found.head
        if not 0 <= rank < ranks or not found.counts:
            raise MalformedFrame(f"step times of rank {rank} of {ranks}")
        return cls(dict(found.counts), rank, seconds)


Bin = Annotated[int, Meta(ge=-10_000, le=10_000)]
Count = Annotated[int, Meta(ge=1, le=1 << 31)]


@dataclass(frozen=True)
class _TimesRecord:
    head: tuple[Integer, Positive]
    counts: Annotated[list[tuple[Bin, Count]], Meta(max_length=2 * _MOST_BINS)]
