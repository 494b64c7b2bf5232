"""A race between candidates on the real run: few turns each, in alternating order, the slow ones leave early (pure).

A turn is a few steps of one candidate. Candidate 0 is the default and runs in every round, so that a candidate is
judged by its time ÷ the default's *in the same round*: what the machine or the data do meanwhile meets both. A
candidate's score is the median of these ratios over its rounds.

    round 1   all
    round 2   the default and the best two
    round 3 … the default and the best one

A challenger wins if its score is below `GAIN`; otherwise the default stays, which costs nothing to keep.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

__all__ = ["GAIN", "Race"]

GAIN = 0.985
"""Score that a challenger must be below: less than that is what two turns of one candidate differ by."""

_BEST = (2, 1)
"""Challengers in the second round, and in each later one."""


@dataclass
class Race:
    """A race under way.

    Attributes:
        candidates: how many, the default among them, 1 or more.
        rounds: in which the default runs, 1 or more.
        seconds: per candidate, what a step took in each of its turns; None for rounds in which it did not run.

    Example:
        >>> race = Race(candidates=3, rounds=3)
        >>> while (turn := race.turn) is not None:
        ...     race.record([1.0, 0.8, 0.9][turn])
        >>> race.winner, race.score(1)
        (1, 0.8)
    """

    candidates: int
    rounds: int = 4
    seconds: list[list[float | None]] = field(init=False)
    _queue: list[int] = field(init=False)

    def __post_init__(self) -> None:
        assert self.candidates >= 1, "the default at least"
        assert self.rounds >= 1, "each runs once at least"
        self.seconds = [[] for _ in range(self.candidates)]
        self._queue = list(range(self.candidates)) if self.candidates > 1 else []
        for row in self.seconds if self._queue else []:
            row.append(None)

    @property
    def turn(self) -> int | None:
        """The candidate whose turn it is; None when the race is over."""
        return self._queue[0] if self._queue else None

    def record(self, seconds: float) -> None:
        """Note what a step took in the turn that is over, above 0; the next turn begins."""
        self.seconds[self._queue.pop(0)][-1] = seconds
        done = len(self.seconds[0])
        if self._queue or done == self.rounds:
            return
        best = sorted(self._running(), key=self.score)[: _BEST[min(done, len(_BEST)) - 1]]
        order = [0, *sorted(best)]
        self._queue = order if done % 2 == 0 else order[::-1]
        for row in self.seconds:
            row.append(None)

    def _running(self) -> list[int]:
        """Return the challengers that ran in the latest round."""
        return [number for number in range(1, self.candidates) if self.seconds[number][-1] is not None]

    def score(self, number: int) -> float:
        """Return a candidate's time ÷ the default's, the median over its rounds; it must have had a turn."""
        pairs = zip(self.seconds[number], self.seconds[0], strict=True)
        return median(mine / default for mine, default in pairs if mine is not None and default is not None)

    def step_seconds(self, number: int) -> float:
        """Return what a step of a candidate took, the median over its turns; it must have had one."""
        return median(each for each in self.seconds[number] if each is not None)

    @property
    def winner(self) -> int:
        """The challenger that ran in every round, if it is faster; else the default. Call it when the race is over."""
        if self.candidates == 1:
            return 0
        best = min(self._running(), key=self.score)
        return best if self.score(best) < GAIN else 0
