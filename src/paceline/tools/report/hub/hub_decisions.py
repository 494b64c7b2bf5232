"""What a hub decided, one row each: repeated ones made one, the newest kept, and how many are not shown (pure).

A worker that sends rubbish is refused thousands of times, and a hub that is started again is joined by all anew. So
refusals of a worker for the same reason are one row as long as nothing else becomes of it, and what is rare and
weighty (a replacement, a quarantine, the beginning, the hub away) has half of the rows to itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

__all__ = ["HUB_ITSELF", "DecisionLog", "HubDecision"]

HUB_ITSELF = -1
"""Stands for the hub itself where workers have numbers."""


@dataclass
class HubDecision:
    """A row.

    Attributes:
        at: time of day in seconds. worker: whom it is about. what: became of it. why: in the hub's words.
        reason: by which repeated ones are known. other: another worker that `why` ends with, None: none.
        times: how often. last: when it came last. order: its place among all.
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
    """Takes in decisions in their order, and keeps the newest.

    Args:
        most: rows that are shown.

    Attributes:
        rows: that there were, repeated ones counted once.
    """

    def __init__(self, limit: int = 200) -> None:
        self.rows = 0
        self._most = limit
        self._weighty: deque[HubDecision] = deque(maxlen=limit)
        self._others: deque[HubDecision] = deque()
        self._latest: dict[int, HubDecision] = {}

    def add(self, decision: HubDecision, *, important: bool = False) -> None:
        """Take in a decision; one that repeats the latest of its worker is counted there."""
        latest = self._latest.get(decision.worker)
        if latest and (latest.what, latest.reason) == (decision.what, decision.reason) and decision.reason:
            latest.repeats += 1
            latest.last = decision.at
            return
        self.rows += 1
        decision.last, decision.order = decision.at, self.rows
        if important:
            self._weighty.append(decision)
            self._latest.pop(decision.worker, None)
            return
        if len(self._others) == self._most:
            gone = self._others.popleft()
            if self._latest.get(gone.worker) is gone:
                del self._latest[gone.worker]
        self._others.append(decision)
        self._latest[decision.worker] = decision

    def newest(self) -> list[HubDecision]:
        """Return the newest, in the order of their times."""
        important, others = list(self._weighty), list(self._others)
        half = self._most // 2
        room = max(half, self._most - len(others))
        important = important[-room:]
        others = others[-(self._most - len(important)) :] if len(important) < self._most else []
        return sorted([*important, *others], key=lambda each: (each.at, each.order))

    @property
    def hidden(self) -> int:
        """How many rows are not shown."""
        return self.rows - len(self.newest())
