"""Decides, alike on all ranks, after which steps a checkpoint is saved, and after which one all ranks leave (pure).

Some of it only one rank knows: clocks differ, so rank 0 decides what is due by time; and a warning that its machine is
about to go may reach any rank. So after some steps the ranks exchange one tiny row each. Rank 0 shares with it how many
steps later they do so again: as many as take `NOTICED_SECONDS`, or so long that exchanges cost a hundredth of the time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceline._core.units import parse_seconds
from paceline.errors import UsageError

__all__ = ["EverySeconds", "EverySteps", "ExchangeRows", "StepDecision", "StepDecisions", "save_cadence"]

NOTICED_SECONDS = 0.25
"""Time between two exchanges, if a step does not take longer."""

_LARGEST_SHARE = 0.01  # of the time that exchanges may take
_LONGEST_SECONDS = 30.0  # between two exchanges, whatever they cost
_MOST_STEPS = 1000  # between two exchanges
_CHECKS_PER_INTERVAL = 20  # of a cadence by time
_REMEMBERED = 8  # exchanges whose cost is known

ExchangeRows = Callable[[list[float]], Sequence[Sequence[float]]]
"""Returns the rows of all ranks, by rank."""


class EverySteps:
    """Due after every `steps` optimizer steps, or at the first look after that; by itself the same on all ranks."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._looked: int | None = None

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step` steps."""
        before = step - 1 if self._looked is None else self._looked
        self._looked = step
        return step // self._steps > before // self._steps

    def rejoin(self) -> None:
        """Continue beside ranks that have not looked so far."""
        self._looked = None


class EverySeconds:
    """Overdue when `seconds` have passed since the last checkpoint, by the clock of this rank."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock = seconds, clock
        self._saved_at = clock()

    def overdue(self) -> bool:
        """Return whether the time has passed."""
        return self._clock() - self._saved_at >= self.seconds

    def saved(self) -> None:
        """Note that a checkpoint was begun."""
        self._saved_at = self._clock()


def save_cadence(every: int | str | None) -> EverySteps | EverySeconds | None:
    """Return what says when checkpoints are due.

    Args:
        every: steps, a time such as ``"10min"``, or None: only on request.

    Raises:
        UsageError: `every` is neither.
    """
    if every is None:
        return None
    if isinstance(every, str):
        seconds = parse_seconds(every)
        if seconds > 0:
            return EverySeconds(seconds)
    elif type(every) is int and every > 0:
        return EverySteps(every)
    raise UsageError(
        f"every={every!r}", remedy='pass a number of optimizer steps, a time such as "10min", or None'
    )


class StepDecision(NamedTuple):
    """What all ranks do after a step."""

    save: bool
    leave: bool


class StepDecisions:
    """Decisions of one rank; the others decide the same.

    Args:
        every: when checkpoints are due; None: only on request.
        exchange: returns the rows of all ranks.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        every: EverySteps | EverySeconds | None,
        exchange: ExchangeRows,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every, self._exchange, self._clock = every, exchange, clock
        self._costs: deque[float] = deque(maxlen=_REMEMBERED)  # of exchanges, on the rank that came last
        self.rejoin()

    @property
    def saves(self) -> bool:
        """Whether checkpoints are due at all, without request."""
        return self._every is not None

    def after(self, step: int, *, warned: bool, alone: bool) -> StepDecision:
        """Return what to do after a step; all ranks call this after each one.

        Args:
            step: number of steps so far.
            warned: whether this rank was warned.
            alone: whether it is the only rank, which needs no exchange.
        """
        due = isinstance(self._every, EverySteps) and self._every.due(step)
        if alone:
            return StepDecision(due or self._overdue(), warned)
        if step < self._next:
            return StepDecision(due, leave=False)
        due_by_time, leave = self._look(step, warned)
        return StepDecision(due or due_by_time, leave)

    def agree(self, *, warned: bool, alone: bool) -> bool:
        """Return whether any rank was warned, at a place where all ranks call this."""
        return warned if alone else self._look(None, warned)[1]

    def saved(self) -> None:
        """Note that a checkpoint was begun."""
        if isinstance(self._every, EverySeconds):
            self._every.saved()

    def rejoin(self) -> None:
        """Continue beside ranks that have decided nothing so far: all exchange after the next step."""
        if isinstance(self._every, EverySteps):
            self._every.rejoin()
        self._looked: tuple[int, float] | None = None  # step and time of the latest exchange after a step
        self._next, self._ahead = 0, 1  # step of the next exchange, and how far it was ahead
        self._per_step: deque[float] = deque(maxlen=4)
        self._cost = 0.0  # of the latest exchange, on this rank

    # ------------------------------------------------------------------ exchanges

    def _look(self, step: int | None, warned: bool) -> tuple[bool, bool]:
        """Exchange, and return whether a checkpoint is due by time and whether a rank was warned."""
        now = self._clock()
        row = [float(warned), float(self._overdue()), float(self._steps_ahead(step, now)), self._cost]
        rows = self._exchange(row)
        self._cost = self._clock() - now
        self._costs.append(min(each[3] for each in rows))
        if step is not None:
            self._looked, self._ahead = (step, now), int(rows[0][2])
            self._next = step + self._ahead
        return rows[0][1] > 0, any(each[0] > 0 for each in rows)

    def _steps_ahead(self, step: int | None, now: float) -> int:
        """Return after how many steps the next exchange should be; rank 0's number counts."""
        if step is None or self._looked is None:
            return 1
        before, then = self._looked
        self._per_step.append((now - then) / max(1, step - before))
        per_step = max(self._per_step)
        if per_step <= 0:
            return 1
        seconds = NOTICED_SECONDS
        if isinstance(self._every, EverySeconds):
            seconds = min(seconds, self._every.seconds / _CHECKS_PER_INTERVAL)
        costs = sorted(self._costs)[: max(1, len(self._costs) - 1)]  # the longest may be a hiccup
        cost = sum(costs) / max(1, len(costs))
        seconds = max(seconds, min(cost / _LARGEST_SHARE, _LONGEST_SECONDS))
        return max(1, min(int(seconds / per_step), 2 * self._ahead, _MOST_STEPS))

    def _overdue(self) -> bool:
        return isinstance(self._every, EverySeconds) and self._every.overdue()
