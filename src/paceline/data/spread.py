"""How far apart the ranks' amounts are: closed forms, beside draws that check them.

With N samples dealt at random in blocks of k, rank i of chance w gets k times a binomial number of N/k
blocks. So its share of the data has the standard deviation √(w·(1 - w)·k/N): it grows as the square root of
the block size. Dealt in turns, nobody is a whole block off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from paceline.data.dispatch import Dealing, draw_counts
from paceline.data.shares import Shares
from paceline.data.shuffle import key_of

__all__ = ["Spread", "share_deviation", "spread_of"]

DRAWS = 400
UNLIKELY = 1e-3


@dataclass(frozen=True)
class Spread:
    """How far the largest amount may be above its share, as a fraction of that share.

    Attributes:
        expected: on average over draws: closed form.
        unlikely: exceeded by one draw in a thousand: closed form; the bound itself where there is no chance.
        drawn: the mean over draws that were made; None where there is no chance.
        drawn_worst: the largest of them.
        draws: how many.
    """

    expected: float
    unlikely: float
    drawn: float | None = None
    drawn_worst: float | None = None
    draws: int = 0


def share_deviation(share: float, samples: int, block: int) -> float:
    """Return the standard deviation of the part of the data that a rank gets at random.

    Args:
        share: the rank's chance, 0 to 1.
        samples: of all ranks.
        block: samples dealt together.
    """
    return math.sqrt(share * (1 - share) * block / samples)


def spread_of(dealing: Dealing, draws: int = DRAWS) -> Spread:
    """Return the spread of `dealing`, whatever its seed: over all draws that there could be."""
    if dealing.scheme != "random":
        counts, shares = dealing.counts, dealing.shares
        most = max(
            count / (share * dealing.samples) - 1
            for count, share in zip(counts, shares, strict=True)
            if share
        )
        return Spread(expected=most, unlikely=most)
    found = [
        _largest(draw_counts(dealing.blocks, dealing.shares, key_of(number, 4)), dealing.shares)
        for number in range(draws)
    ]
    return Spread(
        expected=expected_largest(dealing.shares, dealing.blocks),
        unlikely=unlikely_largest(dealing.shares, dealing.blocks),
        drawn=math.fsum(found) / draws,
        drawn_worst=max(found),
        draws=draws,
    )


def _largest(blocks_of_rank: Sequence[int], shares: Shares) -> float:
    """Return by how much the largest amount is above its share, as a fraction of it."""
    blocks = sum(blocks_of_rank)
    pairs = zip(blocks_of_rank, shares, strict=True)
    return max(count / (share * blocks) - 1 for count, share in pairs if share)


def expected_largest(shares: Shares, blocks: int) -> float:
    """Return by how much the largest amount is above its share on average, in the normal limit.

    Multinomial counts are independent ones given their sum. To keep the sum takes the same fraction off every
    rank's share, and is 0 on average. So the mean is that of the largest of independent deviates, of
    deviation 1/√(w·blocks) each: taken over the quantiles of that largest.
    """
    deviations = [1 / math.sqrt(share * blocks) for share in shares if share]
    steps = 400
    quantiles = (_quantile_of_largest(deviations, (step + 0.5) / steps) for step in range(steps))
    return math.fsum(quantiles) / steps


def unlikely_largest(shares: Shares, blocks: int, chance: float = UNLIKELY) -> float:
    """Return what the largest amount above its share passes with `chance`: the sum of all ranks' chances."""
    deviations = [math.sqrt((1 - share) / (share * blocks)) for share in shares if 0 < share < 1]
    if not deviations:
        return 0.0
    normal = NormalDist()
    return _crossing(
        lambda level: math.fsum(normal.cdf(-level / each) for each in deviations) <= chance, max(deviations)
    )


def _quantile_of_largest(deviations: Sequence[float], chance: float) -> float:
    """Return what the largest of independent normal deviates stays below with `chance`."""
    normal = NormalDist()
    return _crossing(
        lambda level: math.prod(normal.cdf(level / each) for each in deviations) >= chance, max(deviations)
    )


def _crossing(reached: Callable[[float], bool], scale: float) -> float:
    """Return where `reached` turns true, within ten times `scale` of 0, by bisection."""
    low, high = -10 * scale, 10 * scale
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return (low + high) / 2
