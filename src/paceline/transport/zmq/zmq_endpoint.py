"""What hub and worker have in common: envelopes go out sealed, and come in checked or counted."""

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
    Bytes,
    Envelope,
    add_checksum,
    check_route,
    decode_parts,
    encode_checksummed,
)
from paceline.transport.transport_interface import payload_to_send
from paceline.transport.zmq.zmq_socket import SocketSettings, WakeupFd, ZmqSocket

__all__ = ["ZmqEndpoint"]

_MESSAGES_A_POLL, _NBYTES_A_POLL = 64, 16 << 20


class ZmqEndpoint(ABC):
    """One end of a star, an `Exchange`; see `HubExchange` and `WorkerExchange`.

    Args:
        me: its number.
        run: whose envelopes it takes; "": any.
        settings: see `SocketSettings`.

    Attributes:
        refused, sent_nbytes, received_nbytes: as of every `Exchange`.
    """

    def __init__(self, me: int, run: str, settings: SocketSettings) -> None:
        self.me, self.run, self.settings = me, run, settings
        self.refused: Counter[str] = Counter()
        self.sent_nbytes = self.received_nbytes = 0
        self._context: zmq.Context[Any] = zmq.Context()
        self._bell = WakeupFd()
        self._socket: ZmqSocket

    def send(self, envelope: Envelope) -> bool:
        """Take an envelope to ``envelope.header.target``; it is sealed here, and may be given again if it is not taken.

        A payload of `bytes` is sent as it lies; any other is copied, so that it may change.

        Returns:
            whether it was taken. False: there is no room for it now, or the peer is not to be reached.

        Raises:
            UsageError: it is another's, its payload is longer than a frame, or its header can't be.
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
            self._gone(header.target)
            return False
        self.sent_nbytes += sum(map(len, parts))
        return True

    def poll(self, seconds: float = 0.0) -> list[Envelope]:
        """Return what has come, in the order in which it came; wait up to `seconds` if that is nothing.

        It returns earlier once somebody has called `wake`, or a connection has come or gone. What can't be delivered
        is counted in `refused`.
        """
        deadline = time.monotonic() + seconds
        while True:
            woken = self._bell.hush()
            changed = self._look()
            came = self._receive()
            left = deadline - time.monotonic()
            if came or woken or changed or left <= 0:
                return came
            self._socket.wait(min(left, self._patience()))

    def wake(self) -> None:
        """Have `poll` return, now or as soon as it is called; from any thread."""
        self._bell.ring()

    @abstractmethod
    def peers(self) -> Collection[int]:
        """Return the numbers of those who can be sent to, as far as that is known."""

    def close(self) -> None:
        """Leave; what was taken and has not left within 0.3 s is lost. Closing twice is closing once."""
        if not self._context.closed:
            self._socket.close()
            self._bell.close()
            self._context.term()

    def _receive(self) -> list[Envelope]:
        """Return what has come and is whole; no more at once than leaves time for the rest."""
        came: list[Envelope] = []
        nbytes = 0
        for _ in range(_MESSAGES_A_POLL):
            parts = self._socket.receive(ENVELOPE_PARTS + 2) if nbytes < _NBYTES_A_POLL else None
            if parts is None:
                break
            nbytes += sum(map(len, parts))
            try:
                came.append(self._opened(parts))
            except EnvelopeError as error:
                self.refused[type(error).__name__] += 1
        return came

    @abstractmethod
    def _opened(self, parts: Sequence[Bytes]) -> Envelope:
        """Return the envelope in a message, or raise an EnvelopeError."""

    def _open(self, parts: Sequence[Bytes], carried_from: int | None) -> Envelope:
        envelope = decode_parts(parts, limit=self.settings.frame_nbytes)
        check_route(envelope.header, me=self.me, run=self.run, carried_from=carried_from)
        self.received_nbytes += sum(map(len, parts))
        return envelope

    @abstractmethod
    def _route(self, target: int) -> list[bytes] | None:
        """Return what goes before an envelope to `target`, None if nothing can go there."""

    @abstractmethod
    def _gone(self, target: int) -> None:
        """Note that a peer is not connected."""

    @abstractmethod
    def _look(self) -> bool:
        """Look at what else there is to see, and return whether a connection has come or gone."""

    def _patience(self) -> float:
        """Return the seconds after which to look again even if nothing comes."""
        return float("inf")
