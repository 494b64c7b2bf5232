"""Who runs when: contestants in turn, so that a disturbance meets all of them.

The statistics of contestants that take turns: pure functions over seconds.

[Note: rounds] One turn is a few steps of one contestant, one round a turn of each. In every step each rank takes
the time of forward, backward and optimizer; the rank that took longest stands for the step. A round's value is
the median over its steps, a contestant's the median over rounds. Two contestants are compared by the median
over rounds of their ratio within the round, so that a disturbance that lasts meets both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["Round", "Split", "ratio", "round_of", "split", "turn_order"]


def turn_order(contestants: int, turn: int) -> list[int]:
    """Return the order of contestants in round number `turn`.

    Each order is followed by the same one backwards, so that over an even number of turns any two contestants
    go first equally often, and the next pair of turns begins with another contestant.

    Example:
        >>> turn_order(3, 0), turn_order(3, 1), turn_order(3, 2)
        ([0, 1, 2], [2, 1, 0], [1, 2, 0])
    """
    order = [(turn // 2 + place) % contestants for place in range(contestants)]
    return order if turn % 2 == 0 else order[::-1]


@dataclass(frozen=True)
class Round:
    """Medians over the steps of one turn, in seconds; `waited` is the part of `optimizer` that stood still."""

    forward: float
    backward: float
    optimizer: float
    waited: float
    step: float


@dataclass(frozen=True)
class Split:
    """Where the time of a step goes; the parts add up to the step. In the unit of what they were made from."""

    forward: float
    backward: float
    exposed: float
    optimizer: float


def round_of(steps: Sequence[Sequence[Sequence[float]]]) -> Round:
    """Return the medians of one turn.

    Args:
        steps: ``[step][rank]`` of (forward, backward, optimizer, waited), seconds.
    """
    slowest = [max(ranks, key=lambda parts: sum(parts[:3])) for ranks in steps]
    forward, backward, optimizer, waited = (median(parts[at] for parts in slowest) for at in range(4))
    return Round(forward, backward, optimizer, waited, median(sum(parts[:3]) for parts in slowest))


def split(own: Sequence[Round], bare: Sequence[Round]) -> Split:
    """Return where the time of a contestant's step goes, in seconds.

    Forward and backward are computing: what they take without synchronisation in the same round, or less where
    the contestant itself took less. Exposed is what they take beyond that, and the optimizer's waiting. Medians
    of parts don't quite add up to the median of the whole, so all four are scaled to do so.

    Args:
        own: the contestant's rounds.
        bare: the same rounds of the contestant that does not synchronise.
    """
    pairs = list(zip(own, bare, strict=True))
    forward = median(min(mine.forward, other.forward) for mine, other in pairs)
    backward = median(min(mine.backward, other.backward) for mine, other in pairs)
    exposed = median(
        max(0.0, mine.forward - other.forward) + max(0.0, mine.backward - other.backward) + mine.waited
        for mine, other in pairs
    )
    optimizer = median(mine.optimizer - mine.waited for mine in own)
    scale = median(mine.step for mine in own) / (forward + backward + exposed + optimizer)
    return Split(forward * scale, backward * scale, exposed * scale, optimizer * scale)


def ratio(own: Sequence[Round], other: Sequence[Round]) -> float:
    """Return the median over rounds of own step / other step."""
    return median(mine.step / theirs.step for mine, theirs in zip(own, other, strict=True))
