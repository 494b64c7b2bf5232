"""Screening of updates: which are refused, and which workers are put in quarantine (pure).

    not finite     the norm is NaN or infinite
    exploding      the norm is more than `max_norm_ratio` times the usual one, overall and for this worker, and the
                   score did not improve; usual is the median of the last updates that were merged
    worse          the worker's score on the shared held-out slice is worse than that of the parameters it started from

Norms are those of updates divided by the square root of their steps, so that a worker may send more rarely than others.
A worker with `strikes` refusals among its last `window` updates is put in quarantine: for some time none of its updates
is merged, and it takes the global parameters as they are. Each further quarantine lasts twice as long.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from statistics import median

from paceline.async_dp.hub.hub_settings import ScreeningRules
from paceline.async_dp.protocol.hub_messages import UpdateHeader

__all__ = ["UpdateScreen"]

_WINDOW, _WORKER_WINDOW = 64, 8
_MIN_SEEN = 8
_MAX_DOUBLINGS = 6


@dataclass
class _WorkerHistory:
    refused: deque[bool]  # of its last updates
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=_WORKER_WINDOW))  # that were merged
    quarantined_until: float = -math.inf
    quarantines: int = 0


class UpdateScreen:
    """Screens updates, one after another."""

    def __init__(self, rules: ScreeningRules | None = None) -> None:
        self.rules = rules or ScreeningRules()
        self._norms: dict[int, deque[float]] = {}  # of the last merged updates, by fragment
        self._workers: dict[int, _WorkerHistory] = {}

    def check(self, worker: int, fragment: int, norm: float, header: UpdateHeader, now: float) -> str:
        """Record an update; return why it is refused, empty if it is accepted.

        Args:
            worker: its number.
            fragment: of the model.
            norm: of the update.
            header: the worker's report; lower scores are better.
            now: seconds of a monotonic clock.
        """
        history = self._workers.get(worker)
        if history is None:
            history = self._workers[worker] = _WorkerHistory(deque(maxlen=self.rules.window))
        if now < history.quarantined_until:
            return f"in quarantine: for {history.quarantined_until - now:.0f} s more"
        norm /= math.sqrt(max(1, int(header.steps)))
        seen = self._norms.get(fragment)
        if seen is None:
            seen = self._norms[fragment] = deque(maxlen=_WINDOW)
        reason = self._reason(norm, header, seen, history.norms)
        history.refused.append(bool(reason))
        if not reason:
            seen.append(norm)
            history.norms.append(norm)
        elif sum(history.refused) >= self.rules.strikes:
            history.refused.clear()
            doublings = min(history.quarantines, _MAX_DOUBLINGS)
            history.quarantined_until = now + self.rules.quarantine_seconds * 2**doublings
            history.quarantines += 1
        return reason

    def quarantine_left(self, worker: int, now: float) -> float:
        """Return the seconds that a worker stays in quarantine, 0 if it is not."""
        history = self._workers.get(worker)
        return max(0.0, history.quarantined_until - now) if history is not None else 0.0

    def quarantined(self, now: float) -> int:
        """Return the number of workers in quarantine."""
        return sum(now < history.quarantined_until for history in self._workers.values())

    def _reason(
        self, norm: float, header: UpdateHeader, seen: Collection[float], own: Collection[float]
    ) -> str:
        score, before, rules = header.score, header.before, self.rules
        if not math.isfinite(norm):
            return "not finite"
        improved = score is not None and before is not None and score < before
        if rules.max_norm_ratio and len(seen) >= _MIN_SEEN and not improved:
            usual = max(median(seen), median(own) if own else 0.0)
            if usual > 0 and norm > rules.max_norm_ratio * usual:
                return f"exploding: {norm / usual:.1f} times the usual norm"
        if score is not None and not math.isfinite(score):
            return "not finite: its score"
        allowed = rules.max_score_increase
        if allowed is not None and score is not None and before is not None and score > before + allowed:
            return f"worse: score {score:.4f}, started from {before:.4f}"
        return ""
