"""Finds the rank to which a rank reports: its group's leader, or for a leader a rank of a lower group."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from paceline.health.aggregation.groups import PeerGroups
from paceline.health.peer_endpoint import PeerEndpoint

__all__ = ["Failure", "Link", "ParentSearch", "PeerNetwork"]

_LEAD_SECONDS = 1.5  # of silence, after which the next rank of a group leads it
_PARENT_SECONDS = 2.5  # without the world's summary, after which a parent counts as lost
_CALL_SECONDS = 1.0  # for a call, before its host counts as unreachable
_STAGGER_SECONDS = 0.3  # between the calls of two candidates
_AVOID_SECONDS = 10.0  # before a candidate that failed is tried again
_MOST_CALLS = 6  # at the same time


class Link(Protocol):
    """A connection, see `PeerLink`."""

    state: str
    since: float


class Failure(Protocol):
    """A failed call, see `CallFailure`."""

    @property
    def kind(self) -> str:
        """How it failed."""
        ...

    @property
    def at(self) -> float:
        """When."""
        ...


class PeerNetwork(Protocol):
    """What reports need of the connections, see `PeerMesh`."""

    @property
    def own(self) -> PeerEndpoint:
        """This rank."""
        ...

    @property
    def endpoints(self) -> Sequence[PeerEndpoint]:
        """All ranks."""
        ...

    @property
    def links(self) -> Mapping[int, Link]:
        """Connections by rank."""
        ...

    @property
    def changes(self) -> int:
        """How often a connection was made or ended, or a call failed."""
        ...

    def now(self) -> float:
        """Return the time in seconds."""
        ...

    def call(self, rank: int) -> None:
        """Start to connect to a rank."""
        ...

    def probe(self, rank: int) -> None:
        """Start to find out whether a process listens."""
        ...

    def call_failure(self, rank: int) -> Failure | None:
        """Return how the latest call or probe failed."""
        ...

    def discard_dump(self, rank: int) -> None:
        """Discard the stacks of a rank that runs again."""
        ...

    def unanswered(self, rank: int) -> float:
        """Return the seconds since the host of a rank acknowledged bytes."""
        ...

    def send(
        self,
        message: dict[str, Any],
        *,
        to: Collection[int] | None = None,
        besides: int | None = None,
        droppable: bool = False,
    ) -> None:
        """Send to some ranks, or to all that are connected."""
        ...


class ParentSearch:
    """The parent of one rank.

    Args:
        network: its connections.
        groups: of the world.

    Attributes:
        leads: whether this rank leads its group.
        parent: the rank that it reports to; None: it reports to none, as the first rank of the world does, or as long
            as none is found.
        heard_at: when the parent was last heard.
        refused: ranks whose hosts said that no process listens there.
    """

    def __init__(self, network: PeerNetwork, groups: PeerGroups) -> None:
        self._network, self._groups = network, groups
        self._own = network.own.rank
        self._group = groups.group_of[self._own]
        self._mates = groups.groups[self._group]
        self.leads = self._own == self._mates[0]
        self.parent: int | None = None if self.leads else self._mates[0]
        self.heard_at = network.now()
        self.refused: set[int] = set()
        self._called_at: dict[int, float] = {}
        self._avoid_until: dict[int, float] = {}

    def heard(self, now: float) -> None:
        """Note that the parent sent the world's summary."""
        self.heard_at = now

    def update(self, silent: Callable[[int], float], left: Collection[int], now: float) -> None:
        """Choose the parent.

        Args:
            silent: returns the seconds since a rank of the own group was heard.
            left: ranks that left.
            now: as `PeerNetwork.now`.
        """
        leader = next(
            rank
            for rank in self._mates
            if rank == self._own
            or (rank not in left and self._is_open(rank) and silent(rank) <= _LEAD_SECONDS)
        )
        self.leads = leader == self._own
        if not self.leads:
            self.parent = leader
            self._called_at.clear()
            return
        if self.parent in self._mates:
            self.parent = None
        if self.parent is not None:
            lost = not self._is_open(self.parent) or self.parent in left
            if not lost and now - self.heard_at <= _PARENT_SECONDS:
                return
            self._avoid_until[self.parent] = now + _AVOID_SECONDS
            self.parent = None
        if self._group:
            self._search(left, now)

    def _is_open(self, rank: int) -> bool:
        link = self._network.links.get(rank)
        return link is not None and link.state == "open"

    # ------------------------------------------------------------------ searching

    def _search(self, left: Collection[int], now: float) -> None:
        """Call candidates, one after another while those before do not answer; adopt the first that is connected."""
        calls = 0
        for rank in self._candidates(left, now):
            if self._is_open(rank):
                self.parent, self.heard_at = rank, now
                self._called_at.clear()
                return
            called_at = self._called_at.get(rank)
            if called_at is None:
                self._called_at[rank] = now
                self._network.call(rank)
                called_at = now
            failure = self._network.call_failure(rank)
            if failure is not None and failure.at >= called_at:
                self._give_up(rank, failure.kind, now)
                continue
            if now - called_at > _CALL_SECONDS:
                self._give_up(rank, "unanswered", now)
                continue
            calls += 1
            if calls == _MOST_CALLS or now - called_at < _STAGGER_SECONDS:
                return

    def _give_up(self, rank: int, kind: str, now: float) -> None:
        self._called_at.pop(rank, None)
        if kind == "refused":
            self.refused.add(rank)
        group = self._groups.groups[self._groups.group_of[rank]]
        for each in group if kind == "unanswered" else (rank,):
            self._avoid_until[each] = now + _AVOID_SECONDS

    def _candidates(self, left: Collection[int], now: float) -> Iterator[int]:
        """Yield the ranks that may be the parent, best first."""
        ancestors = list(self._groups.ancestors(self._group))
        fallbacks = (group for group in self._groups.fallbacks(self._group) if group not in ancestors)
        for group in (*ancestors, *fallbacks):
            ranks = [
                rank
                for rank in self._groups.groups[group]
                if rank not in left and rank not in self.refused and self._avoid_until.get(rank, 0.0) <= now
            ]
            yield from sorted(ranks, key=lambda rank: not self._is_open(rank))
