"""Membership of a hub: live workers, merged rounds of each, and pending requests for global parameters (pure).

Only the latest round per worker and fragment must outlive the hub, since a repeated update must never count twice; the
rest a worker reports again when it says hello.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.async_dp.hub.staleness_policy import StalenessPolicy
from paceline.async_dp.protocol.message_assembly import ReplayWindow

__all__ = ["HubCounters", "HubMember", "HubMembership", "PendingFetches", "StalenessHistogram"]

_SESSIONS_KEPT = 64


@dataclass(slots=True, kw_only=True)
class HubMember:
    """A worker; times are of the hub's clock, in seconds."""

    number: int
    name: str = ""
    session_id: int = 0  # 0: it has not said hello to this hub
    last_seen: float = -math.inf
    # By fragment: the revision that it fetched last; its latest round, and why that was refused ("" if it was merged).
    base: dict[int, int] = field(default_factory=dict)
    rounds: dict[int, tuple[int, str]] = field(default_factory=dict)
    rate: float | None = None  # bytes per second that it wants to receive at most; None: no limit
    every: int = 0  # these as reported last
    delay: int = 0
    steps: int = 0
    samples: float = 0.0
    speed: float = 0.0
    score: float | None = None
    loss: float | None = None
    updates: int = 0
    refused: int = 0
    received_nbytes: int = 0
    sent_nbytes: int = 0
    staleness: float = 0.0  # of its last update, in rounds
    throughput: float = 0.0  # samples per second reported with its last update; 0: none
    window: ReplayWindow = field(default_factory=ReplayWindow)
    _sessions: deque[int] = field(default_factory=lambda: deque(maxlen=_SESSIONS_KEPT))

    def start_session(self, session_id: int) -> bool:
        """Record a hello; return False if it is of an earlier session."""
        if session_id == self.session_id:
            return True
        if session_id in self._sessions:
            return False
        self._sessions.append(session_id)
        self.session_id, self.window = session_id, ReplayWindow()
        return True


class StalenessHistogram:
    """Counts of staleness in rounds: bins of equal width up to 2, then wider.

    Example:
        >>> histogram = StalenessHistogram()
        >>> histogram.add(0.3); histogram.add(5.0)
        >>> histogram.rows()
        [(0.0, 0.5, 1), (4.0, 8.0, 1)]
    """

    EDGES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0, 32.0, 64.0, math.inf)

    def __init__(self) -> None:
        self.counts = [0] * (len(self.EDGES) - 1)

    def add(self, staleness: float) -> None:
        """Count an update."""
        self.counts[bisect_right(self.EDGES, staleness, 1, len(self.counts)) - 1] += 1

    def rows(self) -> list[tuple[float, float, int]]:
        """Return (from, below, count) of the bins that are not empty."""
        bins = zip(self.EDGES, self.EDGES[1:], self.counts, strict=False)
        return [(start, stop, count) for start, stop, count in bins if count]


@dataclass
class HubCounters:
    """Totals over all merged updates."""

    updates: int = 0
    samples: float = 0.0
    histogram: StalenessHistogram = field(default_factory=StalenessHistogram)

    def add(self, member: HubMember, samples: float, staleness: float) -> None:
        """Count an update of a worker."""
        self.updates += 1
        self.samples += samples
        self.histogram.add(staleness)
        member.updates += 1
        member.staleness = staleness


