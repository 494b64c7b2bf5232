"""Envelope format: a framed message whose receiver detects any damage (pure: bytes in, bytes out).

    head     begin mark     8 bytes   constant
             size, ~size    2 + 2     size of the header, and its complement
             header         ≤ 16 KiB  msgpack: addressing, framing, size and checksum of the payload
             checksum       8         xxh3-64 of everything before it
    payload  nbytes                   any bytes
    tail     checksum       8         the head's checksum again: this tail belongs to that head
             end mark       8         constant

The head's checksum precedes the payload, so no size is trusted and no memory allocated before it has been verified. Its
copy in the tail ties the tail to the head. A flipped bit anywhere is detected and its part named, and so is the part in
which an envelope was cut off. All integers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from xxhash import xxh3_64_intdigest

from paceline.errors import DamagedEnvelope, ForeignEnvelope, TruncatedEnvelope
from paceline.transport.header_layout import HEADER_LIMIT_NBYTES, Header, pack_header, unpack_header

__all__ = [
    "BEGIN",
    "CHECKSUM_NBYTES",
    "END",
    "ENVELOPE_PARTS",
    "HEAD_LIMIT_NBYTES",
    "PAYLOAD_LIMIT_NBYTES",
    "SHORT_NBYTES",
    "TAIL_NBYTES",
    "Bytes",
    "Envelope",
    "add_checksum",
    "check_payload",
    "check_route",
    "check_tail",
    "decode",
    "decode_envelope",
    "decode_head",
    "decode_parts",
    "encode",
    "encode_checksummed",
]

Bytes = bytes | bytearray | memoryview

BEGIN, END = b"\x8bPLBEG\r\n", b"\n\rPLEND\x8c"
PAYLOAD_LIMIT_NBYTES = 1 << 30
"""Maximum payload; longer messages are split into frames."""

ENVELOPE_PARTS = 3
"""Head, payload and tail."""

SHORT_NBYTES = 4 << 10
"""Payloads up to this size are copied on receipt, so that they don't keep a larger receive buffer alive."""

_SIZES, _CHECKSUM = struct.Struct("<HH"), struct.Struct("<Q")
_FIXED_NBYTES = len(BEGIN) + _SIZES.size
CHECKSUM_NBYTES = _CHECKSUM.size
HEAD_LIMIT_NBYTES = _FIXED_NBYTES + HEADER_LIMIT_NBYTES + CHECKSUM_NBYTES
TAIL_NBYTES = CHECKSUM_NBYTES + len(END)


@dataclass(slots=True)
class Envelope:
    """A header and its payload: verified if it was received, ready for `add_checksum` if it is to be sent.

    Attributes:
        key: public key that authenticated the sender of a received envelope; empty: none.
    """

    header: Header
    payload: Bytes = b""
    key: str = ""


# --- encoding


def encode(header: Header, payload: Bytes = b"") -> list[Bytes]:
    """Return an envelope as head, payload and tail, to be sent in this order; the payload is not copied.

    Args:
        header: size and checksum are filled in.
        payload: contiguous bytes, which must not change until they have been sent.

    Raises:
        UsageError: a field of the header is invalid.

    Example:
        >>> sent = b"".join(encode(Header("run", "greeting", source=1, target=0, sequence=7), b"hello"))
        >>> header, payload = decode(sent)
        >>> bytes(payload), header.sequence
        (b'hello', 7)
    """
    return encode_checksummed(add_checksum(header, payload), payload)


def add_checksum(header: Header, payload: Bytes) -> Header:
    """Return a copy of the header with the size and checksum of this payload."""
    payload = memoryview(payload).cast("B")
    total = payload.nbytes if header.frames == 1 else header.total_nbytes
    return replace(header, nbytes=payload.nbytes, checksum=xxh3_64_intdigest(payload), total_nbytes=total)


