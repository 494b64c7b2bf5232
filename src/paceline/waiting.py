"""Seconds in which this rank did nothing but wait for other ranks: counted where they pass.

Who learns how fast each rank is (``pl.Loader(shares="measured")``) takes them off a step's time: in a
synchronous step all ranks need the same time, and the fast ones spend it waiting.
"""

from __future__ import annotations

__all__ = ["Waiting", "waiting"]


class Waiting:
    """A sum of seconds, and how often it was added to."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.times = 0

    def add(self, seconds: float) -> None:
        """Count `seconds` in which this rank waited."""
        self.seconds += seconds
        self.times += 1


waiting = Waiting()
"""Of this process, since it began."""
