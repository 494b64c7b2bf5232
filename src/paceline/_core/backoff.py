"""Waiting for something that has to be looked for, without taking the core from whoever makes it happen."""

from __future__ import annotations

import os
import time

__all__ = ["Backoff"]

_YIELDS, _NAP_SECONDS = 50, 50e-6
_LONGEST_NAP_SECONDS = 200e-6  # MPI moves some bytes whenever it is asked: longer naps leave links idle


class Backoff:
    """Waits a little when nothing moves: first by letting others run, then asleep for longer and longer."""

    def __init__(self) -> None:
        self._times = 0

    def reset(self) -> None:
        """Note that something moved."""
        self._times = 0

    def wait(self) -> None:
        """Wait a little."""
        self._times += 1
        if self._times <= _YIELDS:
            os.sched_yield()
        else:
            time.sleep(min(_LONGEST_NAP_SECONDS, _NAP_SECONDS * (self._times - _YIELDS)))
