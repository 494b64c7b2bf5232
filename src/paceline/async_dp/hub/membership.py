"""Whom a hub knows: which workers there are, who is alive, what of each was taken in (pure).

What must outlive the hub, since a repeated update must never count twice, is only the latest round of each worker and
fragment; all else a worker tells anew when it says hello.

Who waits for the centre: all who asked, until they may have it (pure).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.async_dp.hub.update_screening import StalenessPolicy
from paceline.async_dp.protocol.message_assembly import ReplayWindow

__all__ = ["HubMember", "HubMembership", "PendingFetches"]

_SESSIONS = 64


@dataclass(slots=True)
class HubMember:
    """A worker.

    Attributes:
        number: of it. name: for people. session: that it is in, 0 if it has not said hello to this hub.
        heard: when something came of it, in seconds of the hub's clock. joined: when it came first.
        base: revision that it began from last, by fragment.
        rounds: latest round that was judged, by fragment, and why it was refused, empty if it was taken in.
        rate: bytes per second that it wants to be sent at most, None: any.
        every, delay, steps, samples, speed, score, loss: as it told last. staleness: of its last update, in rounds.
        pace: samples a second that it told with its last update, 0 if it told none.
        updates, refused, sent_nbytes, received_nbytes: counts.
    """

    number: int
    name: str = ""
    session: int = 0
    heard: float = -math.inf
    joined: float = 0.0
    base: dict[int, int] = field(default_factory=dict)
    rounds: dict[int, tuple[int, str]] = field(default_factory=dict)
    rate: float | None = None
    every: int = 0
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
    staleness: float = 0.0
    pace: float = 0.0
    window: ReplayWindow = field(default_factory=ReplayWindow)
    sessions: deque[int] = field(default_factory=lambda: deque(maxlen=_SESSIONS))

    def begin(self, session: int) -> bool:
        """Note a hello; return whether its session is a new one."""
        if session == self.session:
            return True
        if session in self.sessions:
            return False
        self.sessions.append(session)
        self.session, self.window = session, ReplayWindow()
        return True


class HubMembership:
    """All workers that a hub knows.

    Args:
        silent_after: seconds without a word after which a worker does not count as alive.
        most: workers that are known at a time; of those that never contributed the one heard of longest ago goes first.
    """

    def __init__(self, silent_after: float = 15.0, most: int = 4096) -> None:
        self.silent_after, self._most = silent_after, most
        self._members: dict[int, HubMember] = {}
        self._alive: set[int] = set()
        self._pace, self._known = 0.0, 0  # of the living: samples a second, and of how many that is known

    def __iter__(self) -> Iterator[HubMember]:
        return iter(self._members.values())

    def get(self, number: int) -> HubMember | None:
        """Return a worker, None if it is not known."""
        return self._members.get(number)

    def admit(self, number: int, now: float) -> HubMember:
        """Return a worker, known from now on; one of the oldest that never contributed may be forgotten for it."""
        member = self._members.get(number)
        if member is None:
            if len(self._members) >= self._most:
                self._forget_one()
            member = self._members[number] = HubMember(number, joined=now)
        return member

    def hear(self, member: HubMember, now: float) -> bool:
        """Note that something came; return whether it was not alive before."""
        if now > member.heard:
            member.heard = now
        if member.number in self._alive:
            return False
        self._alive.add(member.number)
        return True

    def share(self, member: HubMember, pace: float | None) -> float:
        """Return how much a worker's update counts: its part of all samples that the living learn from in a second.

        Where all are equally quick that is 1/N; where all begin from the same centre and send at the same time, updates
        add up to their mean weighted by samples, as in a synchronous step. Who is slow, or was away for long, counts
        less: what it learnt is old. As long as somebody's pace is not known, all count alike.

        Args:
            member: whose update it is. pace: samples a second that it tells.
        """
        self._set_pace(member, float(pace) if pace is not None and 0 < pace < math.inf else 0.0)
        if self._known < len(self._alive) or self._pace <= 0:
            return 1 / max(1, len(self._alive))
        return min(1.0, member.pace / self._pace)

    def _set_pace(self, member: HubMember, pace: float) -> None:
        self._pace += pace - member.pace
        self._known += (pace > 0) - (member.pace > 0)
        member.pace = pace

    def _die(self, number: int) -> None:
        """Count a worker no more."""
        if number in self._alive:
            self._alive.discard(number)
            self._set_pace(self._members[number], 0.0)

    def leave(self, member: HubMember) -> None:
        """Note that a worker left."""
        member.session = 0
        self._die(member.number)

    def fall_silent(self, now: float) -> list[HubMember]:
        """Return the workers that have been silent for too long, which no longer count as alive."""
        gone = [
            self._members[number]
            for number in self._alive
            if now - self._members[number].heard > self.silent_after
        ]
        for member in gone:
            self._die(member.number)
        return gone

    @property
    def alive(self) -> set[int]:
        """Numbers of those that are alive."""
        return self._alive

    def told(self, most: int) -> dict[str, dict[str, float | None]]:
        """Return what the living told of themselves, by number; nothing if they are more than `most`."""
        if len(self._alive) > most:
            return {}
        living = [self._members[number] for number in sorted(self._alive)]
        return {
            str(each.number): {"steps": each.steps, "speed": round(each.speed, 4), "loss": each.loss}
            for each in living
        }

    def _forget_one(self) -> None:
        idle = [each for each in self._members.values() if not each.rounds and each.number not in self._alive]
        candidates = idle or [each for each in self._members.values() if not each.rounds]
        if candidates:
            oldest = min(candidates, key=lambda each: each.heard)
            self._die(oldest.number)
            del self._members[oldest.number]


class PendingFetches:
    """Remembers who asked for which fragment, in the order in which they asked.

    Args:
        members: the workers. staleness: says who has to wait for others.
    """

    def __init__(self, members: HubMembership, staleness: StalenessPolicy) -> None:
        self._members, self._staleness = members, staleness
        self._asked: dict[tuple[int, int], None] = {}

    def ask(self, worker: int, fragment: int) -> None:
        """Note that a worker wants a fragment; asking twice is asking once."""
        self._asked[worker, fragment] = None

    @property
    def waiting(self) -> bool:
        """Whether anybody waits."""
        return bool(self._asked)

    def free(self, revisions: dict[int, int]) -> Iterator[tuple[HubMember, int]]:
        """Yield all who may have the centre now; each has it when the next one is asked for.

        Args:
            revisions: of the centre, by fragment.
        """
        again = True
        while again and self._asked:
            again = False
            for worker, fragment in list(self._asked):
                member = self._members.get(worker)
                if member is None or not member.session:
                    del self._asked[worker, fragment]
                elif not self._holds(member, fragment, revisions[fragment]):
                    del self._asked[worker, fragment]
                    member.base[fragment] = revisions[fragment]
                    again = self._staleness.policy == "wait"  # others may have waited for this one
                    yield member, fragment

    def _holds(self, member: HubMember, fragment: int, revision: int) -> bool:
        if self._staleness.policy != "wait":
            return False
        alive = self._members.alive
        others = [
            each.base[fragment]
            for each in self._members
            if each is not member and each.number in alive and fragment in each.base
        ]
        return self._staleness.holds(member.base.get(fragment, revision), others, revision, len(alive))
