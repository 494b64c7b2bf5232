"""Contestants that took turns, compared round by round: pure functions over seconds.

[Note: turns] An iteration begins at a barrier and lasts until the slowest rank is done. A turn is a few iterations of
one contestant, a round a turn of each. A contestant's time is the median over all iterations; two contestants are
compared by the median over rounds of the ratio of their turns, whose value is the median of the turn's iterations.
A disturbance that lasts meets both contestants of a round, so their ratio is steadier than either time. How far the
median of few rounds is to be trusted is told by resampling them (the bootstrap, B. Efron 1979).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

__all__ = ["Ratio", "Times", "ratio_of"]

_RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """How one contestant's time compares with another's.

    Attributes:
        median: of the ratios of all rounds.
        low, high: ends of its 95 % interval.
    """

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return it as people write it, such as ``6.99 (6.51 to 7.67)``."""
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio_of(own: Sequence[float], other: Sequence[float]) -> Ratio:
    """Return own / other over rounds in which both had a turn; the same for the same numbers.

    Args:
        own: the value of each round.
        other: the values of the same rounds, above 0.

    Raises:
        ValueError: there are no rounds, or not equally many.

    Example:
        >>> ratio_of([8.0, 9.0, 8.0], [4.0, 4.5, 4.0])
        Ratio(median=2.0, low=2.0, high=2.0)
    """
    ratios = [mine / theirs for mine, theirs in zip(own, other, strict=True)]
    if not ratios:
        raise ValueError("no rounds to compare")
    drawn = random.Random(0)
    medians = sorted(median(drawn.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    tail = _RESAMPLES // 40
    return Ratio(median(ratios), medians[tail], medians[-1 - tail])


@dataclass(frozen=True)
class Times:
    """What all contestants took at one message size.

    Attributes:
        nbytes: of the message.
        seconds: median over all iterations, by contestant.
        rounds: medians of the turns, by contestant.
    """

    nbytes: int
    seconds: dict[str, float]
    rounds: dict[str, list[float]]

    @classmethod
    def of(cls, nbytes: int, seconds: Mapping[str, Sequence[Sequence[float]]]) -> Times:
        """Return the times from ``seconds[contestant][round][iteration]`` of the slowest rank."""
        return cls(
            nbytes,
            {name: median(value for turn in turns for value in turn) for name, turns in seconds.items()},
            {name: [median(turn) for turn in turns] for name, turns in seconds.items()},
        )

    def with_best(self, title: str, names: Iterable[str]) -> Times:
        """Return the times with one more contestant: the fastest of those `names` that took part."""
        best = min((name for name in names if name in self.seconds), key=self.seconds.__getitem__)
        more_seconds, more_rounds = {title: self.seconds[best]}, {title: self.rounds[best]}
        return Times(self.nbytes, self.seconds | more_seconds, self.rounds | more_rounds)

    def ratio(self, own: str, other: str) -> Ratio:
        """Return own / other."""
        return ratio_of(self.rounds[own], self.rounds[other])

    def to_json(self) -> dict[str, Any]:
        """Return the times for JSON; ``Times(**record)`` is the way back."""
        return dict(vars(self))
