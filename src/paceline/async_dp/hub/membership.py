"""Membership of a hub: live workers, their share of the training, and the merged rounds of each (pure).

What decides the weight of updates outlives the hub: which workers are alive and how fast each is. So does the latest
round per worker and fragment, since a repeated update must never count twice; the rest a worker reports again when it
says hello. All of it is a function of the journal's records.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.async_dp.protocol.hub_messages import meta_count, meta_number
from paceline.async_dp.protocol.message_assembly import ReplayWindow

__all__ = ["HubCounters", "HubMember", "HubMembership", "Rounds", "StalenessHistogram"]

log = logging.getLogger("paceline.async_dp")

_SESSIONS_KEPT = 64
_MAX_THROUGHPUT_RATIO = 16  # to the median; what a worker reports beyond that is not credited
_THROUGHPUT_UNIT, _MAX_THROUGHPUT = 1e-6, 1e15  # samples per second
_DEPARTED_KEPT = 1 << 16
_MAX_FIRST_ROUND, _MAX_ROUNDS_SKIPPED = 1 << 40, 1 << 20

Rounds = dict[int, tuple[int, str]]
"""Latest round of each fragment, and why it was refused; empty if it was merged."""


@dataclass(slots=True, kw_only=True)
class HubMember:
    """A worker; times are of the hub's clock, in seconds."""

    number: int
    name: str = ""
    key: str = ""  # public key that owns its number; empty: none
    session_id: int = 0  # 0: it has not said hello to this hub
    last_seen: float = -math.inf
    # By fragment: the revision that it fetched last; its latest round, and why that was refused ("" if it was merged).
    base: dict[int, int] = field(default_factory=dict)
    rounds: Rounds = field(default_factory=dict)
    merged: dict[int, int] = field(default_factory=dict)  # by fragment: revision that its last update led to
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
    throughput: int = 0  # millionths of a sample per second, reported with its last update; 0: unknown
    window: ReplayWindow = field(default_factory=ReplayWindow)
    _sessions: deque[int] = field(default_factory=lambda: deque(maxlen=_SESSIONS_KEPT))

    def report(self, meta: Mapping[str, Any]) -> None:
        """Store what a heartbeat reports."""
        self.every = meta_count(meta, "every", self.every)
        self.delay = meta_count(meta, "delay", self.delay)
        self.steps = meta_count(meta, "steps")
        self.samples = float(meta_number(meta, "samples") or 0.0)
        self.speed = float(meta_number(meta, "speed") or 0.0)
        loss = meta_number(meta, "loss")
        self.loss = self.loss if loss is None else float(loss)

    def start_session(self, session_id: int) -> bool:
        """Record a hello; return False if it is of an earlier session."""
        if session_id == self.session_id:
            return True
        if session_id in self._sessions:
            return False
        self._sessions.append(session_id)
        self.session_id, self.window = session_id, ReplayWindow()
        return True

    def terms(self) -> dict[str, Any]:
        """Return what the journal records when it joins."""
        return {"name": self.name, "every": self.every, "delay": self.delay, "key": self.key}

    def unexpected_round(self, fragment: int, round: int) -> tuple[str, str] | None:
        """Return why the update of a round is not merged, None if it may be: in short, and for the worker."""
        latest, why = self.rounds.get(fragment, (-1, ""))
        if round == latest:
            return "repeated", why
        if round < latest:  # no answer to this is awaited, unless the worker's rounds start anew
            return "repeated", f"superseded: the hub has round {latest} of this worker"
        if round > (
            _MAX_FIRST_ROUND if latest < 0 else latest + _MAX_ROUNDS_SKIPPED
        ):  # later ones would be repeated
            self.refused += 1
            return "implausible round", f"implausible round: {round} after {latest}"
        return None


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
        limit: number of workers that are known in full; above it, of one that is gone only its rounds are kept, and one
            that never contributed is forgotten.

    Attributes:
        limit: as given.
        alive: numbers of the live workers.
    """

    def __init__(self, silent_after: float = 15.0, limit: int = 4096) -> None:
        self.silent_after, self.limit = silent_after, limit
        self._members: OrderedDict[int, HubMember] = OrderedDict()  # the one seen last at the end, roughly
        self._departed: OrderedDict[int, Rounds] = OrderedDict()
        self._departed_keys: dict[int, str] = {}
        self.alive: set[int] = set()
        self._order: list[int] = []  # the live ones
        self._throughputs: list[int] = []  # that are known, of the live ones, in order
        self._total_throughput = 0  # of these

    def __iter__(self) -> Iterator[HubMember]:
        return iter(self._members.values())

    def get(self, number: int) -> HubMember | None:
        """Return a worker; None if it is unknown."""
        return self._members.get(number)

    def get_or_add(self, number: int) -> HubMember:
        """Return a worker, which is known from now on."""
        member = self._members.get(number)
        if member is None:
            if len(self._members) >= self.limit:
                self._forget_one()
            member = self._members[number] = HubMember(number=number)
            member.rounds = self._departed.pop(number, {})
            member.key = self._departed_keys.pop(number, "")
        return member

    @property
    def keys(self) -> dict[int, str]:
        """Public keys that own worker numbers, by number."""
        present = {member.number: member.key for member in self if member.key}
        return {**self._departed_keys, **present}

    @property
    def departed(self) -> dict[int, Rounds]:
        """Rounds of the workers that are not known in full any more."""
        return dict(self._departed)

    def restore_departed(self, departed: dict[int, Rounds], keys: dict[int, str]) -> None:
        """Restore what `departed` returned, and their keys."""
        self._departed, self._departed_keys = OrderedDict(departed), keys

    # ------------------------------------------------------------------ who is alive

    def keep_alive(self, number: int, now: float) -> None:
        """Record that a live worker sent something that the hub could not take in."""
        if number in self.alive:
            self._members[number].last_seen = now

    def mark_seen(self, member: HubMember, now: float) -> None:
        """Record a message from a worker."""
        if now > member.last_seen:
            member.last_seen = now
        self.mark_alive(member)

    def mark_alive(self, member: HubMember) -> None:
        """Count a worker as alive."""
        if member.number not in self.alive:
            self.alive.add(member.number)
            insort(self._order, member.number)
            self._members.move_to_end(member.number)
            self._count_throughput(member.throughput, 1)

    def mark_dead(self, member: HubMember) -> None:
        """Count a worker as gone."""
        if member.number in self.alive:
            self.alive.discard(member.number)
            del self._order[bisect_left(self._order, member.number)]
            self._count_throughput(member.throughput, -1)
        member.throughput = 0

    def slot(self, member: HubMember) -> int:
        """Return the position of a worker among the live ones, from 0."""
        return bisect_left(self._order, member.number)

    def leave(self, member: HubMember) -> None:
        """Record that a worker left."""
        member.session_id = 0
        self.mark_dead(member)

    def silent(self, now: float) -> list[HubMember]:
        """Return the live workers that were silent for too long."""
        silent = []
        for number in self._order:
            member = self._members[number]
            if member.last_seen == -math.inf:  # recovered from the journal: it has the full time to return
                member.last_seen = now
            elif now - member.last_seen > self.silent_after:
                silent.append(member)
        return silent

    def add_absence(self, seconds: float) -> None:
        """Discount a time in which the hub itself did not listen: nobody was silent in it."""
        for number in self._order:
            self._members[number].last_seen += seconds

    def summary(self, limit: int) -> dict[str, dict[str, float | None]]:
        """Return the reports of the live workers by number; nothing if they are more than `limit`."""
        if len(self.alive) > limit:
            return {}
        alive = [self._members[number] for number in self._order]
        return {
            str(each.number): {"steps": each.steps, "speed": round(each.speed, 4), "loss": each.loss}
            for each in alive
        }

    def _forget_one(self) -> None:
        """Keep only the rounds of a worker that is gone, or forget one that never contributed."""
        members = self._members
        gone = (each for each in members if each not in self.alive)
        idle = (number for number, each in members.items() if not each.rounds)
        number = next(gone, None) or next(idle, None)
        if number is None:
            return
        self.mark_dead(members[number])
        member = members.pop(number)
        if member.rounds:
            self._departed[number] = member.rounds
            if member.key:
                self._departed_keys[number] = member.key
        if len(self._departed) > _DEPARTED_KEPT:
            gone, _ = self._departed.popitem(last=False)
            self._departed_keys.pop(gone, None)
            log.warning("worker %d is forgotten: %d others left after it", gone, _DEPARTED_KEPT)

    # ------------------------------------------------------------------ their share

    def report_throughput(self, member: HubMember, throughput: float | None) -> None:
        """Record the samples per second that a worker reports; None: unknown."""
        known = throughput is not None and 0 < throughput < math.inf
        value = round(min(throughput, _MAX_THROUGHPUT) / _THROUGHPUT_UNIT) if known and throughput else 0
        if member.number in self.alive:
            self._count_throughput(member.throughput, -1)
            self._count_throughput(value, 1)
        member.throughput = value

    def share(self, member: HubMember) -> float:
        """Return the weight of a worker's update: its share of the samples per second of all live workers.

        Where all are equally fast that is 1/N; where all start from the same parameters and send at the same time,
        updates add up to their mean weighted by samples, as in a synchronous step. A worker that is slow, or was away
        for long, counts less: what it learnt is old. While any throughput is unknown, all have the same weight.

        Reports are bounded: nobody is credited with more than 16 times the median.
        """
        known = self._throughputs
        if len(known) < len(self.alive) or not known or member.number not in self.alive:
            return 1 / max(1, len(self.alive))
        most = _MAX_THROUGHPUT_RATIO * known[(len(known) - 1) // 2]
        total, above = self._total_throughput, len(known) - 1
        while known[above] > most:
            total -= known[above] - most
            above -= 1
        return min(member.throughput, most) / total

    def _count_throughput(self, value: int, change: int) -> None:
        if not value:
            return
        self._total_throughput += change * value  # integers, so the order of reports leaves no trace
        if change > 0:
            insort(self._throughputs, value)
        else:
            del self._throughputs[bisect_left(self._throughputs, value)]