def encode_checksummed(header: Header, payload: Bytes) -> list[Bytes]:
    """Encode as `encode` does, with a header from `add_checksum`."""
    packed = pack_header(header)
    head = BEGIN + _SIZES.pack(len(packed), len(packed) ^ 0xFFFF) + packed
    checksum = _CHECKSUM.pack(xxh3_64_intdigest(head))
    return [head + checksum, memoryview(payload).cast("B"), checksum + END]


# --- decoding


def decode(data: Bytes, *, limit: int = PAYLOAD_LIMIT_NBYTES) -> tuple[Header, memoryview]:
    """Return header and payload of exactly one envelope; the payload is a view of `data`.

    Args:
        data: the envelope and nothing else.
        limit: maximum size of the payload.

    Raises:
        TruncatedEnvelope: it ends early.
        DamagedEnvelope: a part is corrupted, or extra bytes follow.
        ForeignEnvelope: the schema version differs.
    """
    data = memoryview(data).cast("B")
    header, start = decode_head(data, limit=limit)
    end = start + header.nbytes
    payload = data[start:end]
    check_payload(header, payload)
    check_tail(header, data[start - CHECKSUM_NBYTES : start], data[end:])
    return header, payload


def decode_envelope(data: Bytes, *, limit: int) -> Envelope:
    """Return the envelope that arrived as one piece; arguments and errors as for `decode`."""
    header, payload = decode(data, limit=limit)
    return Envelope(header, _copy_if_short(payload))


def decode_parts(parts: Sequence[Bytes], *, limit: int) -> Envelope:
    """Return the envelope that arrived as head, payload and tail; a long payload is not copied.

    Args:
        parts: the parts of the message.
        limit: maximum size of the payload.

    Raises:
        TruncatedEnvelope: a part is missing or ends early.
        DamagedEnvelope: a part is corrupted or superfluous.
        ForeignEnvelope: the schema version differs.
    """
    if len(parts) < ENVELOPE_PARTS:
        raise TruncatedEnvelope(f"envelope has {len(parts)} parts, expected {ENVELOPE_PARTS}")
    if len(parts) > ENVELOPE_PARTS:
        raise DamagedEnvelope(f"envelope has more than {ENVELOPE_PARTS} parts")
    head, payload, tail = (memoryview(each).cast("B") for each in parts)
    header, end = decode_head(head, limit=limit)
    if head.nbytes != end:
        raise _damaged(header, f"has a head of {head.nbytes} bytes, expected {end}", "header")
    check_payload(header, payload)
    check_tail(header, head[end - CHECKSUM_NBYTES : end], tail)
    return Envelope(header, _copy_if_short(payload))


def _copy_if_short(payload: memoryview) -> Bytes:
    return bytes(payload) if payload.nbytes <= SHORT_NBYTES else payload


def decode_head(data: Bytes, *, limit: int = PAYLOAD_LIMIT_NBYTES) -> tuple[Header, int]:
    """Return the header at the start of `data`, and the size of the head.

    Raises:
        TruncatedEnvelope: `data` ends within the head.
        DamagedEnvelope: the head is corrupted, or announces a payload larger than `limit`.
        ForeignEnvelope: the schema version differs.
    """
    data = memoryview(data).cast("B")
    _check_length(data, len(BEGIN), "begin mark", None)
    if data[: len(BEGIN)] != BEGIN:
        found = bytes(data[: len(BEGIN)]).hex()
        raise DamagedEnvelope(f"envelope begins with {found}, expected {BEGIN.hex()}", part="begin mark")
    _check_length(data, _FIXED_NBYTES, "header", None)
    size, complement = _SIZES.unpack_from(data, len(BEGIN))
    if size ^ complement != 0xFFFF or size > HEADER_LIMIT_NBYTES:
        raise DamagedEnvelope(
            f"header size is {size} and its complement {complement ^ 0xFFFF}; "
            f"expected equal values of at most {HEADER_LIMIT_NBYTES}",
            part="header",
        )
    end = _FIXED_NBYTES + size
    _check_length(data, end + CHECKSUM_NBYTES, "header", None)
    (expected,) = _CHECKSUM.unpack_from(data, end)
    found = xxh3_64_intdigest(data[:end])
    if found != expected:
        raise DamagedEnvelope(
            f"header has checksum {found:016x}, its sender recorded {expected:016x}", part="header"
        )
    header = unpack_header(data[_FIXED_NBYTES:end])
    if header.nbytes > limit:
        raise _damaged(
            header, f"announces a payload of {header.nbytes} bytes; the limit is {limit}", "header"
        )
    return header, end + CHECKSUM_NBYTES


