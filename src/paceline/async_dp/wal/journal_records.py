"""Format of a journal: records with a checksum, and the plain values in them (pure: bytes in, bytes out).

    file    mark            8 bytes   the same for every journal
            format          4
            revision        8         of the snapshot that it follows
            first           8         number of its first record
            key             8         random, one per file
            checksum        8         xxh3-64 of all before it
    record  mark            4         the same for every record
            size, ~size     4 + 4     bytes of the values, and their complement
            nbytes, ~nbytes 4 + 4     bytes of the payload, and their complement
            sequence        8         number among all records of the run, from 0
            durable         8         number of records on disk when this one was added
            values          size      msgpack: a dictionary of plain values
            payload         nbytes    any bytes
            checksum        8         xxh3-64 of all before it, seeded with the key and the record's place

All numbers are little-endian. The checksum includes the place in the file, so nothing else can pass for a record:
neither a record inside a payload, nor old contents of the disk. `durable` distinguishes damage from a torn end, see
`journal_file`.

Plain values are texts, numbers, True, False, None, and lists and dictionaries of them. They go into a record as
msgpack, and into the ledger as a line of JSON; both give the same values back. JSON here is Python's, with ``NaN`` and
``Infinity``: a loss that is not finite must not end the hub that records it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
from xxhash import xxh3_64, xxh3_64_intdigest

from paceline.errors import DamagedCheckpoint, UsageError
from paceline.transport.envelope import Bytes

__all__ = [
    "JOURNAL_FORMAT",
    "JOURNAL_HEADER_NBYTES",
    "RECORD_HEADER_NBYTES",
    "RECORD_MARK",
    "JournalHeader",
    "RecordHeader",
    "encode_record",
    "ledger_line",
    "pack_journal_header",
    "pack_values",
    "parse_journal_header",
    "parse_record",
    "parse_record_header",
    "to_json",
]

JOURNAL_FORMAT = 1
"""Version of the format; a newer one is refused."""

RECORD_MARK = b"\x8bPLR"
_FILE_MARK = b"\x8bPLJRN\r\n"
_HEADER, _RECORD, _CHECKSUM = struct.Struct("<8sIQQQ"), struct.Struct("<4sIIIIQQ"), struct.Struct("<Q")
JOURNAL_HEADER_NBYTES = _HEADER.size + _CHECKSUM.size
RECORD_HEADER_NBYTES = _RECORD.size
_SMALL_NBYTES = 64 << 10
_ONES = PAYLOAD_LIMIT_NBYTES = 2**32 - 1
_VALUES_LIMIT_NBYTES = 64 << 10
_MAX_DEPTH = 16
_LINE_ENCODER = json.JSONEncoder(ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class JournalHeader:
    """Start of a journal: revision of the snapshot before it, number of its first record, key."""

    revision: int
    first: int
    key: int


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """Start of a record: bytes of its values and of its payload, its number, number of records on disk."""

    size: int
    nbytes: int
    sequence: int
    durable: int

    @property
    def total_nbytes(self) -> int:
        """Size of the whole record."""
        return RECORD_HEADER_NBYTES + self.size + self.nbytes + _CHECKSUM.size


def pack_journal_header(header: JournalHeader) -> bytes:
    """Return the first bytes of a journal."""
    data = _HEADER.pack(_FILE_MARK, JOURNAL_FORMAT, header.revision, header.first, header.key)
    return data + _CHECKSUM.pack(xxh3_64_intdigest(data))


def parse_journal_header(data: bytes) -> JournalHeader:
    """Return the header of a journal.

    Raises:
        DamagedCheckpoint: these are not the first bytes of a journal.
        UsageError: it was written by a newer version of Paceline.
    """
    if len(data) < JOURNAL_HEADER_NBYTES:
        raise DamagedCheckpoint(f"the file ends after {len(data)} bytes, inside its header")
    mark, version, revision, first, key = _HEADER.unpack_from(data)
    (checksum,) = _CHECKSUM.unpack_from(data, _HEADER.size)
    if mark != _FILE_MARK or xxh3_64_intdigest(data[: _HEADER.size]) != checksum:
        raise DamagedCheckpoint("its header is not that of a journal, or its checksum is wrong")
    if version > JOURNAL_FORMAT:
        raise UsageError(
            f"it has format {version}, this version of Paceline reads formats up to {JOURNAL_FORMAT}",
            remedy="resume with the version that wrote it, or a newer one",
        )
    return JournalHeader(revision, first, key)


def encode_record(sequence: int, durable: int, values: bytes, payload: Bytes, seed: int) -> list[Bytes]:
    """Return a record as buffers to be written in order; a long payload is not copied.

    Args:
        sequence: number of the record.
        durable: number of records on disk.
        values: from `pack_values`.
        payload: contiguous bytes.
        seed: the file's key plus the record's place in it.

    Raises:
        UsageError: the payload is too long.

    Example:
        >>> record = b"".join(encode_record(4, 3, pack_values({"worker": 7}), b"update", seed=0))
        >>> header = parse_record_header(record)
        >>> header.sequence, header.nbytes
        (4, 6)
    """
    payload = memoryview(payload).cast("B")
    size, nbytes = len(values), payload.nbytes
    if nbytes > PAYLOAD_LIMIT_NBYTES:
        raise UsageError(
            f"a payload has {nbytes} bytes, more than {PAYLOAD_LIMIT_NBYTES}", remedy="append it in parts"
        )
    front = _RECORD.pack(RECORD_MARK, size, size ^ _ONES, nbytes, nbytes ^ _ONES, sequence, durable) + values
    checksum = _CHECKSUM.pack(_record_checksum(front, payload, seed))
    if nbytes < _SMALL_NBYTES:
        return [b"".join((front, payload, checksum))]
    return [front, payload, checksum]


def parse_record_header(data: Bytes) -> RecordHeader:
    """Return the header of a record; its checksum is still to be compared.

    Raises:
        DamagedCheckpoint: these are not the first bytes of a record.
    """
    if len(data) < RECORD_HEADER_NBYTES:
        raise DamagedCheckpoint(
            f"the header of a record ends after {len(data)} of {RECORD_HEADER_NBYTES} bytes"
        )
    mark, size, not_size, nbytes, not_nbytes, sequence, durable = _RECORD.unpack_from(data)
    if mark != RECORD_MARK:
        raise DamagedCheckpoint(f"a record must begin with {RECORD_MARK.hex()}, found {bytes(mark).hex()}")
    if size ^ not_size != _ONES or nbytes ^ not_nbytes != _ONES:
        raise DamagedCheckpoint("the sizes of a record do not match their complements")
    if size > _VALUES_LIMIT_NBYTES or nbytes > PAYLOAD_LIMIT_NBYTES:
        raise DamagedCheckpoint(f"a record claims {size} bytes of values and {nbytes} of payload")
    return RecordHeader(size, nbytes, sequence, durable)


def parse_record(data: bytes, seed: int) -> tuple[dict[str, Any], bytes]:
    """Return values and payload of a whole record, after checking its checksum.

    Args:
        data: the record.
        seed: as for `encode_record`.

    Raises:
        DamagedCheckpoint: the record is not what was written.
    """
    header = parse_record_header(data)
    if len(data) != header.total_nbytes:
        raise DamagedCheckpoint(f"a record has {len(data)} bytes, expected {header.total_nbytes}")
    front_nbytes = RECORD_HEADER_NBYTES + header.size
    front, payload = data[:front_nbytes], data[front_nbytes : front_nbytes + header.nbytes]
    (written,) = _CHECKSUM.unpack_from(data, front_nbytes + header.nbytes)
    computed = _record_checksum(front, payload, seed)
    if computed != written:
        raise DamagedCheckpoint(f"a record has checksum {computed:016x}, written was {written:016x}")
    try:
        values = msgpack.unpackb(front[RECORD_HEADER_NBYTES:], raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise DamagedCheckpoint(f"values can't be read: {error or type(error).__name__}") from error
    if not isinstance(values, dict):
        raise DamagedCheckpoint(f"values are a {type(values).__name__}, not a dictionary")
    return values, payload


def _record_checksum(front: bytes, payload: Bytes, seed: int) -> int:
    state = xxh3_64(front, seed=seed & (2**64 - 1))
    state.update(payload)
    return state.intdigest()


def pack_values(values: Mapping[str, Any]) -> bytes:
    """Return plain values as msgpack.

    Raises:
        UsageError: they are not plain, too long, or one is called ``"n"``, the ledger's name for a record's number.
    """
    _check_plain(values, "a record")
    if "n" in values:
        raise UsageError(
            "a record can't have a value 'n': in the ledger that is the record's number",
            remedy="give it another name",
        )
    data = bytes(msgpack.packb(values if isinstance(values, dict) else dict(values)) or b"")
    if len(data) > _VALUES_LIMIT_NBYTES:
        raise UsageError(
            f"the values of a record take {len(data)} bytes, more than {_VALUES_LIMIT_NBYTES}",
            remedy="put long values into the payload",
        )
    return data


def ledger_line(sequence: int, values: Mapping[str, Any]) -> bytes:
    """Return the ledger's line for a record with plain values."""
    return _LINE_ENCODER.encode({"n": sequence, **values}).encode() + b"\n"


