"""How far work and an exchange go on at the same time (pure), and work to try it with."""

from __future__ import annotations

import time

import numpy as np

__all__ = ["Slices", "overlap"]

_SLICE_NUMEL = 50_000  # some 0.3 ms of sines


def overlap(work_seconds: float, exchange_seconds: float, both_seconds: float) -> float | None:
    """Return the part of the shorter of two times that is hidden behind the longer.

    1: both together take no longer than the longer one alone. 0: as long as one after the other. Below 0: they
    hinder each other. None: one of them takes no time at all.

        (work + exchange − both) ÷ min(work, exchange)

    Args:
        work_seconds: the work alone.
        exchange_seconds: the exchange alone.
        both_seconds: the same work and the same exchange at the same time.

    Example:
        >>> overlap(2.0, 1.0, 2.0), overlap(2.0, 1.0, 2.5), overlap(2.0, 1.0, 3.0)
        (1.0, 0.5, 0.0)
    """
    shorter = min(work_seconds, exchange_seconds)
    return (work_seconds + exchange_seconds - both_seconds) / shorter if shorter > 0 else None


class Slices:
    """A fixed amount of computing on one core, done slice by slice.

    Args:
        seconds: about how long all of it takes alone; it is counted out when this is made, and then stays.

    Attributes:
        count: slices in all.
    """

    def __init__(self, seconds: float) -> None:
        self._numbers, self._out = np.linspace(0, 1, _SLICE_NUMEL), np.empty(_SLICE_NUMEL)
        self.count = self._left = 0
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            np.sin(self._numbers, out=self._out)
            self.count += 1

    def again(self) -> Slices:
        """Make all of it left to do, and return this."""
        self._left = self.count
        return self

    def __call__(self) -> bool:
        """Do a slice, if one is left; return whether one was."""
        if self._left == 0:
            return False
        self._left -= 1
        np.sin(self._numbers, out=self._out)
        return True

    def alone(self) -> float:
        """Do all of it and return the seconds that it took."""
        self.again()
        started = time.perf_counter()
        while self():
            pass
        return time.perf_counter() - started
