"""Requests for global parameters, and which of them may be answered (pure).

A worker that sends an update says when it will want parameters, so the answer needs no request, and carries the
acknowledgement of the update: two messages a round instead of four.

A worker is sent one packet at a time, and packets in transit share memory: those of one revision are the same bytes.
Where many slow links hold different revisions, and the memory for packets is used up, a worker gets the newest packet
that is in memory anyway and includes its own last update; if there is none, it waits. So no number of slow workers uses
more memory than that, or delays a fast one by more than a packet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from paceline.async_dp.hub.membership import HubMember, HubMembership
from paceline.async_dp.hub.staleness_policy import StalenessPolicy
from paceline.async_dp.hub.update_merging import GlobalParams
from paceline.transport.envelope import Bytes

__all__ = ["FetchAnswer", "FetchQueue", "ParamsPacket"]

_MAX_PACKETS_NBYTES, _MIN_PACKETS = 512 << 20, 4


@dataclass(slots=True)
class ParamsPacket:
    """A packed fragment of the global parameters."""

    fragment: int
    revision: int
    codec: str
    payload: Bytes


Ack = Mapping[str, Any]
"""Metadata of an acknowledgement."""


@dataclass(slots=True)
class FetchAnswer:
    """What a worker is sent: a packet, an acknowledgement, or both."""

    member: HubMember
    fragment: int
    packet: ParamsPacket | None
    ack: Ack | None


class FetchQueue:
    """Requests in the order in which they arrived, and the packets in transit.

    Args:
        members: the workers.
        staleness: decides which workers have to wait for others.
        holds: returns whether a worker has to wait until its own update of a fragment is merged.
        max_nbytes: of the packets in transit; four packets are allowed in any case.

    Attributes:
        held_nbytes: size of the packets in transit.
        released: whether a packet was sent since `pop_ready` while there are requests.
    """

    def __init__(
        self,
        members: HubMembership,
        staleness: StalenessPolicy,
        holds: Callable[[int, int], bool] = lambda worker, fragment: False,
        max_nbytes: int = _MAX_PACKETS_NBYTES,
    ) -> None:
        self._members, self._staleness, self._max_nbytes = members, staleness, max_nbytes
        self._holds = holds
        self._requests: dict[int, dict[int, Ack | None]] = {}  # fragments by worker, and what to acknowledge
        self._planned: dict[int, dict[int, tuple[float, Ack | None]]] = {}  # by worker and fragment
        self._due: list[
            tuple[float, int, int]
        ] = []  # times of planned ones, with worker and fragment; a heap
        self._transits: dict[int, ParamsPacket] = {}  # by worker
        self._packets: dict[int, dict[int, tuple[ParamsPacket, int]]] = {}  # by fragment, revision; uses
        self.held_nbytes = 0
        self.released = False

    def add(self, worker: int, fragment: int) -> None:
        """Add a request; one that is repeated before it was answered has no effect."""
        transit = self._transits.get(worker)
        if transit is None or transit.fragment != fragment:
            self._requests.setdefault(worker, {}).setdefault(fragment, None)

    def plan(self, worker: int, fragment: int, at: float, ack: Ack | None) -> None:
        """Add a request that comes at a time, instead of any before.

        Args:
            worker: that will want parameters.
            fragment: of them.
            at: when, in seconds of the driver's clock.
            ack: acknowledgement that the answer carries; sent alone if the answer has to wait. None: none.
        """
        self._planned.setdefault(worker, {})[fragment] = at, ack
        heappush(self._due, (at, worker, fragment))

    @property
    def next_due(self) -> float:
        """When the next planned request comes; infinity if there is none."""
        due = self._due
        while due:
            at, worker, fragment = due[0]
            planned = self._planned.get(worker)
            found = None if planned is None else planned.get(fragment)
            if found is not None and found[0] == at:
                return at
            heappop(due)  # another has replaced it, or its worker has left
        return math.inf

    def forget(self, worker: int) -> None:
        """Drop what a worker requested, and what was in transit to it: it has left, or a new session."""
        self._requests.pop(worker, None)
        self._planned.pop(worker, None)
        self.sent(worker)

    def sent(self, worker: int) -> None:
        """Record that the packet to a worker is not in transit any more."""
        packet = self._transits.pop(worker, None)
        if packet is None:
            return
        held = self._packets[packet.fragment]
        uses = held[packet.revision][1] - 1
        if uses:
            held[packet.revision] = packet, uses
        else:
            del held[packet.revision]
            self.held_nbytes -= len(packet.payload)
        self.released = bool(self._requests)

    def pop_ready(self, params: GlobalParams, now: float) -> Iterator[FetchAnswer]:
        """Yield every answer that may be given now, and the acknowledgements of those that have to wait.

        Takes O(requests), plus O(workers) where workers have to wait for others.
        """
        self.released, again = False, True
        came = self._take_planned(now) if self._due and self._due[0][0] <= now else []
        while again and self._requests:
            again = False
            oldest = self._oldest_bases(params) if self._staleness.policy == "wait" else {}
            for worker in list(self._requests):
                member = self._members.get(worker)
                if member is None or not member.session_id:
                    self.forget(worker)
                elif worker not in self._transits:
                    answer = self._answer(member, params, oldest)
                    if answer is not None:
                        yield answer
                        first = oldest.get(answer.fragment)
                        again = again or (first is not None and first[1] == worker)  # others waited for it
        for worker, fragment in came:
            member, waiting = self._members.get(worker), self._requests.get(worker, {})
            ack = waiting.get(fragment)
            if member is not None and ack is not None:
                waiting[fragment] = None
                yield FetchAnswer(member, fragment, None, ack)

    def _take_planned(self, now: float) -> list[tuple[int, int]]:
        """Make requests of the planned ones whose time has come; return their workers and fragments."""
        came = []
        while self.next_due <= now:
            _, worker, fragment = heappop(self._due)
            planned = self._planned[worker]
            self._requests.setdefault(worker, {})[fragment] = planned.pop(fragment)[1]
            if not planned:
                del self._planned[worker]
            came.append((worker, fragment))
        return came

    def _answer(
        self, member: HubMember, params: GlobalParams, oldest: dict[int, tuple[float, int, float]]
    ) -> FetchAnswer | None:
        """Begin the answer to a worker's first request that can be answered."""
        fragments = self._requests[member.number]
        for fragment in fragments:
            if self._holds(member.number, fragment):
                continue
            revision = params.fragments[fragment].revision
            if oldest and self._must_wait(member, revision, fragment, oldest[fragment]):
                continue
            packet = self._packet(member, fragment, params)
            if packet is None:
                continue
            ack = fragments.pop(fragment)
            if not fragments:
                del self._requests[member.number]
            member.base[fragment] = packet.revision
            self._transits[member.number] = packet
            held = self._packets.setdefault(fragment, {})
            if packet.revision not in held:
                self.held_nbytes += len(packet.payload)
            held[packet.revision] = packet, held.get(packet.revision, (packet, 0))[1] + 1
            return FetchAnswer(member, fragment, packet, ack)
        return None

    def _packet(self, member: HubMember, fragment: int, params: GlobalParams) -> ParamsPacket | None:
        """Return the newest packet that memory allows; None if a worker has to wait for one."""
        held = self._packets.get(fragment, {})
        revision = params.fragments[fragment].revision
        if revision in held:
            return held[revision][0]
        nbytes = params.down_nbytes(fragment)
        if self.held_nbytes + nbytes <= max(self._max_nbytes, _MIN_PACKETS * nbytes):
            return ParamsPacket(fragment, *params.pack(fragment))
        newest = max(held, default=-1)
        return held[newest][0] if newest >= member.merged.get(fragment, 0) else None

    def _oldest_bases(self, params: GlobalParams) -> dict[int, tuple[float, int, float]]:
        """Return by fragment the oldest revision that a live worker started from, which worker, and the next."""
        found = {}
        for fragment in params.fragments:
            first, owner, second = math.inf, -1, math.inf
            for number in self._members.alive:
                member = self._members.get(number)
                base = None if member is None else member.base.get(fragment)
                if base is None:
                    continue
                if base < first:
                    first, owner, second = base, number, first
                elif base < second:
                    second = base
            found[fragment] = first, owner, second
        return found

    def _must_wait(
        self, member: HubMember, revision: int, fragment: int, oldest: tuple[float, int, float]
    ) -> bool:
        first, owner, second = oldest
        other = second if owner == member.number else first
        if other == math.inf:
            return False
        base = member.base.get(fragment, revision)
        return self._staleness.holds_back(base, (int(other),), revision, len(self._members.alive))
