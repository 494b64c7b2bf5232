import pytest

from paceline._core.summation_tree import (
    addition_order,
    check_virtual_ranks,
    leaves_of,
    split_point,
    splits_evenly,
    whole_subtrees,
)
from paceline.errors import UsageError

WORLDS = [(virtual, ranks) for virtual in range(1, 25) for ranks in range(1, virtual + 1)]


def _tree(leaves):
    """The additions of a subtree as nested pairs."""
    if len(leaves) == 1:
        return leaves.start
    middle = split_point(leaves)
    return _tree(range(leaves.start, middle)), _tree(range(middle, leaves.stop))


def _tree_over_ranks(held, virtual, ranks):
    if len(held) == 1:
        return _tree(leaves_of(held.start, ranks, virtual))
    middle = split_point(held)
    halves = range(held.start, middle), range(middle, held.stop)
    return tuple(_tree_over_ranks(half, virtual, ranks) for half in halves)


@pytest.mark.parametrize(("virtual", "ranks"), WORLDS)
def test_every_leaf_has_one_rank_and_no_rank_has_two_more_than_another(virtual, ranks):
    leaves = [leaves_of(rank, ranks, virtual) for rank in range(ranks)]
    assert [leaf for each in leaves for leaf in each] == list(range(virtual))
    assert max(map(len, leaves)) - min(map(len, leaves)) <= 1


@pytest.mark.parametrize(("virtual", "ranks"), WORLDS)
def test_partial_sums_of_any_ranks_add_up_along_the_same_tree(virtual, ranks):
    subtrees = [
        part for rank in range(ranks) for part in whole_subtrees(leaves_of(rank, ranks, virtual), virtual)
    ]
    sums = [_tree(part) for part in subtrees]
    for left, right in addition_order(subtrees, virtual):
        sums[left] = sums[left], sums[right]
    assert sums[0] == _tree(range(virtual))


@pytest.mark.parametrize(("virtual", "ranks"), WORLDS)
def test_evenly_split_ranks_add_as_the_leaves_do(virtual, ranks):
    same = _tree_over_ranks(range(ranks), virtual, ranks) == _tree(range(virtual))
    assert splits_evenly(ranks, virtual) == same
    if same:
        assert all(
            len(whole_subtrees(leaves_of(rank, ranks, virtual), virtual)) == 1 for rank in range(ranks)
        )


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_powers_of_two_send_one_partial_sum_each(ranks):
    for doublings in range(4):
        assert splits_evenly(ranks, ranks << doublings)


@pytest.mark.parametrize("virtual", [0, 3, 2.0, True, "8", None])
def test_too_few_virtual_ranks_are_refused(virtual):
    with pytest.raises(UsageError, match="with 4 ranks"):
        check_virtual_ranks(virtual, 4)
    assert check_virtual_ranks(4, 4) == 4
