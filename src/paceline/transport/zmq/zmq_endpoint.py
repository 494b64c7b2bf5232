"""Common part of hub and worker over ZeroMQ: checksums on send, verification and counting on receipt."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import zmq

from paceline.errors import EnvelopeError
from paceline.transport.envelope import (
    ENVELOPE_PARTS,
    Envelope,
    add_checksum,
    check_route,
    decode_parts,
    encode_checksummed,
)
from paceline.transport.transport_interface import payload_to_send
from paceline.transport.zmq.zmq_socket import SocketSettings, WakeupFd, ZmqSocket

__all__ = ["ZmqEndpoint"]

_MESSAGES_PER_POLL, _NBYTES_PER_POLL = 64, 16 << 20


class ZmqEndpoint(ABC):
    """An `Exchange` over one ZeroMQ socket; see `HubExchange` and `WorkerExchange`.

    Args:
        me: own number.
        run: name of the run whose envelopes are accepted; empty: any.
        settings: see `SocketSettings`.
    """

    _socket: ZmqSocket

    def __init__(self, me: int, run: str, settings: SocketSettings) -> None:
        self.me, self.run, self.settings = me, run, settings
        self.refused: Counter[str] = Counter()
        self.sent_nbytes = self.received_nbytes = 0
        self._context: zmq.Context[Any] = zmq.Context()
        self._wakeup = WakeupFd()

    def send(self, envelope: Envelope) -> bool:
        """Send an envelope to ``envelope.header.target``; its checksum is added here.

        A payload of type `bytes` is not copied; any other is, so it may change afterwards.

        Returns:
            whether it was accepted. False: the queue is full or the peer unreachable; it may be passed again later.

        Raises:
            UsageError: another source is given, the payload exceeds a frame, or the header is invalid.
        """
        header, payload = envelope.header, payload_to_send(envelope, self.me, self.settings.frame_nbytes)
        route = self._route(header.target)
        if route is None:
            return False
        parts = encode_checksummed(add_checksum(header, payload), payload)
        try:
            self._socket.send([*route, *parts])
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._on_unreachable(header.target)
            return False
        self.sent_nbytes += sum(map(len, parts))
        return True

    def poll(self, seconds: float = 0.0) -> list[Envelope]:
        """Return the received envelopes in order of arrival; if there are none, wait up to `seconds`.

        Returns early when `wake` is called, or a connection is made or lost. Invalid messages are counted in `refused`.
        """
        deadline = time.monotonic() + seconds
        while True:
            woken = self._wakeup.clear()
            changed = self._handle_events()
            received = self._receive()
            left = deadline - time.monotonic()
            if received or woken or changed or left <= 0:
                return received
            self._socket.wait(min(left, self._max_wait_seconds()))

    def wake(self) -> None:
        """Make the current or next `poll` return; from any thread."""
        self._wakeup.set()

    @abstractmethod
    def peers(self) -> Collection[int]:
        """Return the numbers of the reachable peers, as far as known."""

    def close(self) -> None:
        """Disconnect; accepted envelopes that are not sent within 0.3 s are lost. Closing twice is allowed."""
        if not self._context.closed:
            self._socket.close()
            self._wakeup.close()
            self._context.term()

    def _receive(self) -> list[Envelope]:
        """Return the valid envelopes among the next messages, up to a limit."""
        received: list[Envelope] = []
        nbytes = 0
        for _ in range(_MESSAGES_PER_POLL):
            parts = self._socket.receive(ENVELOPE_PARTS + 2) if nbytes < _NBYTES_PER_POLL else None
            if parts is None:
                break
            nbytes += sum(map(len, parts))
            try:
                envelope = self._decode(parts)
            except EnvelopeError as error:
                self.refused[type(error).__name__] += 1
            else:
                if envelope is not None:
                    received.append(envelope)
        return received

    def _decode_from(self, parts: Sequence[zmq.Frame], source: int | None = None) -> Envelope:
        """Return the envelope in a message from a peer; None: the peer that it names."""
        envelope = decode_parts([part.buffer for part in parts], limit=self.settings.frame_nbytes)
        header = envelope.header
        sender = header.source if source is None else source
        check_route(header, me=self.me, run=self.run, carried_from=sender)
        self.received_nbytes += sum(map(len, parts))
        return envelope

    @abstractmethod
    def _decode(self, parts: Sequence[zmq.Frame]) -> Envelope | None:
        """Return the envelope in a message, None if it is not for the caller of `poll`, or raise EnvelopeError."""

    @abstractmethod
    def _route(self, target: int) -> list[bytes] | None:
        """Return the parts that precede an envelope to `target`, None if it can't be reached."""

    @abstractmethod
    def _on_unreachable(self, target: int) -> None:
        """Record that a peer is not connected."""

    @abstractmethod
    def _handle_events(self) -> bool:
        """Handle monitor events and other work; return whether a connection was made or lost."""

    def _max_wait_seconds(self) -> float:
        """Return the seconds until events have to be handled even if nothing arrives."""
        return float("inf")