def check_payload(header: Header, payload: Bytes) -> None:
    """Raise unless `payload` has the size and checksum that the header records.

    Raises:
        TruncatedEnvelope: it is too short.
        DamagedEnvelope: it is too long or corrupted.
    """
    payload = memoryview(payload).cast("B")
    _check_length(payload, header.nbytes, "payload", header)
    if payload.nbytes > header.nbytes:
        raise _damaged(header, f"has {payload.nbytes} bytes of payload, expected {header.nbytes}", "payload")
    found = xxh3_64_intdigest(payload)
    if found != header.checksum:
        raise _damaged(
            header,
            f"has a payload with checksum {found:016x}, its sender recorded {header.checksum:016x}",
            "payload",
        )


def check_tail(header: Header, checksum: Bytes, tail: Bytes) -> None:
    """Raise unless `tail` is the tail of this envelope.

    Args:
        header: of the envelope.
        checksum: the last bytes of its head.
        tail: the bytes after the payload.

    Raises:
        TruncatedEnvelope: it is too short.
        DamagedEnvelope: it is too long, corrupted, or belongs to another envelope.
    """
    tail = memoryview(tail).cast("B")
    _check_length(tail, TAIL_NBYTES, "end mark", header)
    if tail[:CHECKSUM_NBYTES] != checksum:
        found, expected = bytes(tail[:CHECKSUM_NBYTES])[::-1].hex(), bytes(checksum)[::-1].hex()
        raise _damaged(header, f"ends with header checksum {found}, it began with {expected}", "end mark")
    if tail[CHECKSUM_NBYTES:TAIL_NBYTES] != END:
        found = bytes(tail[CHECKSUM_NBYTES:TAIL_NBYTES]).hex()
        raise _damaged(header, f"ends with {found}, expected {END.hex()}", "end mark")
    if tail.nbytes > TAIL_NBYTES:
        raise _damaged(header, f"is followed by {tail.nbytes - TAIL_NBYTES} extra bytes", "end mark")


def check_route(header: Header, *, me: int, run: str, carried_from: int | None) -> None:
    """Raise unless an envelope belongs to this run and receiver, and its source is its actual sender.

    Args:
        header: of the envelope.
        me: number of the receiver.
        run: name of the receiver's run; empty: any.
        carried_from: number of the actual sender; None: unknown sender.

    Raises:
        ForeignEnvelope: it does not.
    """
    problem = ""
    if carried_from != header.source:
        sender = "an unknown sender" if carried_from is None else carried_from
        problem = f"was sent by {sender}"
    elif run and header.run != run:
        problem = f"is of run {header.run!r}, this is run {run!r}"
    elif header.target != me:
        problem = f"was delivered to {me}"
    if problem:
        raise ForeignEnvelope(f"{header} {problem}", source=carried_from, sequence=header.sequence)


def _check_length(data: memoryview, needed: int, part: str, header: Header | None) -> None:
    """Raise if a part is cut off."""
    if data.nbytes >= needed:
        return
    name = "envelope" if header is None else str(header)
    scope = "up to its end" if header is None else "of it"
    raise TruncatedEnvelope(
        f"{name} is cut off in its {part}: expected {needed} bytes {scope}, got {data.nbytes}",
        source=header.source if header else None,
        sequence=header.sequence if header else None,
        part=part,
    )


def _damaged(header: Header, problem: str, part: str) -> DamagedEnvelope:
    return DamagedEnvelope(f"{header} {problem}", source=header.source, sequence=header.sequence, part=part)
