"""A star over MPI: the ranks of a world carry envelopes to each other, each as one message; the hub is rank 0.

Isend, Improbe, Irecv and Test: nothing here waits for another rank. A long message leaves only when its target asks for
it, so at the end every rank has to `close` while the others still look.
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

_FIRST_NAP_SECONDS, _LONGEST_NAP_SECONDS = 50e-6, 2e-3
_MESSAGES_A_POLL = 64


class MpiExchange:
    """Carries envelopes between ranks; an `Exchange`. A rank's number is its rank.

    Args:
        carrier: whose ranks they are.
        run: whose envelopes it takes; "": any.
        frame_nbytes: the most bytes of a payload.
        queue: envelopes that are under way to one rank before its sender is told.

    Attributes:
        refused, sent_nbytes, received_nbytes: as of every `Exchange`.

    Raises:
        UsageError: a number that can't be.
    """

    def __init__(
        self, carrier: MessageCarrier, run: str, *, frame_nbytes: int = FRAME_NBYTES, queue: int = 8
    ) -> None:
        for name, value in (("frame_nbytes", frame_nbytes), ("queue", queue)):
            if value < 1:
                raise UsageError(f"{name}={value!r} can't be", remedy=f"give {name} > 0")
        self.me, self.run = carrier.rank, run
        self.refused: Counter[str] = Counter()
        self.sent_nbytes = self.received_nbytes = 0
        self._carrier, self._frame_nbytes, self._queue = carrier, frame_nbytes, queue
        self._out: Mapping[int, deque[tuple[PendingRequest, bytes]]] = {
            rank: deque() for rank in range(carrier.size) if rank != carrier.rank
        }
        self._coming: dict[int, tuple[PendingRequest, bytearray]] = {}
        self._woken = Event()

    def send(self, envelope: Envelope) -> bool:
        """Take an envelope to rank ``envelope.header.target``; it is sealed here, and its payload is copied.

        Returns:
            whether it was taken. False: as much as may be is under way to that rank, or there is no such rank.

        Raises:
            UsageError: it is another's, its payload is longer than a frame, or its header can't be.
        """
        header, payload = envelope.header, payload_to_send(envelope, self.me, self._frame_nbytes)
        out = self._out.get(header.target)
        if out is None:
            return False
        _settle(out)
        if len(out) >= self._queue:
            return False
        data = b"".join(encode_checksummed(add_checksum(header, payload), payload))
        out.append((self._carrier.send(data, header.target, MessageTag.ENVELOPE), data))
        self.sent_nbytes += len(data)
        return True

    def poll(self, seconds: float = 0.0) -> list[Envelope]:
        """Return what has come; wait up to `seconds` if that is nothing, or until somebody calls `wake`.

        What can't be delivered is counted in `refused`.
        """
        deadline, nap = time.monotonic() + seconds, _FIRST_NAP_SECONDS
        while True:
            woken = self._woken.is_set()
            if woken:
                self._woken.clear()
            came = self._receive()
            left = deadline - time.monotonic()
            if came or woken or left <= 0:
                return came
            self._woken.wait(min(left, nap))
            nap = min(2 * nap, _LONGEST_NAP_SECONDS)

    def wake(self) -> None:
        """Have `poll` return, now or as soon as it is called; from any thread."""
        self._woken.set()

    def peers(self) -> list[int]:
        """Return the ranks that can be sent to: for the hub all others, for any other the hub."""
        return list(self._out) if self.me == HUB else [HUB]

    def close(self, seconds: float = 1.0) -> None:
        """Leave; what has not left within `seconds` may be lost. What comes meanwhile is dropped."""
        deadline = time.monotonic() + seconds
        while any(self._out.values()) and time.monotonic() < deadline:
            if not self._receive():
                time.sleep(_FIRST_NAP_SECONDS)
        for out in self._out.values():
            ABANDONED_BUFFERS.extend(out)
            out.clear()
        ABANDONED_BUFFERS.extend(self._coming.values())
        self._coming.clear()

    def _receive(self) -> list[Envelope]:
        """Return what has come, one envelope of a rank at a time, no more than leaves time for the rest."""
        came: list[Envelope] = []
        for out in self._out.values():
            _settle(out)
        opened, moved = 0, True
        while moved and opened < _MESSAGES_A_POLL:
            moved = False
            for source in self._out:
                data = self._next(source)
                if data is not None:
                    moved = True
                    opened += 1
                    self._open(source, data, came)
        return came

    def _next(self, source: int) -> bytearray | None:
        """Return the next message of a rank once all of it is here."""
        if source not in self._coming:
            arrival = self._carrier.probe(source, MessageTag.ENVELOPE)
            if arrival is None:
                return None
            data = bytearray(arrival.nbytes)
            self._coming[source] = arrival.receive(data), data
        flight, data = self._coming[source]
        if not flight.Test():
            return None
        del self._coming[source]
        return data

    def _open(self, source: int, data: bytearray, came: list[Envelope]) -> None:
        try:
            if len(data) > self._frame_nbytes + HEAD_LIMIT_NBYTES + TAIL_NBYTES:
                raise DamagedEnvelope(f"a message of {len(data)} bytes is no envelope", source=source)
            envelope = decode_envelope(data, limit=self._frame_nbytes)
            check_route(envelope.header, me=self.me, run=self.run, carried_from=source)
        except EnvelopeError as error:
            self.refused[type(error).__name__] += 1
        else:
            self.received_nbytes += len(data)
            came.append(envelope)


def _settle(out: deque[tuple[PendingRequest, bytes]]) -> None:
    """Let go of what has left."""
    while out and out[0][0].Test():
        out.popleft()
