"""The CUDA caching allocator's rules, replayed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.tools.plan.memory.caching_allocator import MIB, allocation_size, replay_allocations, round_size

KIB = 1024


@pytest.mark.parametrize(
    ("requested", "allocated"),
    [(1, 512), (511, 512), (512, 512), (513, 1024), (1000, 1024), (MIB, MIB), (MIB + 1, MIB + 512)],
)
def test_requests_are_rounded_to_512_bytes(requested, allocated):
    assert round_size(requested) == allocated


@pytest.mark.parametrize(
    ("block", "segment"),
    [
        (512, 2),
        (MIB, 2),
        (MIB + 512, 20),
        (10 * MIB - 512, 20),
        (10 * MIB, 10),
        (10 * MIB + 512, 12),
        (33 * MIB, 34),
    ],
)
def test_segments_have_three_kinds_of_sizes(block, segment):
    assert allocation_size(block) == segment * MIB


def test_small_blocks_share_a_segment():
    found = replay_allocations([(KIB, at) for at in range(2048)])  # 2 MiB in all
    assert (found.allocated_nbytes, found.reserved_nbytes) == (2 * MIB, 2 * MIB)
    assert replay_allocations([(KIB, at) for at in range(2049)]).reserved_nbytes == 4 * MIB


def test_small_and_large_pools_are_apart():
    assert (
        replay_allocations([(2 * MIB, "large"), (-2 * MIB, "large"), (KIB, "small")]).reserved_nbytes
        == 22 * MIB
    )


def test_a_freed_block_is_used_again():
    again = [(12 * MIB, "a"), (-12 * MIB, "a"), (12 * MIB, "b"), (-12 * MIB, "b"), (11 * MIB, "c")]
    assert replay_allocations(again).reserved_nbytes == 12 * MIB


def test_a_large_rest_is_split_off_and_a_small_one_is_given_out_with_the_block():
    # 12 MiB freed; 11 MiB requested: the rest of exactly 1 MiB is not split off, so it counts as given out
    whole = replay_allocations([(12 * MIB, "a"), (-12 * MIB, "a"), (11 * MIB, "b"), (2 * MIB, "c")])
    assert whole.reserved_nbytes == 32 * MIB
    # 10.5 MiB requested: 1.5 MiB are left and can be given out
    split = replay_allocations(
        [(12 * MIB, "a"), (-12 * MIB, "a"), (10 * MIB + 512 * KIB, "b"), (MIB + 512, "c")]
    )
    assert split.reserved_nbytes == 12 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken():
    changes = [
        (20 * MIB, "a"),
        (14 * MIB, "b"),
        (-20 * MIB, "a"),
        (-14 * MIB, "b"),
        (13 * MIB, "c"),
        (20 * MIB, "d"),
    ]
    assert replay_allocations(changes).reserved_nbytes == 34 * MIB


def test_freed_neighbours_are_merged():
    # three blocks of one segment of 20 MiB; the outer two freed first, then the one between: all is one again
    blocks = [(6 * MIB, "a"), (6 * MIB, "b"), (6 * MIB, "c")]
    freed = [(-6 * MIB, "a"), (-6 * MIB, "c"), (-6 * MIB, "b")]
    assert replay_allocations([*blocks, *freed, (20 * MIB, "d")]).reserved_nbytes == 20 * MIB
    # while the one between is held, 20 MiB need a segment of their own
    assert replay_allocations([*blocks, *freed[:2], (20 * MIB, "d")]).reserved_nbytes == 40 * MIB


def test_free_segments_are_returned_when_memory_is_short():
    changes = [(20 * MIB, "a"), (-20 * MIB, "a"), (30 * MIB, "b")]
    assert replay_allocations(changes).reserved_nbytes == 50 * MIB
    found = replay_allocations(changes, capacity=40 * MIB)
    assert (found.reserved_nbytes, found.out_at) == (30 * MIB, None)


def test_out_of_memory_is_reported_with_the_request():
    found = replay_allocations([(20 * MIB, "a"), (30 * MIB, "b")], capacity=40 * MIB)
    assert found.out_at == 1


def test_a_hole_counts_as_reserved_only():
    found = replay_allocations([(12 * MIB, "a"), (12 * MIB, "b"), (-12 * MIB, "a"), (14 * MIB, "c")])
    assert (found.requested_nbytes, found.allocated_nbytes, found.reserved_nbytes) == (
        26 * MIB,
        26 * MIB,
        38 * MIB,
    )


@st.composite
def programs(draw):
    """Return allocations and frees in an order in which nothing is freed twice."""
    alive, changes = [], []
    for at in range(draw(st.integers(1, 60))):
        if alive and draw(st.booleans()):
            nbytes, key = alive.pop(draw(st.integers(0, len(alive) - 1)))
            changes.append((-nbytes, key))
        else:
            nbytes = draw(st.integers(1, 3000)) * draw(st.sampled_from([1, 100, KIB, 10 * KIB]))
            alive.append((nbytes, at))
            changes.append((nbytes, at))
    return changes


@pytest.mark.thorough
@settings(max_examples=200, deadline=None)
@given(programs())
def test_reserved_is_at_least_allocated_and_allocated_at_least_requested(changes):
    found = replay_allocations(changes)
    assert found.requested_nbytes <= found.allocated_nbytes <= found.reserved_nbytes
    assert found.reserved_nbytes % (2 * MIB) == 0


@settings(max_examples=100, deadline=None)
@given(programs(), st.integers(1, 64))
def test_a_device_is_never_overdrawn(changes, mib):
    found = replay_allocations(changes, capacity=mib * MIB)
    assert found.reserved_nbytes <= mib * MIB
    unbounded = replay_allocations(changes)
    assert found.out_at is not None or found.requested_nbytes == unbounded.requested_nbytes


@pytest.mark.thorough
@settings(max_examples=100, deadline=None)
@given(programs())
def test_after_all_is_freed_it_can_be_taken_at_once(changes):
    held = {key: nbytes for nbytes, key in changes if nbytes > 0}
    for nbytes, key in changes:
        if nbytes < 0:
            del held[key]
    emptied = [*changes, *((-nbytes, key) for key, nbytes in held.items())]
    before = replay_allocations(emptied)
    after = replay_allocations([*emptied, (512, "one more")])
    small = any(nbytes > 0 and round_size(nbytes) <= MIB for nbytes, _ in changes)
    assert after.reserved_nbytes - before.reserved_nbytes in ((0,) if small else (0, 2 * MIB))
