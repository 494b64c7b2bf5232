"""The format of a journal: records that tell whether they are whole (pure: bytes in, bytes out).

    file    mark            8 bytes   the same for every journal
            format          4
            revision        8         of the snapshot that it follows
            first           8         number of its first record
            key             8         drawn at random: this file's own
            checksum        8         xxh3-64 of all before it
    record  mark            4         the same for every record
            size, ~size     4 + 4     bytes of the values, and their complement
            nbytes, ~nbytes 4 + 4     bytes of the payload, and their complement
            sequence        8         its number among all records of the run, from 0
            durable         8         so many records were on the disk when this one was begun
            values          size      msgpack: a dictionary of plain values
            payload         nbytes    any bytes
            checksum        8         xxh3-64 of all before it, seeded with the key and the record's place

All numbers are little-endian. Since the place in the file is in the checksum, nothing else can pass for a record:
neither a record inside a payload, nor what an earlier life of the disk has left. `durable` is what tells damage from
an end that was torn off, see `reading`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_64, xxh3_64_intdigest

from paceline.async_dp.wal.plain_values import VALUES_LIMIT_NBYTES, unpack_values
from paceline.errors import DamagedCheckpoint, UsageError
from paceline.transport.envelope import PAYLOAD_LIMIT_NBYTES, Bytes

__all__ = [
    "CHECKSUM_NBYTES",
    "JOURNAL_FORMAT",
    "HEAD_NBYTES",
    "RECORD_MARK",
    "JOURNAL_HEADER_NBYTES",
    "RecordHeader",
    "JournalHeader",
    "encode_record",
    "parse_record_header",
    "pack_journal_header",
    "parse_journal_header",
    "parse_record_values",
]

JOURNAL_FORMAT = 1
"""Version of the format; a newer one is refused."""

RECORD_MARK = b"\x8bPLR"
_FILE_MARK = b"\x8bPLJRN\r\n"
_START, _HEAD, _CHECKSUM = struct.Struct("<8sIQQQ"), struct.Struct("<4sIIIIQQ"), struct.Struct("<Q")
JOURNAL_HEADER_NBYTES = _START.size + _CHECKSUM.size
HEAD_NBYTES, CHECKSUM_NBYTES = _HEAD.size, _CHECKSUM.size
_SMALL_NBYTES = 64 << 10
_ONES = 2**32 - 1


@dataclass(frozen=True, slots=True)
class JournalHeader:
    """How a journal begins: the revision of the snapshot before it, the number of its first record, its key."""

    revision: int
    first: int
    key: int


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """How a record begins: bytes of its values and of its payload, its number, how many records were on the disk."""

    size: int
    nbytes: int
    sequence: int
    durable: int

    @property
    def total_nbytes(self) -> int:
        """Of the whole record."""
        return HEAD_NBYTES + self.size + self.nbytes + CHECKSUM_NBYTES


def pack_journal_header(start: JournalHeader) -> bytes:
    """Return how a journal's file begins."""
    data = _START.pack(_FILE_MARK, JOURNAL_FORMAT, start.revision, start.first, start.key)
    return data + _CHECKSUM.pack(xxh3_64_intdigest(data))


def parse_journal_header(data: bytes) -> JournalHeader:
    """Return what a journal's file begins with.

    Raises:
        DamagedCheckpoint: this is no such beginning.
        UsageError: a newer version of Paceline wrote it.
    """
    if len(data) < JOURNAL_HEADER_NBYTES:
        raise DamagedCheckpoint(f"it ends after {len(data)} bytes, before its beginning is whole")
    mark, version, revision, first, key = _START.unpack_from(data)
    (told,) = _CHECKSUM.unpack_from(data, _START.size)
    if mark != _FILE_MARK or xxh3_64_intdigest(data[: _START.size]) != told:
        raise DamagedCheckpoint("its first bytes are not those of a journal, or not those that were written")
    if version > JOURNAL_FORMAT:
        raise UsageError(
            f"it has format {version}, this version of Paceline knows those up to {JOURNAL_FORMAT}",
            remedy="resume with the version that wrote it, or a newer one",
        )
    return JournalHeader(revision, first, key)


def encode_record(sequence: int, durable: int, values: bytes, payload: Bytes, seed: int) -> list[Bytes]:
    """Return a record in pieces, to be written in this order; a long payload is not copied.

    Args:
        sequence: its number.
        durable: how many records are on the disk.
        values: as `plain.packed` packs them.
        payload: contiguous bytes.
        seed: the file's key plus the record's place in it.

    Raises:
        UsageError: the payload is too long.

    Example:
        >>> from paceline.async_dp.wal.plain_values import packed
        >>> record = b"".join(encode(4, 3, packed({"worker": 7}), b"update", seed=0))
        >>> head = head_of(record)
        >>> head.sequence, head.nbytes
        (4, 6)
    """
    payload = memoryview(payload).cast("B")
    size, nbytes = len(values), payload.nbytes
    if nbytes > PAYLOAD_LIMIT_NBYTES:
        raise UsageError(
            f"a payload has {nbytes} bytes, more than {PAYLOAD_LIMIT_NBYTES}",
            remedy="append it in parts",
        )
    head = _HEAD.pack(RECORD_MARK, size, size ^ _ONES, nbytes, nbytes ^ _ONES, sequence, durable) + values
    summed = xxh3_64(head, seed=seed & (2**64 - 1))
    summed.update(payload)
    checksum = _CHECKSUM.pack(summed.intdigest())
    if nbytes < _SMALL_NBYTES:
        return [b"".join((head, payload, checksum))]
    return [head, payload, checksum]


def parse_record_header(data: Bytes) -> RecordHeader:
    """Return how a record begins; its checksum is still to be compared.

    Raises:
        DamagedCheckpoint: no record begins so.
    """
    if len(data) < HEAD_NBYTES:
        raise DamagedCheckpoint(f"the head of a record ends after {len(data)} of {HEAD_NBYTES} bytes")
    mark, size, not_size, nbytes, not_nbytes, sequence, durable = _HEAD.unpack_from(data)
    if mark != RECORD_MARK:
        raise DamagedCheckpoint(f"{bytes(mark).hex()} is there, where a record begins with {RECORD_MARK.hex()}")
    if size ^ not_size != _ONES or nbytes ^ not_nbytes != _ONES:
        raise DamagedCheckpoint("the sizes of a record and their complements don't fit")
    if size > VALUES_LIMIT_NBYTES or nbytes > PAYLOAD_LIMIT_NBYTES:
        raise DamagedCheckpoint(f"a record tells of {size} bytes of values and {nbytes} of payload")
    return RecordHeader(size, nbytes, sequence, durable)


def parse_record_values(front: bytes, payload: Bytes, checksum: bytes, seed: int) -> dict[str, Any]:
    """Return the values of a record, once its checksum fits.

    Args:
        front: its head and its values.
        payload, checksum: what follows.
        seed: as for `encode_record`.

    Raises:
        DamagedCheckpoint: it is not what was written.
    """
    summed = xxh3_64(front, seed=seed & (2**64 - 1))
    summed.update(payload)
    if len(checksum) < CHECKSUM_NBYTES:
        raise DamagedCheckpoint("a record ends before its checksum")
    (told,) = _CHECKSUM.unpack(checksum)
    if summed.intdigest() != told:
        raise DamagedCheckpoint(f"a record has checksum {summed.intdigest():016x}, written was {told:016x}")
    return unpack_values(front[HEAD_NBYTES:])
