"""A hub in real time: what comes over the network is given to it, and what it answers is sent."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.async_dp.hub.hub import Hub
from paceline.async_dp.protocol.frame_sender import FrameSender
from paceline.transport.transport_interface import Exchange

__all__ = ["HubServer"]

_LOOK_SECONDS = 0.25
_NOTE_SECONDS = 5.0


class HubServer:
    """Drives a hub over an exchange; used by one thread.

    Args:
        hub: decides. exchange: carries.

    Attributes:
        hub, exchange: as given.
    """

    def __init__(self, hub: Hub, exchange: Exchange) -> None:
        self.hub, self.exchange = hub, exchange
        self._post = FrameSender(exchange, lambda: hub.run, rate=hub.rules.bandwidth)
        self._wait = 0.0
        self._noted = time.monotonic(), exchange.sent_nbytes, exchange.received_nbytes

    def run(self, stop: Callable[[], bool], look: Callable[[], object] = lambda: None) -> None:
        """Serve until `stop` says so; write a snapshot then.

        Args:
            stop: asked several times a second. look: called as often, to show how things are.
        """
        while not stop():
            self.turn()
            self._note()
            look()
        self.hub.snapshot()

    def _note(self) -> None:
        """Have the hub write down what passed, from time to time."""
        since, sent, received = self._noted
        now, exchange = time.monotonic(), self.exchange
        if now - since >= _NOTE_SECONDS:
            self.hub.note_traffic(
                exchange.sent_nbytes - sent, exchange.received_nbytes - received, now - since
            )
            self._noted = now, exchange.sent_nbytes, exchange.received_nbytes

    def turn(self) -> None:
        """Take in what has come, answer, and wait a little if that was nothing."""
        hub, post = self.hub, self._post
        envelopes = self.exchange.poll(min(self._wait, _LOOK_SECONDS))
        now = time.monotonic()
        for envelope in envelopes:
            hub.receive(envelope, now)
        for message in hub.settle(now):
            member = hub.members.get(message.target)
            if member is not None:
                post.limit(member.rate, now, message.target)
            post.put(message)
        self._wait = post.pump(now)
        if self._wait < _LOOK_SECONDS:
            reachable = set(self.exchange.peers())
            for target in post.targets - reachable:
                post.forget(target)
