"""Faults that a sender can be told to make, to see that its receiver finds them (pure)."""

from __future__ import annotations

from dataclasses import replace

from paceline.errors import UsageError, unknown
from paceline.transport.envelope import BEGIN, TAIL_NBYTES, Bytes, encode_checksummed
from paceline.transport.envelope_header import Header
from paceline.transport.mpi_exchange.message_carrier import MessageTag

__all__ = ["ENVELOPE_FAULTS", "TaggedBuffer", "faulty_frame_order", "faulty_messages", "parse_envelope_fault"]

TaggedBuffer = tuple[MessageTag, Bytes]

ENVELOPE_FAULTS = {
    "flip-begin": "a bit of a begin mark is turned over",
    "flip-header": "a bit of a header",
    "flip-payload": "a bit of a payload, after its checksum was taken",
    "flip-checksum": "a bit of a header's checksum",
    "flip-end": "a bit of an end mark",
    "drop-end": "the end of an envelope is not sent",
    "drop-payload": "nor is a payload",
    "truncate": "half of a payload is sent",
    "repeat": "an envelope is sent twice",
    "foreign": "an envelope is of another run",
    "lose": "a frame is not sent",
    "swap": "two frames change places",
    "stall": "nothing more is sent from the middle on: the receiver's time-out ends that",
}
"""What may be injected: name and meaning."""


def parse_envelope_fault(text: str) -> tuple[str, int]:
    """Return fault and faulty rank of ``"FAULT"`` (rank 0) or ``"FAULT@RANK"``.

    Raises:
        UsageError: an unknown fault, or no rank.

    Example:
        >>> parse_fault("flip-payload@2")
        ('flip-payload', 2)
    """
    name, at, rank = text.partition("@")
    if name not in ENVELOPE_FAULTS:
        raise unknown("fault", name, ENVELOPE_FAULTS)
    if at and not rank.isdecimal():
        raise UsageError(f"--inject {text!r}: {rank!r} is no rank", remedy=f"write {name}@1, for example")
    return name, int(rank or 0)


def faulty_frame_order(fault: str, frames: int) -> list[int]:
    """Return the numbers of the frames in the order in which they are sent; a fault is in the middle."""
    order, at = list(range(frames)), frames // 2
    if fault == "swap" and frames > 1:
        order[at - 1], order[at] = order[at], order[at - 1]
    elif fault == "lose":
        del order[at]
    elif fault == "stall":
        del order[at:]
    return order


def faulty_messages(header: Header, payload: Bytes, fault: str = "") -> list[TaggedBuffer]:
    """Return an envelope as the messages that carry it, with a fault in them if one is given.

    Args:
        header: of the payload, sealed.
        payload: it is not changed.
        fault: one of `ENVELOPE_FAULTS`, or empty.
    """
    if fault == "foreign":
        header = replace(header, run=f"{header.run}-of-somebody-else")
    head, body, tail = encode_checksummed(header, payload)
    if fault == "flip-begin":
        head = _flipped(head, 3)
    elif fault == "flip-header":
        head = _flipped(head, len(BEGIN) + 4 + 10)
    elif fault == "flip-checksum":
        head = _flipped(head, len(head) - 2)
    elif fault == "flip-payload":
        body = _flipped(body, len(body) // 2)
    elif fault == "flip-end":
        tail = _flipped(tail, TAIL_NBYTES - 1)
    elif fault == "truncate":
        body = memoryview(body)[: len(body) // 2]
    whole = [(MessageTag.HEAD, head), (MessageTag.PAYLOAD, body), (MessageTag.TAIL, tail)]
    dropped = {"drop-end": MessageTag.TAIL, "drop-payload": MessageTag.PAYLOAD}.get(fault)
    return [each for each in whole if each[0] != dropped] * (2 if fault == "repeat" else 1)


def _flipped(data: Bytes, at: int) -> bytearray:
    """Return a copy with one bit of byte `at` turned over."""
    copy = bytearray(data)
    if copy:
        copy[at] ^= 0x10
    return copy
