"""Policies for uneven data: the samples of each step, and descriptions."""

from __future__ import annotations

from collections import Counter
from itertools import cycle, islice
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.sampling.uneven_policies import EXACT, RankPortions, UnevenPolicy, list_or_range
from paceline.errors import UnevenData, UsageError

COUNTS = st.lists(st.integers(0, 60), min_size=1, max_size=9).filter(any).map(tuple)
SIZES = st.integers(1, 25)
POLICIES = st.sampled_from(get_args(UnevenPolicy))


def cut(own, size):
    return [own[first : first + size] for first in range(0, len(own), size)]


def listed(counts, size, policy):
    """Return the batches of every rank as the policy's description defines them; None where it has no epoch."""
    rows = [list(range(count)) for count in counts]
    if policy == "pad":
        if not all(counts):
            return None
        rows = [list(islice(cycle(row), max(counts))) for row in rows]
    batches = [cut(row, size) for row in rows]
    if policy == "drop":
        batches = [[batch for batch in own if len(batch) == size] for own in batches]
    lengths = {len(own) for own in batches}
    if policy == "error" and len(lengths) > 1:
        return None
    steps = min(lengths) if policy in ("truncate", "drop") else max(lengths)
    return [own[:steps] + [[]] * (steps - len(own)) for own in batches] if steps else None


def made(portions):
    """Return the batches of every rank as `bounds` gives them."""
    return [
        [
            [number % portions.counts[rank] for number in range(*portions.bounds(rank, step))]
            for step in range(portions.steps)
        ]
        for rank in range(len(portions.counts))
    ]


def portions_or_none(counts, size, policy):
    try:
        return RankPortions(counts, size, policy)
    except UsageError:
        return None


@given(counts=COUNTS, size=SIZES, policy=POLICIES.filter(lambda policy: policy != "rebalance"))
@settings(deadline=None, max_examples=400)
def test_batches_follow_the_policy(counts, size, policy):
    portions, expected = portions_or_none(counts, size, policy), listed(counts, size, policy)
    assert (portions is None) == (expected is None)
    if portions is not None:
        assert made(portions) == expected


@given(counts=COUNTS, size=SIZES)
@settings(deadline=None)
def test_rebalanced_batches_are_in_proportion(counts, size):
    portions = RankPortions(counts, size, "rebalance")
    assert portions.steps == -(-sum(counts) // (size * len(counts)))
    for rank, count in enumerate(counts):
        sizes = [portions.size(rank, step) for step in range(portions.steps)]
        assert set(sizes) <= {count // portions.steps, -(-count // portions.steps)}


@given(counts=COUNTS, size=SIZES, policy=st.sampled_from(EXACT))
@settings(deadline=None)
def test_exact_policies_use_every_sample_exactly_once(counts, size, policy):
    portions = portions_or_none(counts, size, policy)
    if policy == "error" and portions is None:
        assert len({-(-count // size) for count in counts}) > 1
        return
    assert portions is not None
    for count, batches in zip(counts, made(portions), strict=True):
        assert [number for batch in batches for number in batch] == list(range(count))
    assert (portions.used, portions.dropped, portions.repeated) == (sum(counts), 0, 0)


@given(counts=COUNTS, size=SIZES, policy=POLICIES)
@settings(deadline=None, max_examples=400)
def test_counts_match_an_enumeration(counts, size, policy):
    portions = portions_or_none(counts, size, policy)
    if portions is None:
        return
    batches = made(portions)
    seen = [Counter(number for batch in own for number in batch) for own in batches]
    used = sum(len(each) for each in seen)
    assert portions.used == used
    assert portions.dropped == sum(counts) - used
    assert portions.repeated == sum(sum(each.values()) for each in seen) - used
    assert portions.empty == sum(not batch for own in batches for batch in own)
    for rank, own in enumerate(batches):
        for steps in range(portions.steps + 1):
            assert portions.taken(rank, steps) == len({n for batch in own[:steps] for n in batch})
            if steps:
                assert portions.size(rank, steps - 1) == len(own[steps - 1])


DRAWN = (7054, 6904, 7180, 7274, 7280, 7222, 7086)
"""An actual draw in blocks of 2."""


@pytest.mark.parametrize(
    ("size", "full", "every"),
    [
        (64, (110, 107, 112, 113, 113, 112, 110), (111, 108, 113, 114, 114, 113, 111)),
        (4096, (1,) * 7, (2,) * 7),
    ],
)
def test_batches_are_counted_and_never_rounded(size, full, every):
    portions = RankPortions(DRAWN, size)
    assert portions.full_batches == full
    assert portions.batches == every


@pytest.mark.parametrize(
    ("counts", "size", "policy", "expected"),
    [
        ((10, 4), 4, "join", "3 steps on every rank; every sample is used once; ranks that run out of data take "
         "part without (2 of 6 batches are empty)"),
        ((8, 8), 4, "join", "2 steps on every rank; every sample is used once"),
        ((8, 7), 4, "error", "2 steps on every rank; every sample is used once"),
        ((4, 4), 4, "join", "1 step on every rank; every sample is used once"),
        ((10, 4), 4, "rebalance", "2 steps on every rank; every sample is used once, in batches of up to 5, 2"),
        ((10, 4), 4, "truncate", "1 step on every rank; 6 of 14 samples (42.9%) are never used"),
        ((8, 8), 4, "truncate", "2 steps on every rank; every sample is used once"),
        ((10, 7), 4, "drop", "1 step on every rank; 9 of 17 samples (52.9%) are never used"),
        ((10, 4), 4, "pad", "3 steps on every rank; 6 of 14 samples (42.9%) are used again"),
        ((8, 8), 4, "pad", "2 steps on every rank; every sample is used once"),
    ],
)  # fmt: skip
def test_descriptions(counts, size, policy, expected):
    assert RankPortions(counts, size, policy).describe() == expected


def test_many_numbers_are_written_as_a_range():
    assert list_or_range([3, 4, 4]) == "3, 4, 4"
    assert list_or_range(list(range(5, 20))) == "5 to 19"


@pytest.mark.parametrize(
    ("counts", "size", "policy", "message"),
    [
        ((1, 1), 1, "joyn", "unknown policy for uneven data 'joyn'.*did you mean 'join'"),
        ((1, 1), 0, "join", "batch_size=0"),
        ((1, 1), 1.5, "join", "batch_size=1.5"),
        ((0, 0), 1, "join", "there are no samples"),
        ((3, 0), 1, "pad", "rank 1 has no samples, so it has none to repeat"),
        ((3, 0), 1, "truncate", "no step can be made: rank 1 has 0 samples, batches have 1"),
        ((30, 6), 8, "drop", "no step can be made: rank 1 has 6 samples, batches have 8"),
    ],
)
def test_bad_input_is_refused(counts, size, policy, message):
    with pytest.raises(UsageError, match=f"(?s){message}"):
        RankPortions(counts, size, policy)


def test_policy_error_raises_for_unequal_batches():
    with pytest.raises(UnevenData, match=r"(?s)3, 2 of up to 4.*uneven='join'"):
        RankPortions((9, 8), 4, "error")
