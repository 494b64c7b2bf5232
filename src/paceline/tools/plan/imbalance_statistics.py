"""Statistics of the imbalance between ranks: closed forms, and random draws that check them.

With N samples dispatched at random in blocks of k, a rank with share w gets k times a binomial number of N/k blocks.
So its fraction of the data has the standard deviation √(w·(1 − w)·k/N), which grows with the square root of the block
size. Dispatched in turns, no rank is off by a whole block.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from paceline._core.keyed_random import derive_key
from paceline.data.sampling.block_dispatch import BlockDispatch, draw_block_counts
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
    """Distribution of the largest excess over a rank's share, as a fraction of that share.

    Attributes:
        expected: mean over all possible draws, in closed form.
        unlikely: exceeded by one draw in a thousand, in closed form; the exact value where nothing is random.
        drawn: mean over actual draws; None without draws.
        drawn_worst: the largest of them.
        draws: their number.
    """

    expected: float
    unlikely: float
    drawn: float | None = None
    drawn_worst: float | None = None
    draws: int = 0


def share_deviation(share: float, samples: int, block: int) -> float:
    """Return the standard deviation of a rank's fraction of the data under random dispatch.

    Args:
        share: of the rank, 0 to 1.
        samples: of all ranks.
        block: samples that go to one rank together.
    """
    return math.sqrt(share * (1 - share) * block / samples)


def excess_bound_in_turns(shares: RankShares, samples: int, block: int) -> float:
    """Return an upper bound of the largest excess where blocks are dispatched in turns.

    No rank is a whole block above its share; relative to the share, this is most for the smallest one.
    """
    return block * shares.whole / (min(part for part in shares.parts if part) * samples)


def imbalance_spread(dispatch: BlockDispatch, draws: int = DRAWS) -> ImbalanceSpread:
    """Return the distribution of a dispatch's imbalance over all possible seeds.

    Args:
        dispatch: of at least one sample.
        draws: number of draws that check the closed forms, 0 or more.
    """
    if dispatch.scheme != "random":
        most = largest_excess(dispatch.counts, dispatch.shares)
        return ImbalanceSpread(expected=most, unlikely=most)
    found = [
        largest_excess(
            draw_block_counts(dispatch.blocks, dispatch.shares, derive_key(number, dispatch.block, 4)),
            dispatch.shares,
        )
        for number in range(draws)
    ]
    return ImbalanceSpread(
        expected=expected_excess(dispatch.shares, dispatch.blocks),
        unlikely=unlikely_excess(dispatch.shares, dispatch.blocks),
        drawn=math.fsum(found) / draws if draws else None,
        drawn_worst=max(found, default=None),
        draws=draws,
    )


def largest_excess(amounts: Sequence[int], shares: RankShares) -> float:
    """Return the largest excess of the ranks' `amounts` over their shares, as a fraction of the share."""
    whole, parts = sum(amounts), shares.whole
    pairs = zip(amounts, shares.parts, strict=True)
    return max((amount * parts - part * whole) / (part * whole) for amount, part in pairs if part)


def expected_excess(shares: RankShares, blocks: int) -> float:
    """Return the mean of the largest excess, as a fraction of the share.

    Multinomial counts are independent Poisson counts, given their sum. Fixing the sum scales every rank's count by the
    same factor, which is 1 on average. So the mean is that of the largest of independent counts.
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
    """Return the excess that is exceeded with probability `chance`, by the union bound over all ranks."""
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
    """Return the excess, relative to a Poisson `mean`, beyond which the tail is negligible."""
    return (10 * math.sqrt(mean) + 20) / mean


def _poisson(mean: float, level: float) -> float:
    """Return the probability that a Poisson count is at most (1 + level) × its mean, smoothed.

    Source: Wilson and Hilferty's cube root, "The distribution of chi-square", PNAS 1931.
    """
    count = (1 + level) * mean + 0.5
    root = (mean / count) ** (1 / 3)
    return NORMAL.cdf(3 * math.sqrt(count) * (1 - 1 / (9 * count) - root))


def _passed(trials: int, share: float, level: float) -> float:
    """Return the probability that a binomial count exceeds (1 + level) × its mean, smoothed.

    Source: Camp's cube root, "Approximation to the point binomial", Annals of Mathematical Statistics 1951.
    """
    count = (1 + level) * share * trials + 0.5
    if count >= trials:
        return 0.0
    others, odds = trials - count + 1, count * (1 - share) / (share * (trials - count + 1))
    a, b, root = 1 / (9 * others), 1 / (9 * count), odds ** (1 / 3)
    return NORMAL.cdf(((1 - a) - (1 - b) * root) / math.sqrt(b * root**2 + a))
