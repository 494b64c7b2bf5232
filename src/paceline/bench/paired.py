"""Two contestants that took turns, compared round by round: pure functions over the value of each round.

A disturbance that lasts meets both contestants of a round, so their ratio within it is steadier than either time.
How far the median of few rounds is to be trusted is told by resampling them (the bootstrap, B. Efron 1979).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["Ratio", "ratio_of"]

_RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """How many times `own` goes into `other`'s place.

    Attributes:
        median: of the ratios of all rounds.
        low, high: ends of its 95 % interval.
    """

    median: float
    low: float
    high: float


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
