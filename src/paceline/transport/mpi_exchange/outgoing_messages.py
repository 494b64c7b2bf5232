"""Sender of one message in a round: frames, two of them in flight at a time, then a close; with optional faults."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from paceline.errors import UsageError, unknown
from paceline.transport.envelope import BEGIN, TAIL_NBYTES, Bytes, add_checksum, encode, encode_checksummed
from paceline.transport.header_layout import Header
from paceline.transport.message_frames import message_checksum, split_frames
from paceline.transport.mpi_exchange.message_carrier import MessageCarrier, MessageTag, PendingRequest

__all__ = [
    "ENVELOPE_FAULTS",
    "OutgoingMessage",
    "faulty_frame_order",
    "faulty_messages",
    "parse_envelope_fault",
]

TaggedBuffer = tuple[MessageTag, Bytes]

_MAX_PENDING = 6  # two envelopes of three messages

ENVELOPE_FAULTS = {
    "flip-begin": "flip a bit of a begin mark",
    "flip-header": "flip a bit of a header",
    "flip-payload": "flip a bit of a payload after its checksum was computed",
    "flip-checksum": "flip a bit of a header's checksum",
    "flip-end": "flip a bit of an end mark",
    "drop-end": "don't send the tail of an envelope",
    "drop-payload": "don't send a payload",
    "truncate": "send half of a payload",
    "repeat": "send an envelope twice",
    "foreign": "send an envelope of another run",
    "lose": "don't send a frame",
    "swap": "swap two frames",
    "stall": "stop sending in the middle: the receiver times out",
}
"""Faults that can be injected: name and effect."""


def parse_envelope_fault(text: str) -> tuple[str, int]:
    """Return fault and faulty rank of ``"FAULT"`` (rank 0) or ``"FAULT@RANK"``.

    Raises:
        UsageError: the fault is unknown or the rank is not a number.

    Example:
        >>> parse_envelope_fault("flip-payload@2")
        ('flip-payload', 2)
    """
    name, at, rank = text.partition("@")
    if name not in ENVELOPE_FAULTS:
        raise unknown("fault", name, ENVELOPE_FAULTS)
    if at and not rank.isdecimal():
        raise UsageError(f"--inject {text!r}: {rank!r} is not a rank", remedy=f"write {name}@1, for example")
    return name, int(rank or 0)


def faulty_frame_order(fault: str, frames: int) -> list[int]:
    """Return the indices of the frames in the order in which they are sent; a fault is in the middle."""
    order, middle = list(range(frames)), frames // 2
    if fault == "swap" and frames > 1:
        order[middle - 1], order[middle] = order[middle], order[middle - 1]
    elif fault == "lose":
        del order[middle]
    elif fault == "stall":
        del order[middle:]
    return order


def faulty_messages(header: Header, payload: Bytes, fault: str = "") -> list[TaggedBuffer]:
    """Return the messages that carry an envelope, with a fault injected.

    Args:
        header: of the payload, with its checksum.
        payload: is not modified.
        fault: one of `ENVELOPE_FAULTS`, or empty.
    """
    if fault == "foreign":
        header = replace(header, run=f"{header.run}-of-somebody-else")
    head, body, tail = encode_checksummed(header, payload)
    if fault == "flip-begin":
        head = _flip_bit(head, 3)
    elif fault == "flip-header":
        head = _flip_bit(head, len(BEGIN) + 4 + 10)
    elif fault == "flip-checksum":
        head = _flip_bit(head, len(head) - 2)
    elif fault == "flip-payload":
        body = _flip_bit(body, len(body) // 2)
    elif fault == "flip-end":
        tail = _flip_bit(tail, TAIL_NBYTES - 1)
    elif fault == "truncate":
        body = memoryview(body)[: len(body) // 2]
    messages = [(MessageTag.HEAD, head), (MessageTag.PAYLOAD, body), (MessageTag.TAIL, tail)]
    dropped = {"drop-end": MessageTag.TAIL, "drop-payload": MessageTag.PAYLOAD}.get(fault)
    return [each for each in messages if each[0] != dropped] * (2 if fault == "repeat" else 1)


def _flip_bit(data: Bytes, at: int) -> bytearray:
    """Return a copy with one bit of byte `at` flipped."""
    copy = bytearray(data)
    if copy:
        copy[at] ^= 0x10
    return copy


class OutgoingMessage:
    """Sends one message, a step per call of `advance`.

    Args:
        carrier: of the messages.
        header: run, kind, source, target and round of all envelopes, and the first sequence number.
        data: the message; must not change until `done`.
        frame_nbytes: frame size.
        fault: one of `ENVELOPE_FAULTS`, injected once in the middle; empty: none.

    Attributes:
        source: sending rank.
        target: receiving rank.
        done: everything was sent and received.
        checksum: of the message, once everything was sent.
        sequence: sequence number of the next envelope after this message.
    """

    def __init__(
        self, carrier: MessageCarrier, header: Header, data: Bytes, frame_nbytes: int, fault: str = ""
    ) -> None:
        self._carrier, self._header, self._fault = carrier, header, fault
        self._data = memoryview(data).cast("B")
        self._frames = split_frames(self._data.nbytes, frame_nbytes)
        self._order = deque(faulty_frame_order(fault, len(self._frames)))
        self._queue: deque[TaggedBuffer] = deque()
        self._pending: list[tuple[PendingRequest, Bytes]] = []
        self._checksum_of_frame: dict[int, int] = {}
        self._closed = False
        self.source, self.target = header.source, header.target
        self.done, self.checksum = False, 0
        self.sequence = header.sequence + len(self._frames) + 1

    @property
    def has_pending(self) -> bool:
        """Whether something was sent that the target has not received."""
        return bool(self._pending)

    @property
    def next_frame(self) -> str:
        """The frame to be sent next, for error messages."""
        index = self._order[0] if self._order else len(self._frames) - 1
        return f"frame {index} of {len(self._frames)}"

    def advance(self) -> bool:
        """Do everything that does not block; return whether there was anything to do."""
        if self.done:
            return False
        before = len(self._pending)
        self._pending = [each for each in self._pending if not each[0].Test()]
        progress = len(self._pending) < before
        while len(self._pending) < _MAX_PENDING and self._fill_queue():
            tag, buffer = self._queue.popleft()
            self._pending.append((self._carrier.send(buffer, self.target, tag), buffer))
            progress = True
        self.done = self._closed and not self._queue and not self._pending
        return progress

    def _fill_queue(self) -> bool:
        """Queue the next envelope if the queue is empty; return whether anything is queued."""
        if not self._queue and self._order:
            self._queue.extend(self._frame_messages(self._order.popleft()))
        elif not self._queue and not self._closed and self._fault != "stall":
            self._queue.append((MessageTag.CLOSE, self._close()))
            self._closed = True
        return bool(self._queue)

    def _frame_messages(self, index: int) -> list[TaggedBuffer]:
        frame = self._frames[index]
        header = replace(
            self._header,
            sequence=self._header.sequence + index,
            frame=index,
            frames=len(self._frames),
            offset=frame.offset,
            total_nbytes=self._data.nbytes,
        )
        payload = self._data[frame.offset : frame.offset + frame.nbytes]
        header = add_checksum(header, payload)
        self._checksum_of_frame[index] = header.checksum
        return faulty_messages(header, payload, self._fault if index == len(self._frames) // 2 else "")

    def _close(self) -> bytes:
        """Return the envelope that ends the message and carries its checksum."""
        self.checksum = message_checksum(value for _, value in sorted(self._checksum_of_frame.items()))
        header = replace(
            self._header, kind="close", sequence=self.sequence - 1, meta={"checksum": self.checksum}
        )
        return b"".join(encode(header))
