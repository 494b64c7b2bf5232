"""Assignment of blocks to ranks: round robin by share, random, in constant memory."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch_strategies import SEEDS, chi_squared, dispatches, positions_of_rank
from dispatch_strategies import shares as any_shares
from paceline.data.sampling.block_dispatch import (
    MAX_DRAWN_BLOCKS,
    BlockDispatch,
    dispatch_blocks,
    draw_block_counts,
)
from paceline.data.sampling.rank_shares import MAX_PARTS, RankShares, TurnOrder, by_largest_remainder
from paceline.errors import UsageError
from paceline.tools.plan.imbalance_statistics import share_deviation

UNEVEN = [0.25, 0.25, 0.10, 0.40]

# ------------------------------------------------------------------ shares


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        (UNEVEN, (5, 5, 2, 8)),
        ([1 / 3, 1 / 3, 1 / 3], (1, 1, 1)),
        ([0.5, 0, 0.5], (1, 0, 1)),
        ([1.0], (1,)),
        ([0.001, 0.999], (1, 999)),
        ([1 / 7] * 7, (1,) * 7),
    ],
)
def test_simple_fractions_are_kept_exactly(values, parts):
    assert RankShares.of(values, len(values)).parts == parts


def test_other_shares_are_rounded_to_the_finest_part():
    values = [math.pi / 10, math.e / 10, 1 - (math.pi + math.e) / 10]
    found = RankShares.of(values, 3)
    assert found.whole == MAX_PARTS
    assert all(abs(share - value) < 1 / MAX_PARTS for share, value in zip(found, values, strict=True))
    assert str(found) == "0.3142 0.2718 0.414"


def test_none_means_equal_shares_and_shares_pass_through():
    assert RankShares.of(None, 4) == RankShares.equal(4)
    assert RankShares.of(RankShares((2, 1)), 2).parts == (2, 1)
    assert [RankShares((3, 1))[rank] for rank in (0, 1)] == [0.75, 0.25]


@pytest.mark.parametrize(
    ("values", "ranks", "message"),
    [
        ([0.5, 0.4], 2, r"shares 0.5, 0.4 sum to 0.9, not 1\n.*0.5556, 0.4444"),
        ([0.5, 0.6], 2, "sum to 1.1"),
        ([0.0, 0.0], 2, "sum to 0, not 1"),
        ([1.5, -0.5], 2, "share -0.5 of rank 1"),
        ([0.5, math.nan], 2, "share nan of rank 1"),
        ([math.inf, 0.5], 2, "share inf of rank 0"),
        ([0.5, 0.5], 3, r"2 shares \(0.5, 0.5\) for 3 ranks"),
        ([0.5, 0.25, 0.25], 2, r"3 shares \(0.5, 0.25, 0.25\) for 2 ranks"),
        ([], 1, r"0 shares \(\) for 1 rank\n"),
        (RankShares.equal(3), 2, "3 shares"),
    ],
)
def test_invalid_shares_are_refused(values, ranks, message):
    with pytest.raises(UsageError, match=f"(?s){message}"):
        RankShares.of(values, ranks)


@pytest.mark.parametrize("parts", [(), (0, 0), (1, -1, 3), (MAX_PARTS, 1)])
def test_invalid_parts_are_refused(parts):
    with pytest.raises(UsageError, match="shares in parts of"):
        RankShares(parts)


@given(values=st.lists(st.floats(0, 1), min_size=1, max_size=9).filter(any), whole=st.integers(1, 1000))
def test_largest_remainders_have_the_right_sum_and_are_less_than_one_off(values, whole):
    parts = by_largest_remainder(values, whole)
    assert sum(parts) == whole
    total = math.fsum(values)
    assert all(
        abs(part - value / total * whole) < 1 + 1e-9 for part, value in zip(parts, values, strict=True)
    )


# ------------------------------------------------------------------ turns


@given(any_shares())
@settings(deadline=None)
def test_at_every_prefix_no_rank_is_a_whole_block_off(given_shares):
    turns, parts, whole = TurnOrder.of(given_shares), given_shares.parts, given_shares.whole
    owners = [*turns.owners, *turns.owners]
    assert len(turns.owners) == whole // math.gcd(*parts)
    had = [0] * len(parts)
    for turn, owner in enumerate(owners):
        had[owner] += 1
        for rank, part in enumerate(parts):
            assert had[rank] in (part * (turn + 1) // whole, -(-part * (turn + 1) // whole))
            assert turns.counts(rank, np.array(turn + 1)) == had[rank]


def test_equal_shares_alternate_in_rank_order():
    assert TurnOrder.of(RankShares.equal(5)).owners.tolist() == [0, 1, 2, 3, 4]


def test_the_smallest_parts_of_many_ranks_keep_their_windows():
    parts = by_largest_remainder([1 + rank % 7 for rank in range(500)], MAX_PARTS)
    owners = TurnOrder.of(RankShares(parts)).owners
    turns = np.arange(1, MAX_PARTS + 1)
    for rank in (0, 1, 6, 250, 499):
        had = np.cumsum(owners == rank)
        assert np.abs(had * MAX_PARTS - parts[rank] * turns).max() < MAX_PARTS


# ------------------------------------------------------------------ dealing


@pytest.mark.parametrize(
    ("block", "counts"),
    [
        (2, [7144] * 3 + [7142] * 4),
        (10, [7150] * 2 + [7140] * 5),
        (100, [7200] * 3 + [7100] * 4),
        (1000, [8000] + [7000] * 6),
    ],
)
def test_round_robin_counts(block, counts):
    assert list(dispatch_blocks(50_000, 7, block=block).counts) == counts


@given(dispatches())
@settings(deadline=None)
def test_every_position_belongs_to_exactly_one_rank(dispatch):
    listed = positions_of_rank(dispatch)
    assert dispatch.counts == tuple(len(row) for row in listed)
    for rank, row in enumerate(listed):
        places = dispatch.positions(rank, np.arange(dispatch.counts[rank])).tolist()
        assert sorted(places) == row
        if dispatch.scheme != "random":
            assert places == row
    assert sorted(place for row in listed for place in row) == list(range(dispatch.samples))


@given(dispatches(least=1))
@settings(deadline=None)
def test_owner_and_block_of_are_inverse(dispatch):
    of_rank = {
        rank: [dispatch.block_of(rank, number) for number in range(dispatch.block_count(rank))]
        for rank in range(dispatch.ranks)
    }
    assert sorted(block for blocks in of_rank.values() for block in blocks) == list(range(dispatch.blocks))
    for rank, blocks in of_rank.items():
        assert [dispatch.owner(block) for block in blocks] == [rank] * len(blocks)
        assert dispatch.owners(np.array(blocks, dtype=np.int64)).tolist() == [rank] * len(blocks)
        assert dispatch.counts[rank] == sum(
            min(dispatch.block, dispatch.samples - block * dispatch.block) for block in blocks
        )


@given(dispatches())
@settings(deadline=None)
def test_the_short_block_is_the_last_of_its_rank(dispatch):
    if dispatch.samples % dispatch.block:
        last = dispatch.blocks - 1
        owner = dispatch.owner(last)
        assert dispatch.block_of(owner, dispatch.block_count(owner) - 1) == last


@pytest.mark.parametrize("scheme", ["round_robin", "shares", "random"])
def test_a_share_of_0_gets_no_blocks(scheme):
    for values in ([0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]):
        dispatch = dispatch_blocks(1000, 3, block=3, scheme=scheme, shares=values)
        assert [count == 0 for count in dispatch.counts] == [value == 0 for value in values]
        assert sum(dispatch.counts) == 1000


@pytest.mark.parametrize("scheme", ["round_robin", "shares", "random"])
def test_any_number_of_samples_takes_constant_memory(scheme):
    def ask(samples, block):
        dispatch = dispatch_blocks(samples, 4, block=block, scheme=scheme, shares=UNEVEN, seed=3)
        for rank in range(4):
            last = dispatch.block_count(rank) - 1
            assert dispatch.owner(dispatch.block_of(rank, last)) == rank
            numbers = np.array([0, dispatch.counts[rank] // 2, dispatch.counts[rank] - 1])
            assert dispatch.owners(dispatch.positions(rank, numbers) // block).tolist() == [rank] * 3
        assert sum(dispatch.counts) == samples

    ask(10**3, 1)  # what is imported and cached at first
    peaks = []
    for samples, block in ((10**3, 1), (10**12, 1), (10**12 - 1, 1000), (2**60, 1)):
        tracemalloc.start()
        ask(samples, block)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 100_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scheme": "round-robbin"}, "unknown dispatch scheme 'round-robbin'.*did you mean 'round_robin'"),
        ({"samples": -1}, "-1 samples"),
        ({"samples": 1.5}, "1.5 samples"),
        ({"samples": 2**60 + 1}, "pass a whole number from 0 to"),
        ({"block": 0}, "block=0"),
        ({"block": 2.0}, "block=2.0"),
        ({"block": 1001}, "a block of 1001 samples is larger than the data .1000 samples.*at most 1000"),
        ({"ranks": 0}, "0 ranks"),
        ({"ranks": 2.5}, "2.5 ranks"),
        ({"scheme": "shares"}, "dispatch by shares without shares"),
        ({"shares": [0.5, 0.5]}, "2 shares"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(UsageError, match=f"(?s){message}"):
        dispatch_blocks(**{"samples": 1000, "ranks": 3} | arguments)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda dispatch: dispatch.owner(100), "block 100 of 100"),
        (lambda dispatch: dispatch.owner(-1), "block -1 of 100"),
        (lambda dispatch: dispatch.block_of(0, 34), "block 34 of rank 0, which has 34"),
        (lambda dispatch: dispatch.block_count(3), "rank 3 of 3"),
        (lambda dispatch: dispatch.block_count(-1), "rank -1 of 3"),
    ],
)
def test_blocks_and_ranks_out_of_range_are_refused(ask, message):
    with pytest.raises(UsageError, match=message):
        ask(dispatch_blocks(1000, 3, block=10))


# ------------------------------------------------------------------ at random


@pytest.mark.thorough
@pytest.mark.parametrize(("samples", "block"), [(100_000, 32), (100_000, 1)], ids=["one by one", "at once"])
def test_ten_thousand_draws_have_the_expected_spread(samples, block):
    assert (samples // block > MAX_DRAWN_BLOCKS) == (block == 1)
    shares = RankShares.of(UNEVEN, 4)
    draws = [BlockDispatch(samples, shares, block, "random", seed).counts for seed in range(10_000)]
    found = np.array(draws) / samples
    assert found.sum(axis=1) == pytest.approx(1)
    for rank, share in enumerate(UNEVEN):
        deviation = share_deviation(share, samples, block)
        assert found[:, rank].std() == pytest.approx(deviation, rel=0.03)
        assert abs(found[:, rank].mean() - share) < 5 * deviation / 100
    together = np.corrcoef(found[:, 0], found[:, 3])[0, 1]
    assert together == pytest.approx(-math.sqrt(0.25 * 0.4 / (0.75 * 0.6)), abs=0.03)


@given(
    given_shares=any_shares(),
    blocks=st.sampled_from([0, 1, 50, MAX_DRAWN_BLOCKS, MAX_DRAWN_BLOCKS + 1, 10**15]),
    key=SEEDS,
)
@settings(deadline=None)
def test_all_blocks_are_drawn_and_none_for_a_share_of_0(given_shares, blocks, key):
    found = draw_block_counts(blocks, given_shares, key)
    assert sum(found) == blocks
    assert min(found) >= 0
    assert all(not count for count, part in zip(found, given_shares.parts, strict=True) if not part)


def test_positions_of_a_ranks_blocks_are_uniform_and_independent():
    owners = dispatch_blocks(100_000, 4, scheme="random", shares=UNEVEN, seed=1).owners(np.arange(100_000))
    for rank, share in enumerate(UNEVEN):
        own = owners == rank
        assert abs(chi_squared(np.bincount(np.flatnonzero(own) // 1000), own.sum() / 100)) < 5
        both = int((own[1:] & own[:-1]).sum())
        assert abs(both - share**2 * 1e5) < 5 * math.sqrt(share**2 * 1e5)


def test_draws_depend_on_the_seed_only():
    def drawn(seed):
        return dispatch_blocks(50_000, 7, block=10, scheme="random", seed=seed)

    assert drawn(5).counts == drawn(5).counts
    assert len({drawn(seed).counts for seed in range(20)}) == 20
    owners = [drawn(seed).owners(np.arange(5000)) for seed in range(4)]
    for one in range(4):
        for other in range(one):
            assert abs((owners[one] == owners[other]).mean() - 1 / 7) < 5 * math.sqrt(6 / 49 / 5000)


GOLDEN = {
    "in turns": (
        {"samples": 1003, "block": 10, "scheme": "shares", "seed": 0},
        (250, 250, 100, 403),
        [3, 0, 1, 3, 0, 1, 3, 2, 3, 0, 1, 3],
        [70, 71, 72, 73, 74, 75, 76, 77],
    ),
    "drawn one by one": (
        {"samples": 1003, "block": 3, "scheme": "random", "seed": 11},
        (249, 246, 91, 417),
        [3, 0, 0, 3, 2, 3, 3, 2, 1, 3, 2, 0],
        [186, 187, 188, 735, 736, 737, 429, 430],
    ),
    "drawn at once": (
        {"samples": 1000000000000, "block": 1, "scheme": "random", "seed": 11},
        (249999769118, 250000169271, 100000589786, 399999471825),
        [1, 2, 2, 1, 0, 1, 0, 0, 2, 3, 0, 2],
        [
            398791164427,
            606009944145,
            651204803475,
            681907882800,
            608659132620,
            265553858187,
            134797883412,
            152273176509,
        ],
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_same_on_every_platform(name):
    arguments, counts, owners, places = GOLDEN[name]
    dispatch = BlockDispatch(**arguments, shares=RankShares((5, 5, 2, 8)))
    assert dispatch.counts == counts
    assert dispatch.owners(np.arange(12)).tolist() == owners
    assert dispatch.positions(2, np.arange(8)).tolist() == places
