"""Machines that differ and workers that come and go, from a few numbers (pure)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from paceline.errors import UsageError
from paceline.mixing import key_of
from paceline.simulate.plan import Churn

__all__ = ["churned", "paces"]

_PARTS = 10
"""Of the time, for `churned`."""


def paces(workers: int, speeds: Sequence[float], spread: float = 0.0) -> list[float]:
    """Return how long each worker's step takes beside the fastest one's.

    Args:
        workers: how many. speeds: relative ones, repeated until there are enough; 2 makes a step in half the time of 1.
        spread: standard deviation of the logarithm of what steps take beside, at even quantiles; 0: nothing.

    Raises:
        UsageError: there are no workers; a number is out of range.

    Example:
        >>> paces(5, [1, 2, 4])
        [4.0, 2.0, 1.0, 4.0, 2.0]
    """
    if workers < 1:
        raise UsageError(f"{workers} workers", remedy="give 1 or more")
    if not speeds or not all(0 < each < math.inf for each in speeds):
        raise UsageError(f"speeds {list(speeds)}", remedy="give numbers above 0, such as 1:1:2:4")
    if not 0 <= spread < math.inf:
        raise UsageError(f"spread={spread!r}", remedy="give a number from 0 on, such as 0.5")
    normal = NormalDist()
    times = [
        math.exp(spread * normal.inv_cdf((worker + 0.5) / workers)) / speeds[worker % len(speeds)]
        for worker in range(workers)
    ]
    fastest = min(times)
    return [each / fastest for each in times]


def churned(share: float, workers: int, seconds: float, seed: int = 0) -> list[Churn]:
    """Return who leaves and comes back, so that about a share of all is away at a time.

    In every tenth of the time but the first and the last two so many workers leave without a word, one at least, drawn
    from those that are there; each is back a tenth later. Never are all away.

    Args:
        share: of the workers, from 0 to 0.5. workers: how many. seconds: the whole time. seed: of what is drawn.

    Raises:
        UsageError: the share is out of range.
    """
    if not 0 <= share <= 0.5:
        raise UsageError(f"{share:.0%} of the workers away", remedy="give a share from 0 to 50%")
    if not share or workers < 2:
        return []
    part, many = seconds / _PARTS, math.ceil(share * workers)
    away: set[int] = set()
    turns: list[Churn] = []
    for number in range(1, _PARTS - 2):
        here = sorted(set(range(workers)) - away, key=lambda worker: key_of(seed, 6, number, worker))
        away = set(here[: min(many, len(here) - 1)])
        for worker in sorted(away):
            at = part * (number + key_of(seed, 7, number, worker) / 2**64)
            turns += [Churn(at, worker, False), Churn(at + part, worker, True)]
    return turns
