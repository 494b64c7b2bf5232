"""Merging by quorum: when the updates of a round are merged, and how much each of them counts (pure).

    collect   updates of a fragment arrive and wait; each is in the journal and acknowledged
    quorum    enough workers have delivered
    grace     the hub waits for workers that are expected soon, see [Note: grace]
    merge     the mean of all that arrived, weighted by samples, is one step of the outer optimizer

An update that arrives later takes part in the next merge. A worker that died is expected by nobody: it does not count
among the live ones. Nor do live workers that withhold their updates stop the others: after twice the longest interval
of any worker, what waits is merged without a quorum.

[Note: grace] A worker is expected at its last arrival plus its usual interval (the median of its last eight; before
there are two, the time that it reports for its steps), give or take the largest deviation from that. The hub waits for
those who are expected within half of the usual interval of the workers that have delivered: somebody slower would delay
all others, and joins a later merge. It stops as soon as all live workers have delivered, or the last expected one is
overdue. In the first window it waits for workers that it knows nothing of, too, as long.

[Note: small merges] N workers train at the same time. If n of them are merged as one full step, N/n such steps are made
in the time of a round, all from parameters that don't know of one another. Two are harmless; with many that diverges
like too large a learning rate. So a merge of fewer than half of the live workers is scaled by 2n/N.

Source: quorum, grace window and token weights as in Douillard et al. (Decoupled DiLoCo), arXiv 2604.21428; how long to
wait, and for whom, is our own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Set as AbstractSet
from statistics import median

__all__ = ["MergeWindow", "SampleWeights", "merge_scale"]

_KEPT, _LEAST_INTERVALS = 8, 2
_UNKNOWN_SPREAD, _LEAST_SPREAD = 0.25, 0.05  # of the interval
_GRACE_SHARE, _PATIENCE = 0.5, 2.0
_MAX_KNOWN = 4096  # workers
_MAX_UPDATES = 2048
"""Most updates of a merge, so that its record stays short."""

_SAMPLES_KEPT, _LEAST_SAMPLES_KNOWN = 64, 4
_MAX_SAMPLES_RATIO, _MAX_SAMPLES = 4.0, 1e9


def merge_scale(updates: int, workers: int) -> float:
    """Return the factor of a merge of `updates` out of `workers` live workers; see [Note: small merges].

    Example:
        >>> merge_scale(2, 4), merge_scale(1, 8)
        (1.0, 0.25)
    """
    return min(1.0, 2 * updates / max(1, workers))


class _Arrivals:
    """Recent arrivals of one worker, in seconds.

    Attributes:
        last: time of the last one.
        usual: interval; NaN if it is unknown.
        spread: largest deviation from that.
    """

    def __init__(self, now: float, reported: float) -> None:
        self.last, self.usual, self.spread = now, reported, _UNKNOWN_SPREAD * reported
        self._intervals: deque[float] = deque(maxlen=_KEPT)

    def add(self, now: float) -> None:
        self._intervals.append(now - self.last)
        self.last = now
        if len(self._intervals) >= _LEAST_INTERVALS:
            self.usual = median(self._intervals)
            deviations = (abs(each - self.usual) for each in self._intervals)
            self.spread = max(_LEAST_SPREAD * self.usual, *deviations)


class MergeWindow:
    """Decides when the waiting updates of one fragment are merged.

    Attributes:
        waiting: workers whose updates wait.

    Example:
        >>> window = MergeWindow()
        >>> window.add(1, now=0.0)
        >>> window.due(alive={1, 2, 3}, quorum=2, now=0.0)
        inf
        >>> window.add(2, now=0.5)
        >>> window.due(alive={1, 2, 3}, quorum=2, now=0.5)  # nothing is known of worker 3
        0.5
    """

    def __init__(self) -> None:
        self.waiting: set[int] = set()
        self._updates = 0
        self._arrivals: dict[int, _Arrivals] = {}
        self._quorum_at = self._deadline = math.inf
        self._began = math.nan  # when the first update that waits arrived
        self._longest = math.nan  # interval of the slowest worker
        self._first = True

    def add(self, worker: int, now: float, interval: float = math.nan) -> None:
        """Count an update that arrived and waits from now on.

        Args:
            worker: that sent it.
            now: seconds.
            interval: in which it trained for this update, as far as is known.
        """
        self.restore(worker)
        arrivals = self._arrivals.get(worker)
        if arrivals is None:
            self._arrivals[worker] = _Arrivals(now, interval)
        else:
            arrivals.add(now)
        if math.isnan(self._began):
            self._began = now
        intervals = (each.usual for each in self._arrivals.values() if each.usual > 0)  # and known
        self._longest = max(intervals, default=math.nan)

    def restore(self, worker: int) -> None:
        """Count an update that arrived before the hub was restarted."""
        self.waiting.add(worker)
        self._updates += 1

    def due(self, alive: AbstractSet[int], quorum: int, now: float) -> float:
        """Return when the updates are to be merged; infinity while that is unknown.

        Args:
            alive: live workers.
            quorum: number of workers that must have delivered.
            now: seconds of the clock of `add`.
        """
        waiting = self.waiting
        if not waiting:
            return math.inf
        if len(waiting) < quorum and self._updates < _MAX_UPDATES:
            until = self._began + _PATIENCE * self._longest
            return math.inf if math.isnan(until) else until
        if self._quorum_at > now:
            self._quorum_at = now
            self._deadline = self._expected_until(alive, now)
        if self._updates >= _MAX_UPDATES or (len(waiting) >= len(alive) and alive <= waiting):
            return min(now, self._deadline)
        return self._deadline

    def grace(self, now: float) -> float:
        """Return the seconds since the quorum was reached; 0 if it was not."""
        return max(0.0, now - self._quorum_at)

    def close(self) -> None:
        """Start the next window, once the updates are merged."""
        self.waiting = set()
        self._began, self._updates, self._first = math.nan, 0, False
        self._quorum_at = self._deadline = math.inf

    def _expected_until(self, alive: AbstractSet[int], now: float) -> float:
        """Return when the last worker that is worth waiting for is overdue; `now` if there is none."""
        if len(self._arrivals) > _MAX_KNOWN:
            present = alive | self.waiting
            self._arrivals = {worker: each for worker, each in self._arrivals.items() if worker in present}
        arrivals = self._arrivals
        intervals = [arrivals[worker].usual for worker in self.waiting if worker in arrivals]
        usual = [each for each in intervals if not math.isnan(each)]
        if not usual:
            return now
        latest = now + _GRACE_SHARE * median(usual)
        until = now
        for worker in alive - self.waiting:
            other = arrivals.get(worker)
            if other is not None:
                overdue = other.last + other.usual + other.spread  # NaN if the interval is unknown
                if until < overdue <= latest:
                    until = overdue
            elif self._first:
                return latest
        return until


class SampleWeights:
    """Number of samples for which an update counts: at least 1, and at most four times the usual number.

    One that trained alone for long, or claims too much, would replace what all others learnt.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_SAMPLES_KEPT)

    def counted(self, samples: float) -> float:
        """Return the number for an update, which is remembered."""
        given = min(max(1.0, samples), _MAX_SAMPLES)
        most = _MAX_SAMPLES
        if len(self._recent) >= _LEAST_SAMPLES_KNOWN:
            most = _MAX_SAMPLES_RATIO * median(self._recent)
        self._recent.append(given)
        return min(given, most)
