"""How far apart the ranks' amounts are: closed forms, beside draws that check them.

With N samples dealt at random in blocks of k, rank i of chance w gets k times a binomial number of N/k
blocks. So its share of the data has the standard deviation √(w·(1 - w)·k/N): it grows as the square root of
the block size. Dealt in turns, nobody is a whole block off.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from paceline._core.keyed_random import derive_key
from paceline.data.sampling.block_dispatch import BlockDispatch, draw_counts
from paceline.data.sampling.rank_shares import RankShares

__all__ = [
    "ImbalanceSpread",
    "excess_bound_in_turns",
    "expected_excess",
    "imbalance_spread",
    "largest_excess",
    "share_deviation",
    "unlikely_excess",
]

DRAWS = 400
UNLIKELY = 1e-3
STEPS = 2000
NORMAL = NormalDist()


@dataclass(frozen=True)
class ImbalanceSpread:
    """How far the largest amount may be above its share, as a fraction of that share.

    Attributes:
        expected: on average over draws: closed form.
        unlikely: exceeded by one draw in a thousand: closed form; the bound itself where there is no chance.
        drawn: the mean over draws that were made; None where there is no chance, or no draw.
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


def excess_bound_in_turns(shares: RankShares, samples: int, block: int) -> float:
    """Return what the largest amount above its share stays below where blocks are dealt in turns.

    No rank is a whole block above its share, which for the smallest one is the largest part of it.
    """
    return block * shares.whole / (min(part for part in shares.parts if part) * samples)


def imbalance_spread(dealing: BlockDispatch, draws: int = DRAWS) -> ImbalanceSpread:
    """Return the spread of `dealing`, whatever its seed: over all draws that there could be.

    Args:
        dealing: of at least one sample.
        draws: how many are made beside the closed forms, 0 or more.
    """
    if dealing.scheme != "random":
        most = largest_excess(dealing.counts, dealing.shares)
        return ImbalanceSpread(expected=most, unlikely=most)
    found = [
        largest_excess(
            draw_counts(dealing.blocks, dealing.shares, derive_key(number, dealing.block, 4)), dealing.shares
        )
        for number in range(draws)
    ]
    return ImbalanceSpread(
        expected=expected_excess(dealing.shares, dealing.blocks),
        unlikely=unlikely_excess(dealing.shares, dealing.blocks),
        drawn=math.fsum(found) / draws if draws else None,
        drawn_worst=max(found, default=None),
        draws=draws,
    )


def largest_excess(amounts: Sequence[int], shares: RankShares) -> float:
    """Return by how much the largest of the ranks' `amounts` is above its share, as a fraction of that share."""
    whole, parts = sum(amounts), shares.whole
    pairs = zip(amounts, shares.parts, strict=True)
    return max((amount * parts - part * whole) / (part * whole) for amount, part in pairs if part)


def expected_excess(shares: RankShares, blocks: int) -> float:
    """Return by how much the largest amount is above its share on average, as a fraction of that share.

    Multinomial counts are independent Poisson ones given their sum. To keep the sum takes the same fraction
    off every rank's share, and is 0 on average. So the mean is that of the largest of independent counts.
    """
    ranks_of_mean = Counter(share * blocks for share in shares if share)
    if ranks_of_mean.total() == 1:
        return 0.0
    least = min(ranks_of_mean)
    low, high = max(-1.0, -10 / math.sqrt(least)), _reach(least)
    step = (high - low) / STEPS

    def passed(level: float) -> float:
        return 1 - math.prod(_poisson(mean, level) ** ranks for mean, ranks in ranks_of_mean.items())

    return low + step * math.fsum(passed(low + (number + 0.5) * step) for number in range(STEPS))


def unlikely_excess(shares: RankShares, blocks: int, chance: float = UNLIKELY) -> float:
    """Return what the largest amount above its share passes with `chance`: the sum of all ranks' chances."""
    ranks_of_share = Counter(share for share in shares if 0 < share < 1)
    if not ranks_of_share:
        return 0.0
    low, high = 0.0, _reach(min(ranks_of_share) * blocks)
    for _ in range(60):
        level = (low + high) / 2
        passed = sum(ranks * _passed(blocks, share, level) for share, ranks in ranks_of_share.items())
        low, high = (level, high) if passed > chance else (low, level)
    return high


def _reach(mean: float) -> float:
    """Return how far above a Poisson `mean` there is nothing any more, as a fraction of it."""
    return (10 * math.sqrt(mean) + 20) / mean


def _poisson(mean: float, level: float) -> float:
    """Return the chance that a Poisson count is at most (1 + level) times its mean, steps smoothed.

    Source: Wilson and Hilferty's cube root, "The distribution of chi-square", PNAS 1931.
    """
    count = (1 + level) * mean + 0.5
    root = (mean / count) ** (1 / 3)
    return NORMAL.cdf(3 * math.sqrt(count) * (1 - 1 / (9 * count) - root))


def _passed(trials: int, share: float, level: float) -> float:
    """Return the chance that a binomial count passes (1 + level) times its mean, steps smoothed.

    Source: Camp's cube root, "Approximation to the point binomial", Annals of Mathematical Statistics 1951.
    """
    count = (1 + level) * share * trials + 0.5
    if count >= trials:
        return 0.0
    others, odds = trials - count + 1, count * (1 - share) / (share * (trials - count + 1))
    a, b, root = 1 / (9 * others), 1 / (9 * count), odds ** (1 / 3)
    return NORMAL.cdf(((1 - a) - (1 - b) * root) / math.sqrt(b * root**2 + a))
