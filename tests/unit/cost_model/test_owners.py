"""Owners of whole parameters: who gets which, and which buckets are joined so that little is padding."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cost_model.bucket_assignment import deal_to_owners, join_uneven, plan_buckets, update_parts

SIZES = st.lists(st.integers(1, 100), min_size=1, max_size=30)


def held_by(owners, sizes, parts):
    held = [0] * parts
    for owner, size in zip(owners, sizes, strict=True):
        held[owner] += size
    return held


@settings(deadline=None)
@given(sizes=SIZES, parts=st.integers(1, 6))
def test_no_owner_has_more_than_the_mean_and_the_largest(sizes, parts):
    loads = [0.0] * parts
    held = held_by(deal_to_owners(sizes, sizes, loads), sizes, parts)
    assert sum(held) == sum(sizes)
    assert loads == held
    assert max(held) <= sum(sizes) / parts + max(sizes)


def test_equal_bytes_go_where_least_was_computed_before():
    loads = [10.0, 0.0, 5.0]
    assert deal_to_owners([4, 4, 4], [9, 2, 1], loads) == [1, 2, 0]
    assert loads == [11.0, 9.0, 7.0]


@settings(deadline=None)
@given(
    sizes=SIZES,
    parts=st.integers(1, 5),
    cap=st.integers(0, 200),
    kinds=st.lists(st.sampled_from(["a", "b", None])),
)
def test_joined_buckets_have_every_parameter_once_in_order_and_little_padding(sizes, parts, cap, kinds):
    kinds = (kinds + ["a"] * len(sizes))[: len(sizes)]
    planned = plan_buckets(range(len(sizes)), sizes, kinds, cap)
    joined = join_uneven(planned, sizes, kinds, parts)
    assert sorted(index for bucket in joined for index in bucket) == list(range(len(sizes)))
    filled = [bucket[-1] for bucket in joined]
    assert filled == sorted(filled), "buckets are launched in the order in which they fill"
    for kind in {*kinds}:
        mine = [bucket for bucket in joined if kinds[bucket[0]] == kind]
        assert all(kinds[index] == kind for bucket in mine for index in bucket)
        if kind is None:
            assert mine == [bucket for bucket in planned if kinds[bucket[0]] is None]
        if kind is not None and len(mine) > 1:
            assert [index for bucket in mine for index in bucket] == sorted(
                index for b in mine for index in b
            )
            for bucket in mine[:-1]:
                assert padding(bucket, sizes, parts) <= 1 / 8


def padding(bucket, sizes, parts):
    mine = [sizes[index] for index in bucket]
    longest = parts * max(held_by(deal_to_owners(mine, mine, [0.0] * parts), mine, parts))
    return (longest - sum(mine)) / longest


def test_a_lone_rest_joins_the_bucket_before():
    assert join_uneven([[0, 1], [2, 3], [4]], [4, 4, 4, 4, 4], ["f"] * 5, 2) == [[0, 1], [2, 3, 4]]
    assert join_uneven([[0]], [4], ["f"], 4) == [[0]]
    assert join_uneven([], [], [], 2) == []


@pytest.mark.parametrize("accelerator", [False, True])
def test_parts_of_an_update_keep_all_buckets_in_order(accelerator):
    sizes = [1 << 20] * 50
    parts = update_parts(sizes, accelerator=accelerator)
    assert [index for part in parts for index in part] == list(range(50))
    assert [len(part) for part in parts[:-1]] == [13 if accelerator else 4] * (len(parts) - 1)
