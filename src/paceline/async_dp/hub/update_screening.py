"""Screening of updates: which are refused, and which workers are put in quarantine (pure).

    not finite     the norm is NaN or infinite
    exploding      the norm is more than `max_norm_ratio` times the usual one, overall and for this worker; usual is
                   the median of the last updates that were merged. Where the worker reports that its score improved:
                   more than that of the parameters; until some updates were merged: 100 times that of the parameters
    worse          the worker's score on the shared held-out slice is worse than that of the parameters it started from

Norms are those of updates divided by the square root of their steps, so that a worker may send more rarely than others;
but of no more than 100 times the usual steps, since steps are what a worker says.
A worker with `strikes` refusals among its last `window` updates is put in quarantine: for some time none of its updates
is merged, and it takes the global parameters as they are. Each further quarantine lasts twice as long.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.async_dp.hub.hub_settings import ScreeningRules
from paceline.async_dp.protocol.hub_messages import UpdateHeader

__all__ = ["UpdateScreen"]

_WINDOW, _WORKER_WINDOW = 64, 8
_MIN_SEEN = 8
_MAX_STEPS_RATIO, _MAX_PARAMS_RATIO = 100, 100
_MAX_DOUBLINGS = 6


class _Window:
    """The last values, and their median."""

    def __init__(self, length: int) -> None:
        self._values = deque[float](maxlen=length)
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def append(self, value: float) -> None:
        values, ordered = self._values, self._sorted
        if len(ordered) == values.maxlen:
            del ordered[bisect_left(ordered, values[0])]
        values.append(value)
        insort(ordered, value)

    @property
    def median(self) -> float:
        """Median of the values, of which there is one at least."""
        ordered, middle = self._sorted, len(self._sorted) // 2
        return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


@dataclass
class _WorkerHistory:
    refused: deque[bool]  # of its last updates
    norms: _Window = field(default_factory=lambda: _Window(_WORKER_WINDOW))  # that were merged
    quarantined_until: float = -math.inf
    quarantines: int = 0


@dataclass
class _FragmentHistory:
    """Of the last updates that were merged."""

    norms: _Window = field(default_factory=lambda: _Window(_WINDOW))
    steps: _Window = field(default_factory=lambda: _Window(_WINDOW))


class UpdateScreen:
    """Screens updates, one after another."""

    def __init__(self, rules: ScreeningRules | None = None) -> None:
        self.rules = rules or ScreeningRules()
        self._fragments: dict[int, _FragmentHistory] = {}
        self._workers: dict[int, _WorkerHistory] = {}

    def check(
        self,
        worker: int,
        fragment: int,
        norm: float,
        header: UpdateHeader,
        now: float,
        params_norm: Callable[[], float] = lambda: 0.0,
    ) -> str:
        """Record an update; return why it is refused, empty if it is accepted.

        Args:
            worker: its number.
            fragment: of the model.
            norm: of the update.
            header: the worker's report; lower scores are better.
            now: seconds of a monotonic clock.
            params_norm: returns the norm of the global parameters; 0: unknown.
        """
        history = self._workers.get(worker)
        if history is None:
            history = self._workers[worker] = _WorkerHistory(deque(maxlen=self.rules.window))
        if now < history.quarantined_until:
            return f"in quarantine: for {history.quarantined_until - now:.0f} s more"
        seen = self._fragments.get(fragment)
        if seen is None:
            seen = self._fragments[fragment] = _FragmentHistory()
        known, steps = len(seen.norms) >= _MIN_SEEN, max(1.0, header.steps)
        if known:
            steps = min(steps, _MAX_STEPS_RATIO * seen.steps.median)
        scaled = norm / math.sqrt(steps)
        reason = self._reason(header, scaled)
        if not reason and self.rules.max_norm_ratio:
            usual = max(seen.norms.median, history.norms.median if history.norms else 0.0) if known else 0.0
            score, before = header.score, header.before
            improved = score is not None and before is not None and score < before
            if usual > 0 and scaled > self.rules.max_norm_ratio * usual:
                if not improved or 0 < params_norm() < norm:
                    reason = f"exploding: {scaled / usual:.1f} times the usual norm"
            elif not known and 0 < _MAX_PARAMS_RATIO * params_norm() < norm:
                reason = f"exploding: {norm / params_norm():.1f} times the norm of the parameters"
        self._record(history, bool(reason), now)
        if not reason:
            seen.norms.append(scaled)
            seen.steps.append(steps)
            history.norms.append(scaled)
        return reason

    def strike(self, worker: int, now: float) -> bool:
        """Record a message that a worker must not send; return whether that led to quarantine."""
        history = self._workers.get(worker)
        if history is None:
            history = self._workers[worker] = _WorkerHistory(deque(maxlen=self.rules.window))
        if now < history.quarantined_until:
            return False
        self._record(history, True, now)
        return now < history.quarantined_until

    def _record(self, history: _WorkerHistory, refused: bool, now: float) -> None:
        history.refused.append(refused)
        if refused and sum(history.refused) >= self.rules.strikes:
            history.refused.clear()
            doublings = min(history.quarantines, _MAX_DOUBLINGS)
            history.quarantined_until = now + self.rules.quarantine_seconds * 2**doublings
            history.quarantines += 1

    def quarantine_left(self, worker: int, now: float) -> float:
        """Return the seconds that a worker stays in quarantine, 0 if it is not."""
        history = self._workers.get(worker)
        return max(0.0, history.quarantined_until - now) if history is not None else 0.0

    def quarantined(self, now: float) -> int:
        """Return the number of workers in quarantine."""
        return sum(now < history.quarantined_until for history in self._workers.values())

    def forget(self, worker: int) -> None:
        """Forget a worker that is gone, unless it has been in quarantine."""
        history = self._workers.get(worker)
        if history is not None and not history.quarantines:
            del self._workers[worker]

    def _reason(self, header: UpdateHeader, norm: float) -> str:
        score, before, allowed = header.score, header.before, self.rules.max_score_increase
        if not math.isfinite(norm):
            return "not finite"
        if score is not None and not math.isfinite(score):
            return "not finite: its score"
        if allowed is not None and score is not None and before is not None and score > before + allowed:
            return f"worse: score {score:.4f}, started from {before:.4f}"
        return ""
