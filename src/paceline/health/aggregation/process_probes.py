"""Finds out whether processes of other groups still listen, where nobody reports about them."""

from __future__ import annotations

from collections.abc import Collection

from paceline.health.aggregation.groups import PeerGroups
from paceline.health.aggregation.parent_search import PeerNetwork
from paceline.health.aggregation.summary import Departures, Summary

__all__ = ["ProcessProbes"]

_GROUPS = 64  # probed in one turn


class ProcessProbes:
    """Probes of one rank.

    Args:
        network: its connections.
        groups: of the world.

    Attributes:
        ended: ranks whose processes have ended, without another report of it.
        gone: ranks of which others reported that.
    """

    def __init__(self, network: PeerNetwork, groups: PeerGroups) -> None:
        self._network, self._groups = network, groups
        self._probed_at: dict[int, float] = {}
        self.ended: set[int] = set()
        self.gone: set[int] = set()

    def probe(self, group: int, besides: Collection[int], now: float) -> None:
        """Probe the ranks of a group, once."""
        if group not in self._probed_at:
            self._probed_at[group] = now
            for rank in self._groups.groups[group]:
                if rank not in besides:
                    self._network.probe(rank)

    def probe_unheard(self, world: Summary, besides: Collection[int], age: float, now: float) -> None:
        """Probe the ranks of groups that were not heard for `age` seconds: they may have left, or be gone."""
        budget = _GROUPS
        for first, last, seconds, *_ in world.unheard:
            for group in range(first, last + 1) if seconds > age else ():
                if budget and group not in self._probed_at:
                    budget -= 1
                    self.probe(group, besides, now)

    def judge(self, refused: Collection[int], left: Departures) -> Departures:
        """Return `left` and the ranks that left too; note in `ended` those that are gone.

        No process listens for the ranks `refused` and for those that were probed without success. Such a rank is gone
        if another rank of its group is, or if nobody has left; else it left with those that did, and they could not
        pass on its announcement.
        """
        known = left.ranks("done") | left.ranks("leaves")
        for rank in self._refused(refused):
            if rank in known or rank in self.ended:
                continue
            group = self._groups.groups[self._groups.group_of[rank]]
            if left == Departures() or not self.gone.isdisjoint(group):
                self.ended.add(rank)
            else:
                alone = ((rank, rank),)
                left = left.merged(Departures(done=alone) if left.done else Departures(leaves=alone))
        return left

    def _refused(self, refused: Collection[int]) -> list[int]:
        found = set(refused)
        for group, at in self._probed_at.items():
            for rank in self._groups.groups[group]:
                failure = self._network.call_failure(rank)
                if failure is not None and failure.kind == "refused" and failure.at >= at:
                    found.add(rank)
        return sorted(found)
