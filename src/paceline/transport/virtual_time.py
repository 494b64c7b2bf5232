"""Virtual time: a clock of events, and links between nodes in one process that take as long as they would.

Nothing waits: `VirtualClock.run` goes from event to event. The same events in the same order, whatever the machine: what is
simulated is the same to the bit every time.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from paceline.transport.transport_interface import Envelope

__all__ = ["WIRE_OVERHEAD", "VirtualClock", "VirtualLink", "VirtualNetwork", "VirtualExchange"]

_HEADER_NBYTES = 200
"""Of an envelope and its network packets, beside the payload; long ones have more, see `WIRE_OVERHEAD`."""

WIRE_OVERHEAD = 1.045
"""Ethernet, IP and TCP headers beside full frames of 1500 bytes."""


class VirtualClock:
    """Runs what is to happen, in the order of its time; at the same time, in the order in which it was said.

    Attributes:
        now: seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., object], tuple[object, ...]]] = []
        self._count, self._stopped = 0, False

    def schedule(self, when: float, what: Callable[..., object], *given: object) -> None:
        """Have `what(*given)` happen at a time, or now if that has passed."""
        self._count = count = self._count + 1
        heapq.heappush(self._events, (when if when > self.now else self.now, count, what, given))

    def run(self, until: float = float("inf")) -> None:
        """Go on until there is nothing more to happen, or the time is up."""
        events, pop = self._events, heapq.heappop
        while events and events[0][0] <= until:
            self.now, _, what, given = pop(events)
            what(*given)
        if until < float("inf") and not self._stopped:
            self.now = max(self.now, until)

    def stop(self) -> None:
        """Let nothing of what was to happen until now happen any more, and no time pass."""
        self._events.clear()
        self._stopped = True


@dataclass(slots=True)
class VirtualLink:
    """What connects a node to the switch.

    Attributes:
        up, down: bytes per second. latency: seconds to another node.
        up_free, down_free: when what is on its way will have passed.
        sent_nbytes, received_nbytes: over the link so far, headers included.
    """

    up: float
    down: float
    latency: float = 1e-4
    up_free: float = 0.0
    down_free: float = 0.0
    sent_nbytes: float = 0.0
    received_nbytes: float = 0.0


class VirtualNetwork:
    """A star of links around a switch.

    Args:
        clock: of all.
        scale: numbers in messages are as long as so many; other payloads are as long as they are.
        spoil: looks at every envelope under way and returns those that arrive in its place, with the seconds by which
            each is later: none if it is lost, two if it is repeated.

    Attributes:
        doors: of all who are there, by number. messages: that were sent so far.
    """

    def __init__(
        self,
        clock: VirtualClock,
        spoil: Callable[[Envelope], list[tuple[float, Envelope]]] | None = None,
        scale: float = 1.0,
    ) -> None:
        self.clock, self.spoil, self.scale = clock, spoil, scale
        self.doors: dict[int, VirtualExchange] = {}
        self.messages = 0

    def arrive(self, target: int, envelope: Envelope) -> None:
        """Have an envelope come to who is there now; it is lost if nobody is."""
        door = self.doors.get(target)
        if door is not None:
            door.deliver(envelope)


class VirtualExchange:
    """A node's door to the network, open from now on; another one of the same number is in its place.

    Args:
        me: number of the node. network: that it is in. link: to the network.
        deliver: called with what comes; None: it waits until it is polled.
    """

    def __init__(
        self, me: int, network: VirtualNetwork, link: VirtualLink, deliver: Callable[[Envelope], object] | None = None
    ) -> None:
        self.me, self.network, self.link = me, network, link
        self.refused: Counter[str] = Counter()
        self.sent_nbytes = self.received_nbytes = 0
        self._came: list[Envelope] = []
        self.deliver = self._came.append if deliver is None else deliver
        network.doors[me] = self

    def send(self, envelope: Envelope) -> bool:
        """See `Exchange`; it is refused where the target is not there."""
        network, target, nbytes = self.network, envelope.header.target, len(envelope.payload)
        door = network.doors.get(target)
        if door is None or self.me not in network.doors:
            return False
        self.sent_nbytes += nbytes
        network.messages += 1
        mine, its, clock = self.link, door.link, network.clock
        carried = _HEADER_NBYTES + WIRE_OVERHEAD * (nbytes * network.scale if envelope.header.dtype else nbytes)
        mine.sent_nbytes += carried
        its.received_nbytes += carried
        begin = mine.up_free if mine.up_free > clock.now else clock.now
        left = begin + carried / mine.up
        end = (its.down_free if its.down_free > begin else begin) + carried / its.down
        end = end if end > left else left
        mine.up_free, its.down_free = left, end  # a slow receiver doesn't hold up what goes to others
        if network.spoil is None:
            clock.schedule(end + mine.latency, network.arrive, target, envelope)
        else:
            for later, each in network.spoil(envelope):
                clock.schedule(end + mine.latency + later, network.arrive, target, each)
        return True

    def poll(self, seconds: float = 0.0) -> list[Envelope]:
        """Return what has come until now; virtual time does not wait."""
        came = self._came.copy()
        self._came.clear()
        self.received_nbytes += sum(len(each.payload) for each in came)
        return came

    def peers(self) -> Collection[int]:
        """Return all others that are there."""
        return [node for node in self.network.doors if node != self.me]

    def close(self) -> None:
        """Leave the network: what is under way to here is lost."""
        if self.network.doors.get(self.me) is self:
            del self.network.doors[self.me]
