"""Which rank is slow: by the time that each works in a step, not counting what it waits for others."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

__all__ = ["StepPaces", "Straggler", "slowest_of"]

_LATEST = 25
"""Looks at a rank that count, each at one step or, where steps are short, at some."""

_FEWEST = 3
"""Looks without which nothing is said."""


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for.

    Attributes:
        rank, host: who.
        factor: its working time of a step over the median of the other ranks'.
        seconds: that time.
    """

    rank: int
    host: str
    factor: float
    seconds: float


class StepPaces:
    """Working seconds a step of every rank, over its latest steps."""

    def __init__(self) -> None:
        self._latest: dict[int, tuple[int, float]] = {}
        self._seconds: dict[int, deque[float]] = {}

    def note(self, rank: int, rounds: int, busy_seconds: float) -> None:
        """Note how many steps a rank has made in all, and how long it has worked for them."""
        before = self._latest.get(rank)
        if before is not None and rounds <= before[0]:
            return
        self._latest[rank] = rounds, busy_seconds
        if before is not None and rounds > before[0] > 0:  # the first step builds things
            of_one = (busy_seconds - before[1]) / (rounds - before[0])
            self._seconds.setdefault(rank, deque(maxlen=_LATEST)).append(of_one)

    def seconds(self) -> dict[int, float]:
        """Return the median working seconds of a step, by rank, of those that are known well enough."""
        return {rank: median(each) for rank, each in self._seconds.items() if len(each) >= _FEWEST}


def slowest_of(seconds: Mapping[int, float]) -> tuple[int, float] | None:
    """Return the slowest rank and how often the others' median it needs; None with fewer than two.

    Example:
        >>> slowest_of({0: 1.0, 1: 1.3, 2: 1.0})
        (1, 1.3)
    """
    if len(seconds) < 2:
        return None
    rank = max(seconds, key=lambda each: (seconds[each], -each))
    others = median(value for each, value in seconds.items() if each != rank)
    return (rank, seconds[rank] / others) if others > 0 else None
