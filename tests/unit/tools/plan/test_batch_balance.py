"""Effects of dispatched data on batches: starving ranks, deadlocks, the cost of each policy, safe sizes."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch_strategies import dispatches, shares
from paceline.data.sampling.block_dispatch import BlockDispatch, dispatch_blocks
from paceline.data.sampling.rank_shares import RankShares
from paceline.data.sampling.uneven_policies import EXACT, RankPortions, UnevenPolicy
from paceline.tools.plan.uneven_batch_outcomes import (
    BatchBalance,
    is_even,
    moved_weight,
    safe_batch_sizes,
    safe_blocks,
)

SIZES = st.integers(1, 50)


def batches_of(counts, size, drop_last):
    """Return how many batches a loop over each rank's samples makes."""
    found = []
    for count in counts:
        steps = 0
        while count >= size or (count and not drop_last):
            count, steps = count - min(count, size), steps + 1
        found.append(steps)
    return found


@given(dealing=dispatches(least=1), size=SIZES, drop_last=st.booleans())
@settings(deadline=None)
def test_starving_ranks_and_deadlocks(dealing, size, drop_last):
    balance = BatchBalance(dealing, size, drop_last)
    steps = batches_of(dealing.counts, size, drop_last)
    assert list(balance.batches) == steps
    assert balance.starving == [(rank, own) for rank, own in enumerate(steps) if own < max(steps)]
    assert balance.deadlock == (len(set(steps)) > 1)
    assert is_even(dealing.counts, size, drop_last=drop_last) == (not balance.deadlock)


@given(dealing=dispatches(least=1), size=SIZES, drop_last=st.booleans())
@settings(deadline=None)
def test_without_a_policy_the_steps_common_to_all_ranks_are_made(dealing, size, drop_last):
    balance = BatchBalance(dealing, size, drop_last)
    outcome = balance.without_policy
    steps = min(batches_of(dealing.counts, size, drop_last))
    used = sum(
        sum(min(size, max(0, count - step * size)) for step in range(steps)) for count in dealing.counts
    )
    assert (outcome.policy, outcome.steps, outcome.used) == ("none", steps, used)
    assert outcome.dropped == dealing.samples - used
    assert outcome.deadlock == balance.deadlock
    assert outcome.exact == (used == dealing.samples and not balance.deadlock)


@given(dealing=dispatches(least=1), size=SIZES)
@settings(deadline=None)
def test_outcomes_are_those_of_the_policies(dealing, size):
    outcomes = BatchBalance(dealing, size).outcomes
    assert [outcome.policy for outcome in outcomes] == ["none", *get_args(UnevenPolicy)]
    for outcome in outcomes[1:]:
        if outcome.refused:
            assert (outcome.steps, outcome.exact) == (None, False)
            continue
        portions = RankPortions(dealing.counts, size, outcome.policy)
        assert outcome.steps == portions.steps
        assert (outcome.used, outcome.dropped, outcome.repeated, outcome.empty) == (
            portions.used,
            portions.dropped,
            portions.repeated,
            portions.empty,
        )
        assert not outcome.deadlock
        assert outcome.exact == (portions.used == dealing.samples and not portions.repeated)
        if outcome.policy in EXACT:
            assert outcome.exact
            assert outcome.moved == 0


def test_the_shares_of_the_gradients_weight():
    dealing = dispatch_blocks(50_000, 7, block=1000)  # 8000, 7000 ×6
    of = {outcome.policy: outcome for outcome in BatchBalance(dealing, 64).outcomes}
    assert of["none"].moved == pytest.approx(8000 / 50_000 - 1 / 7)
    assert of["truncate"].moved == pytest.approx(8000 / 50_000 - 110 * 64 / 49_040)
    assert of["pad"].moved == pytest.approx(8000 / 50_000 - 1 / 7)
    assert of["join"].moved == of["rebalance"].moved == 0
    assert "unequal numbers of batches: 125, 110, 110" in of["error"].refused
    assert (of["truncate"].steps, of["truncate"].dropped) == (110, 960)
    assert (of["drop"].steps, of["drop"].dropped) == (109, 50_000 - 109 * 64 * 7)
    assert (of["pad"].steps, of["pad"].repeated) == (125, 6000)


@given(counts=st.lists(st.integers(0, 50), min_size=1, max_size=9), data=st.data())
def test_weight_that_was_moved(counts, data):
    weights = data.draw(st.lists(st.integers(0, 50), min_size=len(counts), max_size=len(counts)))
    found = moved_weight(weights, counts)
    assert 0 <= found <= 1
    if sum(weights) and sum(counts):
        pairs = zip(weights, counts, strict=True)
        expected = sum(abs(own / sum(weights) - count / sum(counts)) for own, count in pairs) / 2
        assert found == pytest.approx(expected, abs=1e-12)
    assert moved_weight(counts, counts) == moved_weight([3 * count for count in counts], counts) == 0


@given(samples=st.integers(1, 400), given_shares=shares(), size=SIZES, drop_last=st.booleans())
@settings(deadline=None)
def test_safe_blocks_are_those_that_a_trial_of_each_finds(samples, given_shares, size, drop_last):
    found = safe_blocks(samples, given_shares, size, drop_last=drop_last, largest=60)
    tried = [
        block
        for block in range(1, 61)
        if len(set(batches_of(BlockDispatch(samples, given_shares, block).counts, size, drop_last))) == 1
    ]
    assert found == tried


@given(samples=st.integers(1, 5000), ranks=st.integers(1, 40), size=SIZES, drop_last=st.booleans())
@settings(deadline=None)
def test_with_equal_shares_two_ranks_are_enough(samples, ranks, size, drop_last):
    found = safe_blocks(samples, RankShares.equal(ranks), size, drop_last=drop_last, largest=50)
    tried = [
        block
        for block in range(1, 51)
        if not BatchBalance(BlockDispatch(samples, RankShares.equal(ranks), block), size, drop_last).deadlock
    ]
    assert found == tried


def test_safe_blocks_of_a_large_row_and_of_one_that_is_too_short():
    found = safe_blocks(50_000, RankShares.equal(7), 64, largest=50_000 // 7)
    assert found[:4] == [1, 2, 3, 4]
    assert found[-1] <= 50_000 // 7
    assert safe_blocks(5, RankShares.equal(7), 1, largest=1) == []
    assert len(safe_blocks(10**15, RankShares.equal(1), 64, largest=1 << 18)) == 1 << 18


@given(counts=st.lists(st.integers(0, 300), min_size=1, max_size=9).map(tuple), drop_last=st.booleans())
@settings(deadline=None)
def test_safe_batch_sizes_are_those_that_a_trial_of_each_finds(counts, drop_last):
    found = safe_batch_sizes(counts, range(1, 80), drop_last=drop_last)
    assert found == [size for size in range(1, 80) if len(set(batches_of(counts, size, drop_last))) == 1]


def test_safe_batch_sizes_of_a_recorded_draw():
    drawn = (7054, 6904, 7180, 7274, 7280, 7222, 7086)
    assert safe_batch_sizes(drawn, [64, 4096]) == [4096]
    assert safe_batch_sizes(drawn, [64, 4096], drop_last=True) == [4096]
