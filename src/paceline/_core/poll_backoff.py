"""Backoff between polls: yields the core at first, then sleeps for longer and longer."""

from __future__ import annotations

import os
import time

__all__ = ["Backoff"]

_YIELDS, _NAP_SECONDS = 50, 50e-6
_LONGEST_NAP_SECONDS = 200e-6  # MPI moves some bytes at every poll: longer naps leave links idle


class Backoff:
    """Waits between polls of something that another thread or process completes."""

    def __init__(self) -> None:
        self._times = 0

    def reset(self) -> None:
        """Start over, after progress."""
        self._times = 0

    def wait(self) -> None:
        """Wait a little, longer than the last time."""
        self._times += 1
        if self._times <= _YIELDS:
            os.sched_yield()
        else:
            time.sleep(min(_LONGEST_NAP_SECONDS, _NAP_SECONDS * (self._times - _YIELDS)))
