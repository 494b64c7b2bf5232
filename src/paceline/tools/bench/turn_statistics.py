"""Statistics of interleaved runs: the order of turns, medians, and ratios with their bootstrap interval.

Benchmarked strategies and backends run interleaved in the same processes, so that a disturbance affects all of them.

[Note: turns] A turn is a few iterations of one of them, a round one turn of each. The slowest rank's time stands for
an iteration, the median of its iterations for a turn. Two are compared by the median over rounds of the ratio of
their turns: a lasting disturbance affects both turns of a round, so the ratio is steadier than either time. How far
the median of few rounds can be trusted is estimated by resampling the rounds (bootstrap, B. Efron 1979).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

__all__ = [
    "RoundTimes",
    "StepBreakdown",
    "median_ratio",
    "round_times",
    "step_breakdown",
    "turn_order",
]


def turn_order(count: int, turn: int) -> list[int]:
    """Return the order of `count` runs in round number `turn`.

    Every order is followed by its reverse, so that over an even number of rounds any two runs precede each other
    equally often; the next pair of rounds starts with another run.

    Example:
        >>> turn_order(3, 0), turn_order(3, 1), turn_order(3, 2)
        ([0, 1, 2], [2, 1, 0], [1, 2, 0])
    """
    order = [(turn // 2 + offset) % count for offset in range(count)]
    return order if turn % 2 == 0 else order[::-1]


@dataclass(frozen=True)
class RoundTimes:
    """Medians over the steps of one turn, in seconds; `waited` is the part of `optimizer` spent blocked."""

    forward: float
    backward: float
    optimizer: float
    waited: float
    step: float


@dataclass(frozen=True)
class StepBreakdown:
    """The parts of a step's time, which add up to the step; in the unit of the times they were computed from."""

    forward: float
    backward: float
    exposed: float
    optimizer: float


def round_times(steps: Sequence[Sequence[Sequence[float]]]) -> RoundTimes:
    """Return the medians of one turn.

    Args:
        steps: ``[step][rank]`` of (forward, backward, optimizer, waited), seconds.
    """
    slowest = [max(ranks, key=lambda parts: sum(parts[:3])) for ranks in steps]
    forward, backward, optimizer, waited = (median(parts[at] for parts in slowest) for at in range(4))
    return RoundTimes(forward, backward, optimizer, waited, median(sum(parts[:3]) for parts in slowest))


def step_breakdown(own: Sequence[RoundTimes], bare: Sequence[RoundTimes]) -> StepBreakdown:
    """Return the parts of a strategy's step, in seconds.

    Forward and backward are computing: their time without synchronisation in the same round, or the strategy's own
    time where that is shorter. Exposed is the excess over that, plus the optimizer's waiting. Medians of the parts
    do not quite add up to the median of the step, so all four are scaled to do so.

    Args:
        own: rounds of the strategy.
        bare: the same rounds of training without synchronisation.
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
    return StepBreakdown(forward * scale, backward * scale, exposed * scale, optimizer * scale)


def median_ratio(own: Sequence[RoundTimes], other: Sequence[RoundTimes]) -> float:
    """Return the median over rounds of own step ÷ other step."""
    return median(mine.step / theirs.step for mine, theirs in zip(own, other, strict=True))
