"""The slowest rank: compares the time that each rank works in a step, without its waits for others."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

__all__ = ["StepTimes", "Straggler", "find_slowest"]

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
