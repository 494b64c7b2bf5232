"""Imbalance between ranks: closed forms compared with random draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings

from dispatch_strategies import dispatches
from paceline._core.keyed_random import derive_key
from paceline.data.sampling.block_dispatch import BlockDispatch, dispatch_blocks, draw_block_counts
from paceline.data.sampling.rank_shares import RankShares
from paceline.tools.plan.imbalance_statistics import (
    excess_bound_in_turns,
    expected_excess,
    imbalance_spread,
    largest_excess,
    share_deviation,
    unlikely_excess,
)

DRAWS = 3000


@pytest.mark.sweep
@pytest.mark.parametrize("blocks", [50, 500, 5000])
@pytest.mark.parametrize(
    "parts",
    [(1,) * 7, (5, 5, 2, 8), (1, 1), (1,) * 64, (0, 1, 2)],
    ids=["seven", "unequal", "two", "many", "nothing for one"],
)
def test_closed_forms_are_those_of_many_draws(parts, blocks):
    shares = RankShares(parts)
    found = np.array(
        [
            largest_excess(draw_block_counts(blocks, shares, derive_key(seed, 4)), shares)
            for seed in range(DRAWS)
        ]
    )
    assert expected_excess(shares, blocks) == pytest.approx(
        found.mean(), rel=0.02, abs=4 * found.std() / math.sqrt(DRAWS)
    )
    assert (found > unlikely_excess(shares, blocks)).sum() <= 10  # 3 on average
    passed = (found > unlikely_excess(shares, blocks, chance=0.02)).sum()
    assert passed <= 95  # 60 on average
    if blocks >= 5 * len(parts):  # else a count of blocks takes too few values to be passed by so many
        assert passed >= 25


@pytest.mark.parametrize("block", [1, 4, 64, 1024])
def test_the_spread_grows_with_the_square_root_of_the_block(block):
    one, more = (expected_excess(RankShares.equal(8), 10**7 // size) for size in (1, block))
    assert more / one == pytest.approx(math.sqrt(block), rel=0.03)
    assert share_deviation(0.25, 10**7, block) / share_deviation(0.25, 10**7, 1) == math.sqrt(block)


def test_the_spread_of_random_dispatch_is_that_of_all_its_seeds():
    one, other = (
        imbalance_spread(dispatch_blocks(50_000, 7, block=10, scheme="random", seed=seed)) for seed in (1, 2)
    )
    assert one == other
    assert one.draws == 400
    assert one.drawn == pytest.approx(one.expected, rel=0.06)
    assert one.expected < one.drawn_worst < 1.3 * one.unlikely


def test_round_robin_has_no_randomness():
    found = imbalance_spread(dispatch_blocks(50_000, 7, block=1000))
    assert found.expected == found.unlikely == pytest.approx(8000 / (50_000 / 7) - 1)
    assert (found.drawn, found.drawn_worst, found.draws) == (None, None, 0)


@given(dispatches(least=1))
@settings(deadline=None)
def test_no_rank_is_a_block_above_its_share_in_round_robin(dealing):
    in_turns = BlockDispatch(dealing.samples, dealing.shares, dealing.block)
    found = largest_excess(in_turns.counts, in_turns.shares)
    assert found < excess_bound_in_turns(dealing.shares, dealing.samples, dealing.block)
    for count, part in zip(in_turns.counts, in_turns.shares.parts, strict=True):
        assert (
            abs(count * dealing.shares.whole - part * dealing.samples) < dealing.block * dealing.shares.whole
        )


def test_one_rank_has_it_all():
    assert unlikely_excess(RankShares.equal(1), 100) == 0
    assert largest_excess([100], RankShares.equal(1)) == 0
    assert imbalance_spread(dispatch_blocks(100, 1)).expected == 0
    found = imbalance_spread(dispatch_blocks(100, 1, scheme="random"))
    assert found.drawn == found.drawn_worst == 0


def test_thousands_of_ranks_have_closed_forms_too():
    shares = RankShares.equal(4000)
    expected, unlikely = expected_excess(shares, 10**8), unlikely_excess(shares, 10**8)
    assert 3.5 < expected * math.sqrt(25_000) < 3.7  # the largest of 4000 normal deviates: 3.6 on average
    assert 5 < unlikely * math.sqrt(25_000) < 5.3  # one in four million: 5.03
