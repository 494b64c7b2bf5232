"""Runs a hub in real time over an exchange."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.async_dp.hub.hub import Hub
from paceline.async_dp.protocol.frame_sender import FrameSender
from paceline.transport.transport_interface import Exchange

__all__ = ["HubServer"]

_MAX_WAIT_SECONDS = 0.25
_TRAFFIC_SECONDS = 5.0


class HubServer:
    """Passes envelopes between an exchange and a hub; used by one thread."""

    def __init__(self, hub: Hub, exchange: Exchange) -> None:
        self.hub, self.exchange = hub, exchange
        self._sender = FrameSender(exchange, lambda: hub.run, rate=hub.rules.bandwidth)
        self._wait = 0.0
        self._traffic = time.monotonic(), exchange.sent_nbytes, exchange.received_nbytes

    @property
    def queued(self) -> int:
        """Number of messages that wait to be sent, or are partly sent."""
        return self._sender.queued

    def run(self, stop: Callable[[], bool], on_turn: Callable[[], object] = lambda: None) -> None:
        """Serve until `stop` returns True, then write a snapshot; calls both several times per second."""
        while not stop():
            self._turn()
            self._record_traffic()
            on_turn()
        self.hub.snapshot()

    def _record_traffic(self) -> None:
        since, sent, received = self._traffic
        now, exchange = time.monotonic(), self.exchange
        if now - since >= _TRAFFIC_SECONDS:
            self.hub.record_traffic(
                exchange.sent_nbytes - sent, exchange.received_nbytes - received, now - since
            )
            self._traffic = now, exchange.sent_nbytes, exchange.received_nbytes

    def _turn(self) -> None:
        hub, sender = self.hub, self._sender
        envelopes = self.exchange.poll(min(self._wait, _MAX_WAIT_SECONDS))
        now = time.monotonic()
        for envelope in envelopes:
            hub.receive(envelope, now)
        for message in hub.commit(now):
            member = hub.members.get(message.target)
            if member is not None:
                sender.set_rate(member.rate, now, message.target)
            sender.enqueue(message)
        self._wait = sender.pump(now)
        if self._wait < _MAX_WAIT_SECONDS:
            reachable = set(self.exchange.peers())
            for target in sender.targets - reachable:
                sender.forget(target)
