"""When a checkpoint is due: every so many steps, or every so many minutes, decided alike on all ranks.

Clocks of ranks differ, so by time rank 0 decides, and tells the others in a tiny exchange. How many steps lie
between two such looks is told with it: about a twentieth of the time asked for, so that looks cost nothing to speak of.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline._core.units import parse_seconds
from paceline.errors import UsageError

__all__ = ["EverySeconds", "EverySteps", "cadence"]

_LOOKS = 20

Share = Callable[[list[float]], list[float]]
"""Returns rank 0's numbers on all ranks."""


class EverySteps:
    """Due after every `steps` optimizer steps; where several lie between two looks, at the first look after."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._looked_at: int | None = None

    def due(self, step: int) -> bool:
        """Tell whether a checkpoint is due after `step` steps."""
        before = step - 1 if self._looked_at is None else self._looked_at
        self._looked_at = step
        return step // self._steps > before // self._steps

    def saved(self) -> None:
        """Take note that one was begun."""


class EverySeconds:
    """Due when `seconds` have gone by on rank 0 since the last one.

    Args:
        seconds: between two checkpoints.
        share: gives all ranks rank 0's numbers.
        clock: seconds that only rise.
    """

    def __init__(self, seconds: float, share: Share, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._share, self._clock = seconds, share, clock
        self._saved = clock()
        self._looked_at: tuple[int, float] | None = None  # step and time of the last look
        self._next = 0  # step of the next look

    def due(self, step: int) -> bool:
        """Tell whether a checkpoint is due after `step` steps; all ranks call this after every step."""
        if step < self._next:
            return False
        now = self._clock()
        before, then = self._looked_at or (step, now)
        per_step = (now - then) / max(1, step - before)
        ahead = self._seconds / _LOOKS / per_step if per_step > 0 else 1.0
        is_due = now - self._saved >= self._seconds
        told, steps = self._share([float(is_due), float(max(1, min(int(ahead), 1000)))])
        self._looked_at, self._next = (step, now), step + int(steps)
        return bool(told)

    def saved(self) -> None:
        """Take note that one was begun."""
        self._saved = self._clock()


def cadence(every: int | str | None, share: Share) -> EverySteps | EverySeconds | None:
    """Return when checkpoints are due.

    Args:
        every: steps, a time such as ``"10min"``, or None: never by itself.
        share: gives all ranks rank 0's numbers.

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
