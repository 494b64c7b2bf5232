"""Bounded log of a hub's decisions: repeated ones are merged into one row, and only the newest are kept.

A worker that sends invalid updates is refused thousands of times, and a restarted hub is joined by all workers again.
Consecutive refusals of a worker for the same reason therefore share a row, and half of the rows are reserved for rare,
important decisions (replacement, quarantine, start, downtime of the hub).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

__all__ = ["HUB_ITSELF", "DecisionLog", "HubDecision"]

HUB_ITSELF = -1
"""Worker number of rows about the hub itself."""


@dataclass(kw_only=True)
class HubDecision:
    """A row of the log.

    Attributes:
        at: unix seconds.
        worker: number of the worker.
        what: the decision.
        why: the hub's explanation.
        reason: key by which repeated decisions are recognised; empty: never merged.
        other: number of the worker with which `why` ends, if any.
        repeats: number of occurrences.
        last: unix seconds of the last occurrence.
        order: position among all rows.
    """

    at: float
    worker: int
    what: str
    why: str = ""
    reason: str = ""
    other: int | None = None
    repeats: int = 1
    last: float = 0.0
    order: int = 0


class DecisionLog:
    """Collects decisions in order and keeps the newest.

    Args:
        limit: number of rows to return.

    Attributes:
        rows: number of rows so far, repeated decisions counted once.
    """

    def __init__(self, limit: int = 200) -> None:
        self.rows = 0
        self._limit = limit
        self._important: deque[HubDecision] = deque(maxlen=limit)
        self._others: deque[HubDecision] = deque()
        self._latest: dict[int, HubDecision] = {}

    def add(self, decision: HubDecision, *, important: bool = False) -> None:
        """Add a decision, or count it in the worker's latest row if it repeats that one."""
        latest = self._latest.get(decision.worker)
        if latest and (latest.what, latest.reason) == (decision.what, decision.reason) and decision.reason:
            latest.repeats += 1
            latest.last = decision.at
            return
        self.rows += 1
        decision.last, decision.order = decision.at, self.rows
        if important:
            self._important.append(decision)
            self._latest.pop(decision.worker, None)
            return
        if len(self._others) == self._limit:
            oldest = self._others.popleft()
            if self._latest.get(oldest.worker) is oldest:
                del self._latest[oldest.worker]
        self._others.append(decision)
        self._latest[decision.worker] = decision

    def newest(self) -> list[HubDecision]:
        """Return the newest rows in order of time."""
        important, others = list(self._important), list(self._others)
        important = important[-max(self._limit // 2, self._limit - len(others)) :]
        others = others[-(self._limit - len(important)) :] if len(important) < self._limit else []
        return sorted([*important, *others], key=lambda each: (each.at, each.order))

    @property
    def hidden(self) -> int:
        """Number of rows that `newest` leaves out."""
        return self.rows - len(self.newest())
