"""Runs a hub over an exchange: in real time, or turn by turn on any clock.

The simulation drives the same turns in virtual time, so queues, back-pressure and pacing are part of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from paceline.async_dp.hub.hub import Hub
from paceline.async_dp.protocol.frame_sender import FrameSender
from paceline.async_dp.protocol.hub_messages import HubMessage
from paceline.async_dp.protocol.message_assembly import FRAME_NBYTES
from paceline.async_dp.standby.standby_link import StandbyLink
from paceline.transport.envelope import Envelope
from paceline.transport.transport_interface import Exchange
from paceline.transport.zmq import HubExchange

__all__ = ["HubServer"]

_MAX_WAIT_SECONDS = 0.25
_ABSENCE_SECONDS = 1.0  # a turn that took longer than this was an absence
_TRAFFIC_SECONDS, _REACHABLE_SECONDS = 5.0, 1.0


class HubServer:
    """Passes envelopes between an exchange and a hub; used by one thread.

    Args:
        hub: what it serves.
        exchange: to its workers.
        link: to a standby; None: the hub has no journal that one could copy.
        frame_nbytes: most bytes per frame.
    """

    def __init__(
        self,
        hub: Hub,
        exchange: Exchange,
        link: StandbyLink | None = None,
        *,
        frame_nbytes: int = FRAME_NBYTES,
    ) -> None:
        self.hub, self.exchange, self._link = hub, exchange, link
        if isinstance(exchange, HubExchange):
            exchange.bind_keys(hub.members.keys)
        self._sender = FrameSender(
            exchange, lambda: hub.run, rate=hub.rules.bandwidth, on_sent=hub.sent, frame_nbytes=frame_nbytes
        )
        self._reachable_at = -math.inf

    @property
    def queued(self) -> int:
        """Number of messages that wait to be sent, or are partly sent."""
        return self._sender.queued

    def run(self, stop: Callable[[], bool], on_turn: Callable[[], object] = lambda: None) -> None:
        """Serve until `stop` returns True, then write a snapshot; calls both several times per second."""
        wait, listened_at = 0.0, time.monotonic()
        traffic_at, sent, received = listened_at, self.exchange.sent_nbytes, self.exchange.received_nbytes
        while not stop():
            envelopes = self.exchange.poll(wait)
            now = time.monotonic()
            absence = now - listened_at - wait
            if absence > _ABSENCE_SECONDS:
                self.hub.add_absence(absence)
            listened_at = now
            wait = min(self.turn(envelopes, now), _MAX_WAIT_SECONDS)
            if now - traffic_at >= _TRAFFIC_SECONDS:
                exchange = self.exchange
                new = exchange.sent_nbytes - sent, exchange.received_nbytes - received
                self.hub.record_traffic(*new, now - traffic_at)
                traffic_at, sent, received = now, exchange.sent_nbytes, exchange.received_nbytes
            on_turn()
        self.hub.snapshot()

    def turn(self, envelopes: Iterable[Envelope], now: float) -> float:
        """Handle what arrived, and send what may be sent.

        Args:
            envelopes: that arrived.
            now: seconds of a monotonic clock.

        Returns:
            seconds until the next turn is due if nothing arrives before; infinity: none.
        """
        hub, sender = self.hub, self._sender
        for envelope in envelopes if self._link is None else self._link.take(envelopes, now):
            hub.receive(envelope, now)
        answers = self._answers(now)
        if hub.reset:  # frames of an earlier session mean nothing to the new one
            for target in hub.reset:
                sender.forget(target)
            hub.reset.clear()
        for message in answers:
            if message.kind == "welcome":
                member = hub.members.get(message.target)
                sender.set_rate(None if member is None else member.rate, now, message.target)
            sender.enqueue(message)
        wait = sender.pump(now)
        while hub.has_answers():  # to those who were sent what they waited for
            for message in self._answers(now):
                sender.enqueue(message)
            wait = sender.pump(now)
        if wait < math.inf and now - self._reachable_at >= _REACHABLE_SECONDS:
            self._reachable_at = now
            for target in sender.targets.difference(self.exchange.peers()):
                sender.forget(target)
                hub.unreachable(target)
        return min(wait, max(0.0, hub.next_due(now) - now))

    def _answers(self, now: float) -> list[HubMessage]:
        """Return what may be sent: all of it is on the hub's disk, and on that of a standby in sync."""
        answers = self.hub.commit(now)
        return answers if self._link is None else self._link.release(answers, now)