def to_json(values: Mapping[str, Any], owner: str) -> str:
    """Return plain values as JSON.

    Args:
        values: plain values.
        owner: for messages, such as ``"facts of a run"``.

    Raises:
        UsageError: they are not plain.
    """
    _check_plain(values, owner)
    return json.dumps(dict(values), ensure_ascii=False)


def _check_plain(values: Mapping[str, Any], owner: str) -> None:
    problem = _problem(dict(values), 0)
    if problem:
        raise UsageError(
            f"{owner} can't hold {problem}",
            remedy="give texts, numbers, True, False, None, and lists and dictionaries of them",
        )


def _problem(value: object, depth: int) -> str:
    """Return the part of `value` that is not plain, empty if all of it is."""
    if value is None or isinstance(value, bool | float):
        return ""
    if isinstance(value, int):
        return "" if -(2**63) <= value < 2**64 else f"{value}, which needs more than 64 bits"
    if isinstance(value, str):
        return "" if _is_unicode(value) else f"{value!r:.60}, which is no Unicode"
    if depth >= _MAX_DEPTH:
        return f"values nested deeper than {_MAX_DEPTH}"
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str) or not _is_unicode(name):
                return f"{name!r:.60} as a name"
            problem = _problem(inner, depth + 1)
            if problem:
                return f"{problem} (in {name!r:.60})" if depth == 0 else problem
        return ""
    if isinstance(value, list | tuple):
        return next((problem for each in value if (problem := _problem(each, depth + 1))), "")
    return f"a {type(value).__name__}"


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
