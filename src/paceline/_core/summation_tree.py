"""The binary tree along which the gradients of virtual ranks are summed, and who holds which part of it.

Floating-point sums depend on their order. The leaves of one tree over V virtual ranks are therefore always added in
the same pairs, however many ranks compute them: a range of leaves is split behind the largest power of two that is
smaller than its length.

    V = 6         [0 … 5]
                 /       \\
            [0 … 3]     [4 5]
             /    \\      /  \\
          [0 1]  [2 3]  4    5

A rank computes consecutive leaves. What it holds of the tree are *whole subtrees*: it sends one partial sum for each.
If V / N is a power of two, every rank holds one, and the tree over the ranks continues above them.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import UsageError

__all__ = [
    "addition_order",
    "are_siblings",
    "check_virtual_ranks",
    "leaves_of",
    "split_point",
    "splits_evenly",
    "whole_subtrees",
]


def check_virtual_ranks(virtual_ranks: object, ranks: int, *, rank: int | None = None) -> int:
    """Return a number of virtual ranks that `ranks` real ranks can compute.

    Raises:
        UsageError: it is no whole number of at least `ranks`.
    """
    if not isinstance(virtual_ranks, int) or isinstance(virtual_ranks, bool) or virtual_ranks < ranks:
        raise UsageError(
            f"virtual_ranks={virtual_ranks!r} with {ranks} ranks",
            rank=rank,
            remedy=f"pass a whole number of {ranks} or more, the same in every run whose result shall be the same; "
            "or start fewer ranks",
        )
    return virtual_ranks


def leaves_of(rank: int, ranks: int, virtual_ranks: int) -> range:
    """Return the virtual ranks that a rank computes: consecutive, and the first ranks have one more.

    Example:
        >>> [leaves_of(rank, 3, 8) for rank in range(3)]
        [range(0, 3), range(3, 6), range(6, 8)]
    """
    each, more = divmod(virtual_ranks, ranks)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def split_point(leaves: range) -> int:
    """Return the first leaf of the right half of a subtree with at least two leaves.

    Example:
        >>> split_point(range(6)), split_point(range(4, 6))
        (4, 5)
    """
    return leaves.start + (1 << (len(leaves) - 1).bit_length() - 1)


def whole_subtrees(leaves: range, virtual_ranks: int) -> list[range]:
    """Return the largest subtrees of which a rank with consecutive `leaves` has every leaf, from left to right.

    Example:
        >>> whole_subtrees(range(3, 6), 8)
        [range(3, 4), range(4, 6)]
    """
    found: list[range] = []
    upcoming = [range(virtual_ranks)]
    while upcoming:
        node = upcoming.pop()
        if node.stop <= leaves.start or node.start >= leaves.stop:
            continue
        if leaves.start <= node.start and node.stop <= leaves.stop:
            found.append(node)
            continue
        middle = split_point(node)
        upcoming += [range(middle, node.stop), range(node.start, middle)]
    return found


def addition_order(subtrees: Sequence[range], virtual_ranks: int) -> list[tuple[int, int]]:
    """Return the additions (i, j) that sum subtrees: add number j to number i, which then stands for both.

    Args:
        subtrees: disjoint, from left to right; together a range of leaves.
        virtual_ranks: leaves of the whole tree.

    Returns:
        All additions inside the range: if it is a subtree, number 0 is its sum in the end.

    Example:
        >>> addition_order([range(0, 2), range(2, 3), range(3, 4)], 4)
        [(1, 2), (0, 1)]
    """
    additions: list[tuple[int, int]] = []
    stack: list[tuple[int, range]] = []
    for index, subtree in enumerate(subtrees):
        stack.append((index, subtree))
        while len(stack) > 1 and are_siblings(stack[-2][1], stack[-1][1], virtual_ranks):
            right, (left, lower) = stack.pop(), stack.pop()
            additions.append((left, right[0]))
            stack.append((left, range(lower.start, right[1].stop)))
    return additions


def are_siblings(left: range, right: range, virtual_ranks: int) -> bool:
    """Return whether two adjacent subtrees are the halves of one.

    Example:
        >>> are_siblings(range(0, 1), range(1, 2), 4), are_siblings(range(1, 2), range(2, 3), 4)
        (True, False)
    """
    node = range(virtual_ranks)
    while len(node) > 1:
        middle = split_point(node)
        if (node.start, middle, node.stop) == (left.start, right.start, right.stop):
            return left.stop == middle
        node = range(node.start, middle) if right.stop <= middle else range(middle, node.stop)
    return False


def splits_evenly(ranks: int, virtual_ranks: int) -> bool:
    """Return whether every rank holds one subtree, and the tree over the ranks continues above those.

    Example:
        >>> [ranks for ranks in range(1, 13) if splits_evenly(ranks, 12)]
        [1, 3, 6, 8, 12]
    """
    upcoming = [(range(ranks), range(virtual_ranks))]
    while upcoming:
        held, leaves = upcoming.pop()
        if len(held) == 1:
            continue
        middle, boundary = split_point(held), split_point(leaves)
        if leaves_of(middle, ranks, virtual_ranks).start != boundary:
            return False
        upcoming += [
            (range(held.start, middle), range(leaves.start, boundary)),
            (range(middle, held.stop), range(boundary, leaves.stop)),
        ]
    return True
