"""The price of a schedule: when each message starts and ends on a topology.

Every message costs the latency of its path once and then flows; messages that meet on a link share it fairly
(max-min: nobody can get more without somebody with less getting even less). A rank is in one round at a time: it
begins the next when all that it sends and receives in this one is done and added. A message begins when both its
ranks are in its round. Where all links are alike this gives the closed forms (`closed_form`) to the last digit.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.collectives.schedule import Message, Schedule
from paceline.collectives.topology import Link, Topology
from paceline.errors import UsageError

__all__ = ["ScheduleCost", "TimedMessage", "cost"]

_ROUNDING = 1e-12  # of a message: what is left of it by rounding alone


@dataclass(frozen=True)
class TimedMessage:
    """A message and when it goes.

    Attributes:
        number: its round, from 0.
        message: who sends what to whom.
        nbytes: its size.
        start, end: seconds since the beginning; latency included.
    """

    number: int
    message: Message
    nbytes: float
    start: float
    end: float


@dataclass(frozen=True)
class ScheduleCost:
    """What a schedule costs.

    Attributes:
        seconds: until the last rank is done, additions included.
        messages: in order of their ends.
        nbytes_of_link: what each link has carried.
        busiest: the link that would need longest for what it carried, None if no link limits.
    """

    seconds: float
    messages: tuple[TimedMessage, ...]
    nbytes_of_link: dict[str, float]
    busiest: Link | None

    @property
    def nbytes(self) -> float:
        """Bytes of all messages together."""
        return sum(timed.nbytes for timed in self.messages)

    @property
    def rounds(self) -> list[tuple[float, float]]:
        """When the first message of each round starts and its last one ends, in seconds."""
        spans: dict[int, tuple[float, float]] = {}
        for timed in self.messages:
            start, end = spans.get(timed.number, (math.inf, 0.0))
            spans[timed.number] = min(start, timed.start), max(end, timed.end)
        return [spans[number] for number in sorted(spans)]


def cost(schedule: Schedule, topology: Topology, nbytes: float, gamma: float = 0.0) -> ScheduleCost:
    """Return what `schedule` costs on `topology`.

    Args:
        schedule: what is sent.
        topology: how its ranks are linked.
        nbytes: size of the vector, as `closed_form` counts it.
        gamma: seconds to add one byte.

    Raises:
        UsageError: they have different numbers of ranks, or a size that is none.
    """
    if schedule.ranks != topology.ranks:
        raise UsageError(
            f"a schedule for {schedule.ranks} ranks on a {topology.name} of {topology.ranks}",
            remedy="give both the same number of ranks",
        )
    if not 0 <= nbytes < math.inf:
        raise UsageError(f"nbytes={nbytes!r} is no size", remedy="give bytes ≥ 0")
    course = _Course(schedule, topology, nbytes / schedule.parts, gamma)
    messages = course.run()
    carried = [0.0] * len(topology.links)
    for timed in messages:
        for link in topology.path(timed.message.src, timed.message.dst):
            carried[link] += timed.nbytes
    seconds, busiest = max(
        (
            (nbytes / link.bandwidth, k)
            for k, (link, nbytes) in enumerate(zip(topology.links, carried, strict=True))
        ),
        default=(0.0, 0),
    )
    return ScheduleCost(
        course.seconds,
        tuple(messages),
        {link.name: nbytes for link, nbytes in zip(topology.links, carried, strict=True)},
        topology.links[busiest] if seconds else None,
    )


@dataclass(eq=False)
class _Flow:
    """A message under way."""

    number: int
    message: Message
    nbytes: float
    left: float
    start: float
    path: Sequence[int]
    rate: float = 0.0


@dataclass
class _Course:
    """The course of events: messages wait for their ranks, then for their latency, then flow."""

    schedule: Schedule
    topology: Topology
    chunk_nbytes: float
    gamma: float
    now: float = 0.0
    seconds: float = 0.0
    _due: list[tuple[float, int, object]] = field(default_factory=list)  # (time, tie breaker, flow or rank)
    _flowing: list[_Flow] = field(default_factory=list)
    _done: list[TimedMessage] = field(default_factory=list)
    _events: int = 0

    def run(self) -> list[TimedMessage]:
        """Return all messages with their times."""
        self._plan()
        for rank in range(self.schedule.ranks):
            self._enter(rank)
        while self._due or self._flowing:
            self._share()
            flowing = min((flow.left / flow.rate for flow in self._flowing), default=math.inf)
            at = min(self.now + flowing, self._due[0][0] if self._due else math.inf)
            for flow in self._flowing:
                flow.left = 0.0 if flow.rate == math.inf else flow.left - flow.rate * (at - self.now)
            self.now = at
            self._end_flows()
            self._serve_due()
        return self._done

    def _plan(self) -> None:
        """List for every rank its rounds, and how many messages and added bytes each has for it."""
        ranks = range(self.schedule.ranks)
        self._waiting = [dict[int, list[Message]]() for _ in ranks]  # of each rank: round → messages of it
        self._open = [dict[int, int]() for _ in ranks]
        self._added = [dict[int, float]() for _ in ranks]
        for number in range(len(self.schedule.rounds)):
            for message in self.schedule.messages(number):
                for rank in (message.src, message.dst):
                    self._waiting[rank].setdefault(number, []).append(message)
                    self._open[rank][number] = self._open[rank].get(number, 0) + 1
                added = sum(send.width for send in message.sends if send.add) * self.chunk_nbytes
                self._added[message.dst][number] = self._added[message.dst].get(number, 0.0) + added
        self._course = [iter(sorted(waiting)) for waiting in self._waiting]
        self._place: list[int | None] = [None for _ in ranks]  # the round that each rank is in

    def _enter(self, rank: int) -> None:
        """Let a rank begin its next round, and with it the messages whose other rank is there already."""
        number = self._place[rank] = next(self._course[rank], None)
        if number is None:
            return
        for message in self._waiting[rank][number]:
            other = message.dst if message.src == rank else message.src
            if self._place[other] == number:
                self._launch(number, message)

    def _launch(self, number: int, message: Message) -> None:
        nbytes = message.chunks * self.chunk_nbytes
        path = self.topology.path(message.src, message.dst)
        flow = _Flow(number, message, nbytes, nbytes, self.now, path)
        self._put(self.now + self.topology.latency(message.src, message.dst), flow)

    def _put(self, time: float, what: object) -> None:
        self._events += 1
        heapq.heappush(self._due, (time, self._events, what))

    def _serve_due(self) -> None:
        while self._due and self._due[0][0] <= self.now:
            _, _, what = heapq.heappop(self._due)
            if isinstance(what, _Flow):
                self._flowing.append(what)
            elif isinstance(what, int):
                self._enter(what)

    def _end_flows(self) -> None:
        """End the messages of which nothing is left, or less than the clock or their size can tell from nothing."""
        instant = 2 * math.ulp(self.now)
        left = [
            flow for flow in self._flowing if flow.left > max(_ROUNDING * flow.nbytes, flow.rate * instant)
        ]
        ended = [flow for flow in self._flowing if flow not in left] if len(left) < len(self._flowing) else []
        self._flowing = left
        for flow in ended:
            self._done.append(TimedMessage(flow.number, flow.message, flow.nbytes, flow.start, self.now))
            for rank in (flow.message.src, flow.message.dst):
                self._close(rank, flow.number)

    def _close(self, rank: int, number: int) -> None:
        """Count a message of a rank's round as done; with the last one it adds, and goes on."""
        self._open[rank][number] -= 1
        if not self._open[rank][number]:
            ready = self.now + self.gamma * self._added[rank].get(number, 0.0)
            self.seconds = max(self.seconds, ready)
            self._put(ready, rank)

    def _share(self) -> None:
        """Set the rate of every flow: the most crowded link's share for those on it, then the rest likewise."""
        free = {k: self.topology.links[k].bandwidth for flow in self._flowing for k in flow.path}
        flows_of_link: dict[int, list[_Flow]] = {k: [] for k in free}
        for flow in self._flowing:
            flow.rate = math.inf
            for link in flow.path:
                flows_of_link[link].append(flow)
        while any(flows_of_link.values()):
            share, tightest = min((free[k] / len(flows), k) for k, flows in flows_of_link.items() if flows)
            if share == math.inf:
                return
            for flow in list(flows_of_link[tightest]):
                flow.rate = share
                for link in flow.path:
                    free[link] -= share
                    flows_of_link[link].remove(flow)
