"""Downtimes of a hub, inferred from its records.

A running hub records its traffic since the previous record every few seconds, so these records cover time without
gaps. If one begins later than the previous one ended, the hub was down (restarted, or its machine was suspended) since
the last record of any kind before that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

__all__ = ["DowntimeDetector", "HubDowntime"]

_MAX_KEPT = 500


_CLOCK_TOLERANCE = 0.5  # seconds: system clocks are adjusted now and then


_MIN_SILENCE = 0.05


@dataclass(frozen=True)
class HubDowntime:
    """A downtime of the hub, in unix seconds."""

    since: float
    until: float


@dataclass(kw_only=True)
class DowntimeDetector:
    """Infers the hub's downtimes from the times of its records.

    Attributes:
        downtimes: the last ones.
        count: number of downtimes.
    """

    downtimes: deque[HubDowntime] = field(default_factory=lambda: deque(maxlen=_MAX_KEPT))
    count: int = 0
    _covered_until: float | None = None
    _previous: float | None = None  # time of the previous record of any kind
    _silences: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_MAX_KEPT))

    def add_record(self, t: float) -> None:
        """Register a record of any kind at `t`."""
        if self._previous is not None and t - self._previous > _MIN_SILENCE:
            self._silences.append((self._previous, t))
        self._previous = t

    def add_covered(self, begin: float, end: float) -> HubDowntime | None:
        """Register a traffic record that covers a period; return the downtime before it, if any."""
        downtime = None
        if self._covered_until is not None and begin - self._covered_until > _CLOCK_TOLERANCE:
            since = next((since for since, until in self._silences if since <= begin <= until), begin)
            downtime = HubDowntime(since, begin)
            self.downtimes.append(downtime)
            self.count += 1
        self._covered_until = end
        self._silences.clear()
        return downtime
