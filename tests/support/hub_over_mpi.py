"""`Exchange` over non-blocking MPI calls: each envelope is one message between ranks; the hub is rank 0.

Isend, Improbe, Irecv and Test never wait for another rank. A long message is sent only when its target posts a receive,
so at the end every rank has to `close` while the others still poll.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from threading import Event

from paceline.errors import DamagedEnvelope, EnvelopeError, UsageError
from paceline.transport.envelope import (
    HEAD_LIMIT_NBYTES,
    TAIL_NBYTES,
    Envelope,
    add_checksum,
    check_route,
    decode_envelope,
    encode_checksummed,
)
from paceline.transport.message_frames import FRAME_NBYTES
from paceline.transport.mpi_exchange.message_carrier import (
    ABANDONED_BUFFERS,
    MessageCarrier,
    MessageTag,
    PendingRequest,
)
from paceline.transport.transport_interface import HUB, payload_to_send

__all__ = ["MpiExchange"]

_MIN_SLEEP_SECONDS, _MAX_SLEEP_SECONDS = 50e-6, 2e-3
_MESSAGES_PER_POLL = 64


class MpiExchange:
    """`Exchange` between ranks; a rank's number is its rank.

    Args:
        carrier: of the messages.
        run: name of the run whose envelopes are accepted; empty: any.
        frame_nbytes: maximum size of a payload.
        queue_length: maximum number of pending envelopes per target.

    Raises:
        UsageError: a number is not positive.
    """

    def __init__(
        self, carrier: MessageCarrier, run: str, *, frame_nbytes: int = FRAME_NBYTES, queue_length: int = 8
    ) -> None:
        for name, value in (("frame_nbytes", frame_nbytes), ("queue_length", queue_length)):
            if value < 1:
                raise UsageError(f"{name}={value!r} is not positive", remedy=f"give {name} > 0")
        self.me, self.run = carrier.rank, run
        self.refused: Counter[str] = Counter()
        self.sent_nbytes = self.received_nbytes = 0
        self._carrier, self._frame_nbytes, self._queue_length = carrier, frame_nbytes, queue_length
        self._sending: Mapping[int, deque[tuple[PendingRequest, bytes]]] = {
            rank: deque() for rank in range(carrier.size) if rank != carrier.rank
        }
        self._receiving: dict[int, tuple[PendingRequest, bytearray]] = {}
        self._wakeup = Event()

    def send(self, envelope: Envelope) -> bool:
        """Send an envelope to rank ``envelope.header.target``; its checksum is added and its payload copied.

        Returns:
            whether it was accepted. False: the queue to that rank is full, or there is no such rank.

        Raises:
            UsageError: another source is given, the payload exceeds a frame, or the header is invalid.
        """
        header, payload = envelope.header, payload_to_send(envelope, self.me, self._frame_nbytes)
        pending = self._sending.get(header.target)
        if pending is None:
            return False
        _drop_completed(pending)
        if len(pending) >= self._queue_length:
            return False
        data = b"".join(encode_checksummed(add_checksum(header, payload), payload))
        pending.append((self._carrier.send(data, header.target, MessageTag.ENVELOPE), data))
        self.sent_nbytes += len(data)
        return True

    def poll(self, seconds: float = 0.0) -> list[Envelope]:
        """Return the received envelopes; if there are none, wait up to `seconds` or until `wake` is called.

        Invalid messages are counted in `refused`.
        """
        deadline, sleep = time.monotonic() + seconds, _MIN_SLEEP_SECONDS
        while True:
            woken = self._wakeup.is_set()
            if woken:
                self._wakeup.clear()
            received = self._receive()
            left = deadline - time.monotonic()
            if received or woken or left <= 0:
                return received
            self._wakeup.wait(min(left, sleep))
            sleep = min(2 * sleep, _MAX_SLEEP_SECONDS)

    def wake(self) -> None:
        """Make the current or next `poll` return; from any thread."""
        self._wakeup.set()

    def peers(self) -> list[int]:
        """Return the reachable ranks: for the hub all others, for a worker the hub."""
        return list(self._sending) if self.me == HUB else [HUB]

    def close(self, seconds: float = 1.0) -> None:
        """Disconnect; what was not sent within `seconds` may be lost, and what arrives meanwhile is dropped."""
        deadline = time.monotonic() + seconds
        while any(self._sending.values()) and time.monotonic() < deadline:
            if not self._receive():
                time.sleep(_MIN_SLEEP_SECONDS)
        for pending in self._sending.values():
            ABANDONED_BUFFERS.extend(pending)
            pending.clear()
        ABANDONED_BUFFERS.extend(self._receiving.values())
        self._receiving.clear()

    def _receive(self) -> list[Envelope]:
        """Return the received envelopes, one per rank in turn, up to a limit."""
        received: list[Envelope] = []
        for pending in self._sending.values():
            _drop_completed(pending)
        count, progress = 0, True
        while progress and count < _MESSAGES_PER_POLL:
            progress = False
            for source in self._sending:
                data = self._next_message(source)
                if data is not None:
                    progress = True
                    count += 1
                    self._decode(source, data, received)
        return received

    def _next_message(self, source: int) -> bytearray | None:
        """Return the next message of a rank once it is complete."""
        if source not in self._receiving:
            message = self._carrier.probe(source, MessageTag.ENVELOPE)
            if message is None:
                return None
            data = bytearray(message.nbytes)
            self._receiving[source] = message.receive(data), data
        request, data = self._receiving[source]
        if not request.Test():
            return None
        del self._receiving[source]
        return data

    def _decode(self, source: int, data: bytearray, received: list[Envelope]) -> None:
        try:
            if len(data) > self._frame_nbytes + HEAD_LIMIT_NBYTES + TAIL_NBYTES:
                raise DamagedEnvelope(f"a message of {len(data)} bytes is not an envelope", source=source)
            envelope = decode_envelope(data, limit=self._frame_nbytes)
            check_route(envelope.header, me=self.me, run=self.run, carried_from=source)
        except EnvelopeError as error:
            self.refused[type(error).__name__] += 1
        else:
            self.received_nbytes += len(data)
            received.append(envelope)


def _drop_completed(pending: deque[tuple[PendingRequest, bytes]]) -> None:
    while pending and pending[0][0].Test():
        pending.popleft()
