"""Opening an envelope that a carrier brought: whole, undamaged, and for this very receiver (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import DamagedEnvelope, ForeignEnvelope, TruncatedEnvelope
from paceline.transport.envelope import Bytes, check_payload, check_tail, decode, decode_head
from paceline.transport.envelope_header import Header
from paceline.transport.transport_interface import Envelope

__all__ = ["ENVELOPE_PARTS", "SHORT_NBYTES", "check_route", "decode_parts", "decode_envelope"]

ENVELOPE_PARTS = 3
"""Head, payload and tail."""

SHORT_NBYTES = 4 << 10
"""Shorter payloads are copied out of what they came in: a carrier's buffer may hold more than them."""

_CHECKSUM_NBYTES = 8


def decode_parts(parts: Sequence[Bytes], *, limit: int) -> Envelope:
    """Return the envelope that came as head, payload and tail; a long payload is not copied.

    Args:
        parts: what came.
        limit: most bytes of a payload.

    Raises:
        TruncatedEnvelope: parts are missing, or one ends too early.
        DamagedEnvelope: there are too many parts, or one is not what was sent.
        ForeignEnvelope: it follows another schema.
    """
    if len(parts) < ENVELOPE_PARTS:
        raise TruncatedEnvelope(f"an envelope came in {len(parts)} parts, not {ENVELOPE_PARTS}")
    if len(parts) > ENVELOPE_PARTS:
        raise DamagedEnvelope(f"an envelope came in more than {ENVELOPE_PARTS} parts")
    head, payload, tail = (memoryview(each).cast("B") for each in parts)
    header, end = decode_head(head, limit=limit)
    if head.nbytes != end:
        raise DamagedEnvelope(
            f"the head of {header} has {head.nbytes} bytes, expected {end}",
            source=header.source,
            sequence=header.sequence,
            part="header",
        )
    check_payload(header, payload)
    check_tail(header, head[end - _CHECKSUM_NBYTES : end], tail)
    return Envelope(header, _kept(payload))


def decode_envelope(data: Bytes, *, limit: int) -> Envelope:
    """Return the envelope that came in one piece; the arguments and errors are those of `decode_parts`."""
    header, payload = decode(data, limit=limit)
    return Envelope(header, _kept(payload))


def check_route(header: Header, *, me: int, run: str, carried_from: int | None) -> None:
    """Raise unless an envelope is of this run, for this receiver, and from whom the carrier says.

    Args:
        header: of the envelope.
        me: the receiver's number.
        run: whose envelopes it takes; "": any.
        carried_from: who sent it; None: nobody who could have sent it.

    Raises:
        ForeignEnvelope: it is not.
    """
    what = ""
    if carried_from != header.source:
        what = f"was carried from {'nobody known' if carried_from is None else carried_from}"
    elif run and header.run != run:
        what = f"is of run {header.run!r}, this is run {run!r}"
    elif header.target != me:
        what = f"came to {me}"
    if what:
        raise ForeignEnvelope(f"{header} {what}", source=carried_from, sequence=header.sequence)


def _kept(payload: memoryview) -> Bytes:
    return bytes(payload) if payload.nbytes <= SHORT_NBYTES else payload
