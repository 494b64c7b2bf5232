"""How this rank stands, as it tells the others: what its training thread wrote down, and whether that thread moves."""

from __future__ import annotations

import time

from paceline.checkpoint import stacks
from paceline.checkpoint.beat import Row
from paceline.whereabouts import here

__all__ = ["Standing"]


class Standing:
    """Of the training thread.

    Args:
        ident: the thread.

    Attributes:
        fingerprint: of its stack, when it was looked at last.
        since: when it was found to have moved, a value of ``time.monotonic()``.
    """

    def __init__(self, ident: int) -> None:
        self._ident = ident
        self.fingerprint, self.since = 0, time.monotonic()
        self._called_since = 0.0  # a collective that nobody wrote down

    def row(self, rank: int, sequence: int, stopped: tuple[int, ...]) -> Row:
        """Look at the thread, and return the row that tells of it."""
        now, frame = time.monotonic(), stacks.frame_of(self._ident)
        fingerprint = stacks.fingerprint(frame)
        if fingerprint != self.fingerprint:
            self.fingerprint, self.since = fingerprint, now
        waiting, age = here.waiting, time.perf_counter() - here.since
        if waiting or not stacks.in_collective(frame):
            self._called_since = 0.0
        else:
            self._called_since = self._called_since or now
            waiting, age = True, now - self._called_since
        return Row(
            rank,
            sequence,
            here.step,
            here.phase,
            here.task,
            here.bucket,
            waiting,
            max(0.0, age),
            now - self.since,
            here.rounds,
            here.busy_seconds,
            here.sees_waiting,
            stopped,
        )
