"""Envelopes: messages that tell whether they arrived whole (pure: bytes in, bytes out).

    head     begin mark     8 bytes   the same for every envelope
             size, ~size    2 + 2     bytes of the header, and their complement
             header         ≤ 16 KiB  msgpack: who, to whom, which, what; the payload's size and checksum
             checksum       8         xxh3-64 of all before it
    payload  nbytes                   any bytes
    tail     checksum       8         the header's once more: this end belongs to that beginning
             end mark       8         the same for every envelope

The header's checksum comes before the payload as well, so that no size is believed, and no memory taken for it,
before it has been checked; at the end it says that the end is this envelope's own. A flipped bit anywhere is
found and its part is named, and so is where an envelope was cut off. All numbers are little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import replace

from xxhash import xxh3_64_intdigest

from paceline.errors import DamagedEnvelope, TruncatedEnvelope
from paceline.transport.envelope_header import HEADER_LIMIT_NBYTES, Header, pack_header, unpack_header

__all__ = [
    "BEGIN",
    "END",
    "HEAD_LIMIT_NBYTES",
    "PAYLOAD_LIMIT_NBYTES",
    "TAIL_NBYTES",
    "Bytes",
    "check_payload",
    "check_tail",
    "decode",
    "decode_head",
    "encode",
    "encode_checksummed",
    "add_checksum",
]

Bytes = bytes | bytearray | memoryview

BEGIN, END = b"\x8bPLBEG\r\n", b"\n\rPLEND\x8c"
PAYLOAD_LIMIT_NBYTES = 1 << 30
"""A longer payload is refused; long messages go in frames."""

_SIZES, _CHECKSUM = struct.Struct("<HH"), struct.Struct("<Q")
_FIXED_NBYTES = len(BEGIN) + _SIZES.size
HEAD_LIMIT_NBYTES = _FIXED_NBYTES + HEADER_LIMIT_NBYTES + _CHECKSUM.size
TAIL_NBYTES = _CHECKSUM.size + len(END)


def encode(header: Header, payload: Bytes = b"") -> list[Bytes]:
    """Return an envelope as head, payload and tail, to be sent in this order; the payload is not copied.

    Args:
        header: size and checksum are filled in.
        payload: contiguous bytes; they must not change until they have been sent.

    Raises:
        UsageError: a field of the header has no valid value.

    Example:
        >>> sent = b"".join(encode(Header("run", "greeting", source=1, target=0, sequence=7), b"hello"))
        >>> header, payload = decode(sent)
        >>> bytes(payload), header.sequence
        (b'hello', 7)
    """
    return encode_checksummed(add_checksum(header, payload), payload)


def add_checksum(header: Header, payload: Bytes) -> Header:
    """Return the header of this very payload: its size and checksum are filled in."""
    payload = memoryview(payload).cast("B")
    total = payload.nbytes if header.frames == 1 else header.total_nbytes
    return replace(header, nbytes=payload.nbytes, checksum=xxh3_64_intdigest(payload), total_nbytes=total)


def encode_checksummed(header: Header, payload: Bytes) -> list[Bytes]:
    """Return an envelope whose header was sealed before, as `encode` does."""
    packed = pack_header(header)
    head = BEGIN + _SIZES.pack(len(packed), len(packed) ^ 0xFFFF) + packed
    checksum = _CHECKSUM.pack(xxh3_64_intdigest(head))
    return [head + checksum, memoryview(payload).cast("B"), checksum + END]


def decode(data: Bytes, *, limit: int = PAYLOAD_LIMIT_NBYTES) -> tuple[Header, memoryview]:
    """Return header and payload of one whole envelope; the payload is a view of `data`.

    Args:
        data: the envelope and nothing else.
        limit: most bytes of a payload.

    Raises:
        TruncatedEnvelope: it ends too early.
        DamagedEnvelope: a part of it is not what was sent, or something follows it.
        ForeignEnvelope: it follows another schema.
    """
    data = memoryview(data).cast("B")
    header, start = decode_head(data, limit=limit)
    payload = data[start : start + header.nbytes]
    check_payload(header, payload)
    end = start + header.nbytes
    check_tail(header, data[start - _CHECKSUM.size : start], data[end:])
    return header, payload


def decode_head(data: Bytes, *, limit: int = PAYLOAD_LIMIT_NBYTES) -> tuple[Header, int]:
    """Return the header and the bytes of the head, which `data` begins with.

    Raises:
        TruncatedEnvelope: `data` ends within the head.
        DamagedEnvelope: a part of the head is not what was sent, or the payload would be longer than `limit`.
        ForeignEnvelope: it follows another schema.
    """
    data = memoryview(data).cast("B")
    _check_length(data, len(BEGIN), "begin mark", None)
    if data[: len(BEGIN)] != BEGIN:
        came = bytes(data[: len(BEGIN)]).hex()
        raise DamagedEnvelope(f"an envelope begins with {came}, not with {BEGIN.hex()}", part="begin mark")
    _check_length(data, _FIXED_NBYTES, "header", None)
    size, complement = _SIZES.unpack_from(data, len(BEGIN))
    if size ^ complement != 0xFFFF or size > HEADER_LIMIT_NBYTES:
        raise DamagedEnvelope(
            f"the size of a header is {size} and its complement {complement ^ 0xFFFF}; "
            f"expected the same twice, at most {HEADER_LIMIT_NBYTES}",
            part="header",
        )
    end = _FIXED_NBYTES + size
    _check_length(data, end + _CHECKSUM.size, "header", None)
    (told,) = _CHECKSUM.unpack_from(data, end)
    came = xxh3_64_intdigest(data[:end])
    if came != told:
        raise DamagedEnvelope(
            f"a header has checksum {came:016x}, its sender told {told:016x}", part="header"
        )
    header = unpack_header(data[_FIXED_NBYTES:end])
    if header.nbytes > limit:
        raise DamagedEnvelope(
            f"{header} tells of a payload of {header.nbytes} bytes; at most {limit} are taken",
            source=header.source,
            sequence=header.sequence,
            part="header",
        )
    return header, end + _CHECKSUM.size


def check_payload(header: Header, payload: Bytes) -> None:
    """Raise unless `payload` is what the header tells of.

    Raises:
        TruncatedEnvelope, DamagedEnvelope: it is too short, too long, or has another checksum.
    """
    payload = memoryview(payload).cast("B")
    _check_length(payload, header.nbytes, "payload", header)
    if payload.nbytes > header.nbytes:
        raise _damaged(header, f"has {payload.nbytes} bytes of payload, expected {header.nbytes}", "payload")
    came = xxh3_64_intdigest(payload)
    if came != header.checksum:
        raise _damaged(
            header,
            f"has a payload with checksum {came:016x}, its sender told {header.checksum:016x}",
            "payload",
        )


def check_tail(header: Header, checksum: Bytes, tail: Bytes) -> None:
    """Raise unless `tail` is the end of this very envelope.

    Args:
        header: of the envelope.
        checksum: the last bytes of its head.
        tail: what came behind the payload.

    Raises:
        TruncatedEnvelope, DamagedEnvelope: it is too short, too long, damaged, or another envelope's.
    """
    tail = memoryview(tail).cast("B")
    _check_length(tail, TAIL_NBYTES, "end mark", header)
    if tail[: _CHECKSUM.size] != checksum:
        came, told = bytes(tail[: _CHECKSUM.size])[::-1].hex(), bytes(checksum)[::-1].hex()
        raise _damaged(header, f"ends with header checksum {came}, it began with {told}", "end mark")
    if tail[_CHECKSUM.size : TAIL_NBYTES] != END:
        came = bytes(tail[_CHECKSUM.size : TAIL_NBYTES]).hex()
        raise _damaged(header, f"ends with {came}, not with {END.hex()}", "end mark")
    if tail.nbytes > TAIL_NBYTES:
        raise _damaged(
            header, f"is followed by {tail.nbytes - TAIL_NBYTES} bytes of something else", "end mark"
        )


def _check_length(data: memoryview, needed: int, part: str, header: Header | None) -> None:
    """Raise if a part is cut off."""
    if data.nbytes >= needed:
        return
    name = "an envelope" if header is None else str(header)
    raise TruncatedEnvelope(
        f"{name} ends in its {part}: expected {needed} bytes up to there, {data.nbytes} came"
        if header is None
        else f"{name} ends in its {part}: expected {needed} bytes of it, {data.nbytes} came",
        source=header.source if header else None,
        sequence=header.sequence if header else None,
        part=part,
    )


def _damaged(header: Header, what: str, part: str) -> DamagedEnvelope:
    return DamagedEnvelope(f"{header} {what}", source=header.source, sequence=header.sequence, part=part)
