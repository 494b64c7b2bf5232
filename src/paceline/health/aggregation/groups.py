"""Groups of ranks, and the tree that they form.

Up to 16 ranks are one group. More are grouped by host, at most 16 together. The ranks of a group are connected with one
another. Its lowest living rank leads it: it reports to a group of lower number and receives reports of higher ones.

    group      0             children of group g: 8g + 1 … 8g + 8
             / | \\           its first two ranks are connected with the first two of its parent, so that the
            1  …  8          end of a leader neither cuts off its group nor delays its takeover
           /|\\
          9 … 16

Every report goes to a lower group, or to a lower rank of the same one. So there are no circles, whichever groups a rank
considers as lost. Where a parent is lost, its own parent takes its place; if no group on the way to group 0 can be
reached, those at distances 1, 2, 4, … below are tried, lowest first. A part of the world that is cut off from the rest
forms a tree of its own in this way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

__all__ = ["FULL_MESH", "PeerGroups"]

FULL_MESH = 16
"""Ranks of a group, which are all connected with all."""

FANOUT = 8
"""Groups that report to one."""

_LINKED = 2
"""Ranks of a group that are connected with its parent's from the start."""


class PeerGroups:
    """The groups of a world.

    Args:
        host_keys: of every rank, equal for ranks of one host only.

    Attributes:
        groups: ranks of each, ascending; ordered by their first rank.
        group_of: group of each rank.
        host_keys: of every rank.
        groups_of_host: numbers of the groups with ranks of a host, by its key.

    Example:
        >>> PeerGroups(["a"] * 4).groups, PeerGroups(["a", "b"] * 9).groups
        (((0, 1, 2, 3),), ((0, 2, 4, 6, 8, 10, 12, 14, 16), (1, 3, 5, 7, 9, 11, 13, 15, 17)))
    """

    def __init__(self, host_keys: Sequence[str]) -> None:
        ranks_of: dict[str, list[int]] = {}
        for rank, key in enumerate(host_keys):
            ranks_of.setdefault(key if len(host_keys) > FULL_MESH else "", []).append(rank)
        groups = [part for ranks in ranks_of.values() for part in _split(ranks)]
        self.groups = tuple(sorted(groups))
        self.group_of = [0] * len(host_keys)
        self.host_keys = tuple(host_keys)
        self.groups_of_host: dict[str, list[int]] = {key: [] for key in self.host_keys}
        for number, group in enumerate(self.groups):
            for rank in group:
                self.group_of[rank] = number
            for key in {self.host_keys[rank] for rank in group}:
                self.groups_of_host[key].append(number)

    @cached_property
    def depth(self) -> int:
        """Reports from the deepest group to group 0."""
        return len(list(self.ancestors(len(self.groups) - 1)))

    def mates(self, rank: int) -> tuple[int, ...]:
        """Return the other ranks of the group of `rank`."""
        return tuple(each for each in self.groups[self.group_of[rank]] if each != rank)

    def ancestors(self, group: int) -> Iterator[int]:
        """Yield the groups on the way to group 0, nearest first."""
        while group:
            group = (group - 1) // FANOUT
            yield group

    def fallbacks(self, group: int) -> Iterator[int]:
        """Yield the groups at distances …, 4, 2, 1 below `group`."""
        for power in reversed(range(group.bit_length())):
            yield group - (1 << power)

    def children(self, group: int) -> range:
        """Return the groups whose parent is `group`."""
        first = FANOUT * group + 1
        return range(min(first, len(self.groups)), min(first + FANOUT, len(self.groups)))

    def calls(self, rank: int) -> list[int]:
        """Return the ranks to which `rank` connects at first; the relation has no circles."""
        group = self.group_of[rank]
        lower = [mate for mate in self.mates(rank) if mate < rank]
        if group and len(lower) < _LINKED:
            parent = self.groups[next(self.ancestors(group))]
            lower.append(parent[min(len(lower), len(parent) - 1)])
        return lower

    def peers(self, rank: int) -> list[int]:
        """Return the ranks with which `rank` is connected at first; the relation is symmetric."""
        group = self.group_of[rank]
        callers = [each for child in self.children(group) for each in self.groups[child][:_LINKED]]
        return sorted(
            {*self.mates(rank), *self.calls(rank), *(each for each in callers if rank in self.calls(each))}
        )


def ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Return numbers as [first, last] of each run.

    Example:
        >>> ranges({7, 1, 2, 3})
        [[1, 3], [7, 7]]
    """
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def _split(ranks: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield parts of nearly equal size, none of them larger than a group may be."""
    parts = -(-len(ranks) // FULL_MESH)
    for part in range(parts):
        yield tuple(ranks[len(ranks) * part // parts : len(ranks) * (part + 1) // parts])
