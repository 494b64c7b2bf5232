"""How old an update may be, and what becomes of one that is older (pure).

Staleness is the number of updates that the centre took in between the one that a worker began from and its own, divided
by the workers: in rounds, so that it means the same for 4 workers and for 400.

    accept        every update counts fully
    down-weight   it counts (1 + staleness)^-power
    drop          beyond the bound it is refused
    wait          beyond the bound nobody gets: a worker that is ahead waits for its next parameters (stale-synchronous
                  parallel: Ho et al., NIPS 2013)

Which updates are refused, and who is put in quarantine (pure).

    not finite     its norm is NaN or infinite
    exploding      its norm is more than `most` times what is usual, for all and for this worker, and no better score
                   speaks for it; usual is the median of the last ones that were taken in
    worse          its worker's score on the shared held-out slice is worse than that of what it began from

Norms are those of updates divided by the square root of their steps, so that a worker may send more rarely than others.
Who is refused `strikes` times among its last `window` updates is put in quarantine: for some seconds nothing of it is
taken in, and it gets the centre as it is. Each further quarantine lasts twice as long.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from paceline.errors import UsageError, unknown

__all__ = ["STALENESS_POLICIES", "StalenessHistogram", "UpdateScreen", "ScreeningRules", "StalenessPolicy"]

STALENESS_POLICIES = ("accept", "down-weight", "drop", "wait")


@dataclass(frozen=True)
class StalenessPolicy:
    """A policy.

    Attributes:
        policy: one of `STALENESS_POLICIES`. bound: in rounds. power: of the weight, 0.5 as polynomial weights usually have.

    Example:
        >>> Staleness("down-weight").weight(3.0)
        0.5
    """

    policy: str = "accept"
    bound: float = 16.0
    power: float = 0.5

    def __post_init__(self) -> None:
        if self.policy not in STALENESS_POLICIES:
            raise unknown("policy for stale updates", self.policy, STALENESS_POLICIES)
        if not 0 < self.bound < math.inf:
            raise UsageError(f"bound={self.bound!r}", remedy="give rounds above 0, such as 16")
        if not 0 <= self.power < math.inf:
            raise UsageError(f"power={self.power!r}", remedy="give a number from 0 on, such as 0.5")

    def weight(self, staleness: float) -> float:
        """Return how much an update counts beside a fresh one; 0: it is refused."""
        if self.policy == "down-weight":
            return (1 + max(0.0, staleness)) ** -self.power
        if self.policy == "drop" and staleness > self.bound:
            return 0.0
        return 1.0

    def holds(self, mine: int, others: Collection[int], revision: int, workers: int) -> bool:
        """Tell whether a worker has to wait for new parameters, so that nobody's next update gets too old.

        Args:
            mine: revision that it began from last. others: those of the other workers that are alive.
            revision: of the centre now. workers: how many there are.
        """
        if self.policy != "wait" or not others:
            return False
        oldest = min(others)
        return mine > oldest and (revision + 1 - oldest) / max(1, workers) > self.bound


class StalenessHistogram:
    """Counts of staleness, in rounds: of the same width up to 4, then doubling.

    Example:
        >>> counts = Histogram()
        >>> counts.add(0.3); counts.add(5.0)
        >>> counts.rows()
        [(0.0, 0.5, 1), (4.0, 8.0, 1)]
    """

    EDGES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0, 32.0, 64.0, math.inf)

    def __init__(self) -> None:
        self.counts = [0] * (len(self.EDGES) - 1)

    def add(self, staleness: float) -> None:
        """Count one."""
        self.counts[bisect_right(self.EDGES, staleness, 1, len(self.counts)) - 1] += 1

    def rows(self) -> list[tuple[float, float, int]]:
        """Return (from, below, count) of all that are not empty."""
        return [
            (self.EDGES[index], self.EDGES[index + 1], count)
            for index, count in enumerate(self.counts)
            if count
        ]


_MEMORY, _OWN_MEMORY = 64, 8


_LEAST_SEEN = 8


_LONGEST_DOUBLINGS = 6


@dataclass(frozen=True)
class ScreeningRules:
    """What is refused.

    Attributes:
        most: times the median norm; 0: any.
        worse: how much worse than before a score may be; None: any. strikes: of `window` updates.
        seconds: of a first quarantine.
    """

    most: float = 10.0
    worse: float | None = 0.05
    strikes: int = 3
    window: int = 10
    seconds: float = 60.0

    def __post_init__(self) -> None:
        if not (self.most == 0 or 1 < self.most < math.inf):
            raise UsageError(f"most={self.most!r}", remedy="give a number above 1, such as 10, or 0 for none")
        if self.worse is not None and not 0 <= self.worse < math.inf:
            raise UsageError(f"worse={self.worse!r}", remedy="give a number from 0 on, such as 0.05, or None")
        if not 1 <= self.strikes <= self.window:
            raise UsageError(
                f"strikes={self.strikes!r} of window={self.window!r}", remedy="give 1 up to the window"
            )
        if not 0 < self.seconds < math.inf:
            raise UsageError(f"seconds={self.seconds!r} of quarantine", remedy="give seconds above 0")


@dataclass(slots=True)
class _Sizes:
    """The last sizes that were taken in, at most so many: in the order in which they came, and sorted."""

    most: int
    latest: deque[float] = field(default_factory=deque)
    ordered: list[float] = field(default_factory=list)

    def add(self, size: float) -> None:
        """Remember one, and forget the oldest of too many."""
        if len(self.latest) == self.most:
            del self.ordered[bisect_left(self.ordered, self.latest.popleft())]
        self.latest.append(size)
        insort(self.ordered, size)

    def median(self) -> float:
        """Return what half of them are below, 0 if there are none."""
        if not self.ordered:
            return 0.0
        middle, odd = divmod(len(self.ordered), 2)
        return self.ordered[middle] if odd else (self.ordered[middle - 1] + self.ordered[middle]) / 2


@dataclass
class _Record:
    """What one worker did."""

    recent: deque[bool]
    sizes: _Sizes
    until: float = -math.inf
    times: int = 0


@dataclass
class UpdateScreen:
    """Judges updates, one after the other.

    Attributes:
        rules: what is refused.
    """

    rules: ScreeningRules = field(default_factory=ScreeningRules)
    _sizes: dict[int, _Sizes] = field(default_factory=dict)
    _records: dict[int, _Record] = field(default_factory=dict)

    def judge(
        self,
        worker: int,
        fragment: int,
        norm: float,
        steps: int,
        score: float | None,
        before: float | None,
        now: float,
    ) -> str:
        """Return why an update is refused, empty if it is taken in; remembers either.

        Args:
            worker: whose. fragment: of the model. norm: of the update. steps: that it was learnt in.
            score: of the worker's parameters, lower is better. before: score of what it began from.
            now: seconds of any clock that does not go back.
        """
        record = self._records.get(worker)
        if record is None:
            recent = deque[bool](maxlen=self.rules.window)
            record = self._records[worker] = _Record(recent, _Sizes(_OWN_MEMORY))
        if now < record.until:
            return f"in quarantine: for {record.until - now:.0f} s more"
        size = norm / math.sqrt(max(1, steps))
        seen = self._sizes.get(fragment)
        if seen is None:
            seen = self._sizes[fragment] = _Sizes(_MEMORY)
        why = self._why(seen, size, score, before, record.sizes)
        record.recent.append(bool(why))
        if not why:
            seen.add(size)
            record.sizes.add(size)
        elif sum(record.recent) >= self.rules.strikes:
            record.recent.clear()
            record.until = now + self.rules.seconds * 2 ** min(record.times, _LONGEST_DOUBLINGS)
            record.times += 1
        return why

    def quarantined(self, worker: int, now: float) -> float:
        """Return for how many seconds more a worker is in quarantine, 0 if it is not."""
        record = self._records.get(worker)
        return max(0.0, record.until - now) if record is not None else 0.0

    def forget(self, worker: int) -> None:
        """Forget a worker that left."""
        self._records.pop(worker, None)

    def _why(self, seen: _Sizes, size: float, score: float | None, before: float | None, own: _Sizes) -> str:
        rules = self.rules
        if not math.isfinite(size):
            return "not finite"
        better = score is not None and before is not None and score < before
        if rules.most and len(seen.latest) >= _LEAST_SEEN and not better:
            usual = max(seen.median(), own.median())
            if usual > 0 and size > rules.most * usual:
                return f"exploding: {size / usual:.1f} times the usual norm"
        if score is not None and not math.isfinite(score):
            return "not finite: its score"
        told = None not in (rules.worse, score, before)
        if told and score > before + rules.worse:  # type: ignore[operator]
            return f"worse: score {score:.4f}, it began from {before:.4f}"
        return ""