class HubMembership:
    """All workers that a hub knows.

    Args:
        silent_after: seconds without a message after which a worker no longer counts as alive.
        limit: number of workers; above it the one that never contributed and was seen longest ago is forgotten.

    Attributes:
        alive: numbers of the live workers.
    """

    def __init__(self, silent_after: float = 15.0, limit: int = 4096) -> None:
        self.silent_after, self._limit = silent_after, limit
        self._members: dict[int, HubMember] = {}
        self.alive: set[int] = set()
        self._total_throughput, self._known_throughputs = 0.0, 0  # of the live workers

    def __iter__(self) -> Iterator[HubMember]:
        return iter(self._members.values())

    def get(self, number: int) -> HubMember | None:
        """Return a worker; None if it is unknown."""
        return self._members.get(number)

    def get_or_add(self, number: int) -> HubMember:
        """Return a worker, which is known from now on."""
        member = self._members.get(number)
        if member is None:
            if len(self._members) >= self._limit:
                self._forget_one()
            member = self._members[number] = HubMember(number=number)
        return member

    def mark_seen(self, member: HubMember, now: float) -> bool:
        """Record a message from a worker; return whether it was not alive before."""
        if now > member.last_seen:
            member.last_seen = now
        if member.number in self.alive:
            return False
        self.alive.add(member.number)
        return True

    def share(self, member: HubMember, throughput: float | None) -> float:
        """Return the weight of a worker's update: its share of the samples per second of all live workers.

        Where all are equally fast that is 1/N; where all start from the same parameters and send at the same time,
        updates add up to their mean weighted by samples, as in a synchronous step. A worker that is slow, or was away
        for long, counts less: what it learnt is old. While any throughput is unknown, all have the same weight.

        Args:
            member: the worker.
            throughput: samples per second that it reports.
        """
        self._set_throughput(
            member, float(throughput) if throughput is not None and 0 < throughput < math.inf else 0.0
        )
        if self._known_throughputs < len(self.alive) or self._total_throughput <= 0:
            return 1 / max(1, len(self.alive))
        return min(1.0, member.throughput / self._total_throughput)

    def _set_throughput(self, member: HubMember, throughput: float) -> None:
        self._total_throughput += throughput - member.throughput
        self._known_throughputs += (throughput > 0) - (member.throughput > 0)
        member.throughput = throughput

    def _mark_dead(self, member: HubMember) -> None:
        if member.number in self.alive:
            self.alive.discard(member.number)
            self._set_throughput(member, 0.0)

    def leave(self, member: HubMember) -> None:
        """Record that a worker left."""
        member.session_id = 0
        self._mark_dead(member)

    def expire(self, now: float) -> list[HubMember]:
        """Return the workers that were silent for too long; they no longer count as alive."""
        alive = [self._members[number] for number in self.alive]
        silent = [member for member in alive if now - member.last_seen > self.silent_after]
        for member in silent:
            self._mark_dead(member)
        return silent

    def summary(self, limit: int) -> dict[str, dict[str, float | None]]:
        """Return the reports of the live workers by number; nothing if they are more than `limit`."""
        if len(self.alive) > limit:
            return {}
        alive = [self._members[number] for number in sorted(self.alive)]
        return {
            str(each.number): {"steps": each.steps, "speed": round(each.speed, 4), "loss": each.loss}
            for each in alive
        }

    def _forget_one(self) -> None:
        idle = [each for each in self._members.values() if not each.rounds and each.number not in self.alive]
        candidates = idle or [each for each in self._members.values() if not each.rounds]
        if candidates:
            oldest = min(candidates, key=lambda each: each.last_seen)
            self._mark_dead(oldest)
            del self._members[oldest.number]


class PendingFetches:
    """Requests for global parameters, in the order in which they arrived.

    Args:
        members: the workers.
        staleness: decides which workers have to wait for others.
    """

    def __init__(self, members: HubMembership, staleness: StalenessPolicy) -> None:
        self._members, self._staleness = members, staleness
        self._requests: dict[tuple[int, int], None] = {}

    def __bool__(self) -> bool:
        return bool(self._requests)

    def add(self, worker: int, fragment: int) -> None:
        """Add a request; a repeated one has no effect."""
        self._requests[worker, fragment] = None

    def pop_ready(self, revisions: dict[int, int]) -> Iterator[tuple[HubMember, int]]:
        """Yield the worker and fragment of every request that may be answered.

        Args:
            revisions: of the global parameters by fragment.
        """
        again = True
        while again and self._requests:
            again = False
            for worker, fragment in list(self._requests):
                member = self._members.get(worker)
                if member is None or not member.session_id:
                    del self._requests[worker, fragment]
                elif not self._must_wait(member, fragment, revisions[fragment]):
                    del self._requests[worker, fragment]
                    member.base[fragment] = revisions[fragment]
                    again = self._staleness.policy == "wait"  # others may have waited for this one
                    yield member, fragment

    def _must_wait(self, member: HubMember, fragment: int, revision: int) -> bool:
        if self._staleness.policy != "wait":
            return False
        alive = self._members.alive
        others = [
            each.base[fragment]
            for each in self._members
            if each is not member and each.number in alive and fragment in each.base
        ]
        return self._staleness.holds_back(member.base.get(fragment, revision), others, revision, len(alive))
