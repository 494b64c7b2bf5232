"""Virtual time: a discrete-event clock, and a star network of timed links between nodes of one process.

Nothing sleeps: `VirtualClock.run` jumps from event to event. Equal events in equal order give bitwise equal results on
any machine.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass

from paceline.transport.envelope import SHORT_NBYTES, Envelope
from paceline.transport.transport_interface import HUB

__all__ = ["WIRE_OVERHEAD", "VirtualClock", "VirtualExchange", "VirtualLink", "VirtualNetwork"]

_HEADER_NBYTES = 200
"""Overhead of an envelope and its packets besides the payload; see `WIRE_OVERHEAD` for long ones."""

_QUEUE_LENGTH = 8  # long envelopes to one target, as in `paceline.transport.zmq`

WIRE_OVERHEAD = 1.045
"""Factor for Ethernet, IP and TCP headers of full 1500-byte frames."""


class VirtualClock:
    """Runs scheduled events in order of time; simultaneous events in the order in which they were scheduled.

    Attributes:
        now: current time in seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., object], tuple[object, ...]]] = []
        self._count, self._stopped = 0, False

    def schedule(self, when: float, callback: Callable[..., object], *args: object) -> None:
        """Call ``callback(*args)`` at a time, or now if that has passed."""
        self._count = count = self._count + 1
        heapq.heappush(self._events, (when if when > self.now else self.now, count, callback, args))

    def run(self, until: float = float("inf")) -> None:
        """Run until no events are left or the time is reached."""
        events, pop = self._events, heapq.heappop
        while events and events[0][0] <= until:
            self.now, _, callback, args = pop(events)
            callback(*args)
        if until < float("inf") and not self._stopped:
            self.now = max(self.now, until)

    def stop(self) -> None:
        """Discard all events scheduled so far, and keep the current time."""
        self._events.clear()
        self._stopped = True


@dataclass(slots=True)
class VirtualLink:
    """Link between a node and the switch.

    Attributes:
        up: bytes per second towards the switch.
        down: bytes per second towards the node.
        latency: seconds to another node.
        up_free: time at which everything sent so far will have left.
        down_free: time at which everything sent so far to the node will have arrived.
        sent_nbytes: bytes sent so far, headers included.
        received_nbytes: bytes received so far, headers included.
    """

    up: float
    down: float
    latency: float = 1e-4
    _: KW_ONLY
    up_free: float = 0.0
    down_free: float = 0.0
    sent_nbytes: float = 0.0
    received_nbytes: float = 0.0


class VirtualNetwork:
    """Star of links around a switch.

    Args:
        clock: of the simulation.
        tamper: maps an envelope in transit to the envelopes that arrive in its place, each with its extra delay in
            seconds: none if it is lost, two if it is duplicated.
        scale: factor for the size of payloads that have a dtype; other payloads count as they are.

    Attributes:
        nodes: the connected exchanges, by number.
        messages: number of envelopes sent so far.
    """

    def __init__(
        self,
        clock: VirtualClock,
        tamper: Callable[[Envelope], list[tuple[float, Envelope]]] | None = None,
        scale: float = 1.0,
    ) -> None:
        self.clock, self.tamper, self.scale = clock, tamper, scale
        self.nodes: dict[int, VirtualExchange] = {}
        self.messages = 0

    def deliver(self, target: int, envelope: Envelope) -> None:
        """Deliver an envelope to the node that has this number now; else it is lost."""
        node = self.nodes.get(target)
        if node is not None:
            node.deliver(envelope)


class VirtualExchange:
    """A node's `Exchange`, connected on construction; it replaces an earlier one of the same number.

    Args:
        me: number of the node.
        network: to connect to.
        link: of the node.
        deliver: called with each received envelope; None: they are queued for `poll`.
    """

    def __init__(
        self,
        me: int,
        network: VirtualNetwork,
        link: VirtualLink,
        deliver: Callable[[Envelope], object] | None = None,
    ) -> None:
        self.me, self.network, self.link = me, network, link
        self.refused: Counter[str] = Counter()
        self.sent_nbytes = self.received_nbytes = 0
        self._received: list[Envelope] = []
        self._queues: dict[int, deque[float]] = {}  # of long envelopes by target: when each arrives
        self.deliver = self._received.append if deliver is None else deliver
        network.nodes[me] = self

    def send(self, envelope: Envelope) -> bool:
        """See `Exchange`; False if the target is not connected, or the queue to it is full."""
        network, target, nbytes = self.network, envelope.header.target, len(envelope.payload)
        receiver = network.nodes.get(target)
        if receiver is None or self.me not in network.nodes:
            return False
        up, down, clock = self.link, receiver.link, network.clock
        size = nbytes * network.scale if envelope.header.dtype else nbytes
        queue = None
        if size > SHORT_NBYTES:
            queue = self._queues.setdefault(target, deque())
            while queue and queue[0] <= clock.now:
                queue.popleft()
            if len(queue) >= _QUEUE_LENGTH:
                return False
        self.sent_nbytes += nbytes
        network.messages += 1
        carried = _HEADER_NBYTES + WIRE_OVERHEAD * size
        up.sent_nbytes += carried
        down.received_nbytes += carried
        begin = up.up_free if up.up_free > clock.now else clock.now
        left = begin + carried / up.up
        # A queue of what is on its way, so that a slow end doesn't delay what others send or receive.
        received = (down.down_free if down.down_free > clock.now else clock.now) + carried / down.down
        end = received if received > left else left
        up.up_free, down.down_free = left, received
        if queue is not None:
            queue.append(end)
        if network.tamper is None:
            clock.schedule(end + up.latency, network.deliver, target, envelope)
        else:
            for delay, each in network.tamper(envelope):
                clock.schedule(end + up.latency + delay, network.deliver, target, each)
        return True

    def poll(self, seconds: float = 0.0) -> list[Envelope]:
        """Return the envelopes received so far; virtual time does not wait."""
        received = self._received.copy()
        self._received.clear()
        self.received_nbytes += sum(len(each.payload) for each in received)
        return received

    def peers(self) -> Collection[int]:
        """Return the connected workers; for a worker the hub, if it is connected."""
        nodes = self.network.nodes
        if self.me != HUB:
            return (HUB,) if HUB in nodes else ()
        return nodes.keys() - {HUB}

    def close(self) -> None:
        """Disconnect; envelopes in transit to this node are lost."""
        if self.network.nodes.get(self.me) is self:
            del self.network.nodes[self.me]
