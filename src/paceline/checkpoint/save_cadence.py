"""Decides when a checkpoint is due, alike on all ranks: every so many steps, or every so many minutes.

Clocks of ranks differ, so by time rank 0 decides, and shares the decision in a tiny collective. The number of steps
until the next check is shared with it: about a twentieth of the interval, so that checks cost next to nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline._core.units import parse_seconds
from paceline.errors import UsageError

__all__ = ["EverySeconds", "EverySteps", "save_cadence"]

_CHECKS_PER_INTERVAL = 20

ShareFromRank0 = Callable[[list[float]], list[float]]
"""Returns rank 0's numbers on all ranks."""


class EverySteps:
    """Due after every `steps` optimizer steps, or at the first check after that."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._checked: int | None = None

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step` steps."""
        before = step - 1 if self._checked is None else self._checked
        self._checked = step
        return step // self._steps > before // self._steps

    def saved(self) -> None:
        """Note that a checkpoint was begun."""

    def rejoin(self) -> None:
        """Continue beside ranks that have not made the checks so far."""
        self._checked = None


class EverySeconds:
    """Due when `seconds` have passed on rank 0 since the last checkpoint.

    Args:
        seconds: between two checkpoints.
        share: returns rank 0's numbers on all ranks.
        clock: monotonic seconds.
    """

    def __init__(
        self, seconds: float, share: ShareFromRank0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds, self._share, self._clock = seconds, share, clock
        self._saved_at = clock()
        self._checked: tuple[int, float] | None = None  # step and time of the latest check
        self._next = 0  # step of the next check

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step` steps; all ranks call this after every step."""
        if step < self._next:
            return False
        now = self._clock()
        before, then = self._checked or (step, now)
        per_step = (now - then) / max(1, step - before)
        ahead = self._seconds / _CHECKS_PER_INTERVAL / per_step if per_step > 0 else 1.0
        is_due = now - self._saved_at >= self._seconds
        due, steps = self._share([float(is_due), float(max(1, min(int(ahead), 1000)))])
        self._checked, self._next = (step, now), step + int(steps)
        return bool(due)

    def saved(self) -> None:
        """Note that a checkpoint was begun."""
        self._saved_at = self._clock()

    def rejoin(self) -> None:
        """Continue beside ranks that have not made the checks so far."""
        self._checked, self._next = None, 0


def save_cadence(every: int | str | None, share: ShareFromRank0) -> EverySteps | EverySeconds | None:
    """Return what decides when checkpoints are due.

    Args:
        every: steps, a time such as ``"10min"``, or None: only on request.
        share: returns rank 0's numbers on all ranks.

    Raises:
        UsageError: `every` is neither.
    """
    if every is None:
        return None
    if isinstance(every, str):
        seconds = parse_seconds(every)
        if seconds > 0:
            return EverySeconds(seconds, share)
    elif type(every) is int and every > 0:
        return EverySteps(every)
    raise UsageError(
        f"every={every!r}", remedy='pass a number of optimizer steps, a time such as "10min", or None'
    )
