"""Simulated cost of a schedule: when each message starts and ends on a topology.

A message costs the latency of its path once, then its bytes flow. Messages that share a link share it max-min fairly:
none can get more without one that has less getting even less. A rank is in one round at a time, and enters the next
when everything that it sends and receives in this one is done and added. A message starts when both its ranks are in
its round. Where all links are alike, the result is the closed form (`closed_form`) to the last digit.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.collectives.schedule import Message, Schedule
from paceline.collectives.topology import Link, Topology
from paceline.errors import UsageError

__all__ = ["ScheduleCost", "TimedMessage", "simulate_cost"]

_ROUNDING = 1e-12  # share of a message that may remain by rounding alone


@dataclass(frozen=True)
class TimedMessage:
    """A message and its times.

    Attributes:
        number: its round, from 0.
        message: sender, receiver and chunks.
        nbytes: its size.
        start: seconds since the beginning.
        end: seconds since the beginning, latency included.
    """

    number: int
    message: Message
    nbytes: float
    start: float
    end: float


@dataclass(frozen=True)
class ScheduleCost:
    """Cost of a schedule on a topology.

    Attributes:
        seconds: until the last rank is done, additions included.
        messages: in order of their ends.
        nbytes_of_link: bytes that each link has carried, by name.
        busiest: the link that takes longest for the bytes that it carried; None if no link limits.
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
        """Start of the first message and end of the last one of each round, in seconds."""
        spans: dict[int, tuple[float, float]] = {}
        for timed in self.messages:
            start, end = spans.get(timed.number, (math.inf, 0.0))
            spans[timed.number] = min(start, timed.start), max(end, timed.end)
        return [spans[number] for number in sorted(spans)]


def simulate_cost(schedule: Schedule, topology: Topology, nbytes: float, gamma: float = 0.0) -> ScheduleCost:
    """Return the cost of `schedule` on `topology`.

    Args:
        schedule: the messages.
        topology: the links between its ranks.
        nbytes: size of the vector, as `closed_form` counts it.
        gamma: seconds to add one byte.

    Raises:
        UsageError: different numbers of ranks, or an invalid size.
    """
    if schedule.ranks != topology.ranks:
        raise UsageError(
            f"a schedule for {schedule.ranks} ranks on a {topology.name} of {topology.ranks}",
            remedy="give both the same number of ranks",
        )
    if not 0 <= nbytes < math.inf:
        raise UsageError(f"nbytes={nbytes!r} is not a valid size", remedy="give bytes ≥ 0")
    simulation = _Simulation(schedule, topology, nbytes / schedule.parts, gamma)
    simulation.run()
    carried = [0.0] * len(topology.links)
    for timed in simulation.done:
        for link in topology.path(timed.message.src, timed.message.dst):
            carried[link] += timed.nbytes
    seconds, busiest = max(
        ((nbytes / topology.links[k].bandwidth, k) for k, nbytes in enumerate(carried)), default=(0.0, 0)
    )
    return ScheduleCost(
        simulation.seconds,
        tuple(simulation.done),
        {link.name: nbytes for link, nbytes in zip(topology.links, carried, strict=True)},
        topology.links[busiest] if seconds else None,
    )


@dataclass(eq=False)
class _Flow:
    number: int
    message: Message
    nbytes: float
    remaining: float
    start: float
    path: Sequence[int]
    rate: float = 0.0


class _Simulation:
    """Discrete-event simulation: messages wait for their ranks, then for their latency, then flow."""

    def __init__(self, schedule: Schedule, topology: Topology, chunk_nbytes: float, gamma: float) -> None:
        self._topology, self._chunk_nbytes, self._gamma = topology, chunk_nbytes, gamma
        self._now = self.seconds = 0.0
        self.done: list[TimedMessage] = []
        self._flows: list[_Flow] = []
        self._events: list[
            tuple[float, int, _Flow | int]
        ] = []  # (time, tie-breaker, flow or rank that starts)
        self._scheduled = 0
        ranks = range(schedule.ranks)
        self._messages = [defaultdict[int, list[Message]](list) for _ in ranks]  # per rank and round
        self._open = [defaultdict[int, int](int) for _ in ranks]
        self._added_nbytes = [defaultdict[int, float](float) for _ in ranks]
        for number in range(len(schedule.rounds)):
            for message in schedule.messages(number):
                for rank in (message.src, message.dst):
                    self._messages[rank][number].append(message)
                    self._open[rank][number] += 1
                added = sum(send.width for send in message.sends if send.add) * chunk_nbytes
                self._added_nbytes[message.dst][number] += added
        self._rounds = [iter(sorted(messages)) for messages in self._messages]
        self._round: list[int | None] = [None for _ in ranks]  # that each rank is in

    def run(self) -> None:
        for rank in range(len(self._round)):
            self._enter_next_round(rank)
        while self._events or self._flows:
            self._share_links()
            shortest = min((flow.remaining / flow.rate for flow in self._flows), default=math.inf)
            at = min(self._now + shortest, self._events[0][0] if self._events else math.inf)
            for flow in self._flows:
                flow.remaining = (
                    0.0 if flow.rate == math.inf else flow.remaining - flow.rate * (at - self._now)
                )
            self._now = at
            self._end_flows()
            while self._events and self._events[0][0] <= self._now:
                _, _, started = heapq.heappop(self._events)
                if isinstance(started, _Flow):
                    self._flows.append(started)
                else:
                    self._enter_next_round(started)

    def _enter_next_round(self, rank: int) -> None:
        """Start also the messages whose other rank is in that round already."""
        number = self._round[rank] = next(self._rounds[rank], None)
        if number is None:
            return
        for message in self._messages[rank][number]:
            src, dst = message.src, message.dst
            if self._round[dst if src == rank else src] == number:
                nbytes = message.chunks * self._chunk_nbytes
                flow = _Flow(number, message, nbytes, nbytes, self._now, self._topology.path(src, dst))
                self._schedule(self._now + self._topology.latency(src, dst), flow)

    def _schedule(self, time: float, started: _Flow | int) -> None:
        self._scheduled += 1
        heapq.heappush(self._events, (time, self._scheduled, started))

    def _end_flows(self) -> None:
        """End the messages of which no more remains than rounding, of the clock or of their size, can leave."""
        instant = 2 * math.ulp(self._now)
        ended = [
            flow
            for flow in self._flows
            if flow.remaining <= max(_ROUNDING * flow.nbytes, flow.rate * instant)
        ]
        if not ended:
            return
        self._flows = [flow for flow in self._flows if flow not in ended]
        for flow in ended:
            self.done.append(TimedMessage(flow.number, flow.message, flow.nbytes, flow.start, self._now))
            for rank in (flow.message.src, flow.message.dst):
                self._close_message(rank, flow.number)

    def _close_message(self, rank: int, number: int) -> None:
        """With the last message of its round, the rank adds what it received and enters the next round."""
        self._open[rank][number] -= 1
        if not self._open[rank][number]:
            ready = self._now + self._gamma * self._added_nbytes[rank][number]
            self.seconds = max(self.seconds, ready)
            self._schedule(ready, rank)

    def _share_links(self) -> None:
        """Set the rate of every flow: a fair share of the most crowded link for those on it, then for the rest."""
        free = {k: self._topology.links[k].bandwidth for flow in self._flows for k in flow.path}
        flows_of_link: dict[int, list[_Flow]] = {k: [] for k in free}
        for flow in self._flows:
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
