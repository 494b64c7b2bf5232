"""A file of records: a writer that buffers them and writes them together, and a reader.

[Note: torn or damaged] Records are written in groups, and a group is on disk once fdatasync has returned. When the
machine dies before, any part of the last group may be missing, in the middle too: a disk writes in any order. So a
bad record followed by good ones may belong to a group that was never acknowledged. It is damage if it had been on
disk, and two witnesses know: a later record says so in `durable` (it was added after that group's fdatasync), and the
ledger has its line (lines follow the fdatasync, and acknowledgements follow the lines). Where neither does, it was
never acknowledged, and it is cut off with all that follows. After a crash of the hub alone the ledger is exact. After
a crash of the machine it may lack the last seconds of lines, which were in memory only; if the very last group is
damaged too, that can't be known.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline._core.files import write_atomic
from paceline.async_dp.wal.durable_files import AppendFile
from paceline.async_dp.wal.journal_records import (
    JOURNAL_HEADER_NBYTES,
    RECORD_HEADER_NBYTES,
    RECORD_MARK,
    JournalHeader,
    encode_record,
    pack_journal_header,
    parse_journal_header,
    parse_record,
    parse_record_header,
)
from paceline.errors import DamagedCheckpoint, UsageError
from paceline.testing import fault_injection
from paceline.transport.envelope import Bytes

__all__ = ["JournalReader", "JournalRecord", "JournalWriter"]

_BLOCK_NBYTES = 1 << 20


class JournalWriter(AppendFile):
    """Appends records to a journal's file.

    Args:
        path: the file.
        header: of the file.
        end: end of its last record; the rest is cut off, and all before it is on disk from now on.
        next: number of the next record.

    Attributes:
        durable: number of records on disk.

    Raises:
        OSError: it can't be written.
    """

    def __init__(self, path: Path, header: JournalHeader, end: int, next: int) -> None:
        super().__init__(path, end)
        self.header, self.durable, self._buffered_records = header, next, 0
        try:
            os.fsync(self._handle)
        except OSError:
            self.close()
            raise

    @classmethod
    def create(cls, path: Path, revision: int, first: int) -> JournalWriter:
        """Create a file for the records from number `first` on; raises an OSError if it can't be written."""
        header = JournalHeader(revision, first, secrets.randbits(64))
        fault_injection.before_write(JOURNAL_HEADER_NBYTES)
        write_atomic(path, lambda temporary: temporary.write_bytes(pack_journal_header(header)), private=True)
        return cls(path, header, JOURNAL_HEADER_NBYTES, first)

    @property
    def next(self) -> int:
        """Number of the next record."""
        return self.durable + self._buffered_records

    def append(self, values: bytes, payload: Bytes) -> None:
        """Buffer a record; `payload` must not change until it is written.

        Raises:
            UsageError: the payload is too long.
        """
        seed = self.header.key + self.end + self.buffered_nbytes
        self.buffer(*encode_record(self.next, self.durable, values, payload, seed))
        self._buffered_records += 1

    def commit(self) -> None:
        """Write the buffered records; they are on disk when this returns. Errors as of `flush`."""
        self.flush(sync=True)
        self.durable, self._buffered_records = self.next, 0


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """A record that was read."""

    sequence: int
    durable: int  # number of records that were on disk when it was added
    values: dict[str, Any]
    payload: bytes
    stop: int  # its end in the file


class JournalReader:
    """Reads a journal's file; does not see what is appended later.

    Attributes:
        header: of the file.
        nbytes: size of the file.

    Raises:
        DamagedCheckpoint: it can't be read, or is not a journal.
        UsageError: it was written by a newer version of Paceline.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DamagedCheckpoint(f"{str(path)!r} can't be read: {error.strerror}") from error
        try:
            self.nbytes = os.fstat(self._handle).st_size
            self.header = parse_journal_header(self._read(0, JOURNAL_HEADER_NBYTES))
        except DamagedCheckpoint as error:
            os.close(self._handle)
            raise DamagedCheckpoint(
                f"{str(path)!r} is damaged at its beginning: {error}", remedy="restore it from a copy"
            ) from error
        except UsageError as error:
            os.close(self._handle)
            raise UsageError(f"{str(path)!r} can't be read: {error}") from error

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    def records(self) -> Iterator[JournalRecord]:
        """Yield the records in order, up to the end of the file.

        Raises:
            DamagedCheckpoint: the next record is damaged, or has another number than expected.
        """
        at, expected = JOURNAL_HEADER_NBYTES, self.header.first
        while at < self.nbytes:
            record = self._record(at)
            if record.sequence != expected:
                raise DamagedCheckpoint(f"found record {record.sequence}, expected record {expected}")
            yield record
            at, expected = record.stop, expected + 1

    def durable_after(self, at: int) -> int:
        """Return how many records were on disk according to the intact records after a bad one; 0 without any."""
        durable, search = 0, at + 1
        while (found := self._find(search)) is not None:
            try:
                record = self._record(found)
            except DamagedCheckpoint:
                search = found + 1
            else:
                durable, search = max(durable, record.durable), record.stop
        return durable

    def _record(self, at: int) -> JournalRecord:
        header = parse_record_header(self._read(at, RECORD_HEADER_NBYTES))
        stop = at + header.total_nbytes
        if stop > self.nbytes:
            raise DamagedCheckpoint(f"a record ends at byte {stop}, its file at byte {self.nbytes}")
        values, payload = parse_record(self._read(at, header.total_nbytes), self.header.key + at)
        return JournalRecord(header.sequence, header.durable, values, payload, stop)

    def _find(self, at: int) -> int | None:
        """Return the place of the next record's mark, at `at` or later."""
        while at < self.nbytes:
            block = self._read(at, _BLOCK_NBYTES)
            offset = block.find(RECORD_MARK)
            if offset >= 0:
                return at + offset
            at += max(1, len(block) - len(RECORD_MARK) + 1)
        return None

    def _read(self, at: int, nbytes: int) -> bytes:
        """Return bytes of the file, fewer at its end."""
        data = b""
        try:
            while len(data) < nbytes:
                more = os.pread(self._handle, nbytes - len(data), at + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise DamagedCheckpoint(f"byte {at} can't be read: {error.strerror}") from error
        return data
