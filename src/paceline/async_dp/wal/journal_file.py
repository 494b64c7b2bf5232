"""The journal's file that is being written: records wait in memory, and reach the disk together.

Reads a journal's file record by record, and tells what is damaged from an end that was torn off.

[Note: torn or damaged] Records are written in groups, and a group is on the disk once fdatasync has returned. When the
machine dies before, any part of the last group may be missing, in the middle too: a disk writes in what order it likes.
So a bad record followed by good ones may be nothing but the group that was never acknowledged. It is damage if it had
been on the disk, and two witnesses know: a later record says so in `durable` (it was begun after that group's
fdatasync), and the ledger has its line (lines follow the fdatasync, and the hub acknowledges after the lines). Where
neither does, nobody was told of it, and it is cut off with all that follows. After a crash of the hub alone the ledger
is exact. After a crash of the machine it may lag by the seconds that its lines lay in memory; if then the very last
group is damaged too, nobody can tell.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline._core.files import write_atomic
from paceline.async_dp.wal.hub_folder import write_at
from paceline.async_dp.wal.journal_records import (
    CHECKSUM_NBYTES,
    RECORD_HEADER_NBYTES,
    RECORD_MARK,
    JOURNAL_HEADER_NBYTES,
    JournalHeader,
    encode_record,
    parse_record_header,
    pack_journal_header,
    parse_journal_header,
    parse_record_values,
)
from paceline.errors import DamagedCheckpoint, UsageError
from paceline.testing import fault_injection
from paceline.transport.envelope import Bytes

__all__ = ["JournalReader", "JournalRecord", "JournalWriter"]


class JournalWriter:
    """A journal's file, to be appended to.

    Args:
        path: the file.
        start: what it begins with.
        end: where its last record ends; what is behind is cut off, and all before it is on the disk from now on.
        after: number of the next record.

    Attributes:
        path, start: as above.
        durable: so many records are on the disk.
        waiting_nbytes: of records that are not.

    Raises:
        OSError: it can't be written.
    """

    def __init__(self, path: Path, start: JournalHeader, end: int, after: int) -> None:
        self.path, self.start, self.durable = path, start, after
        self.waiting_nbytes = 0
        self._end = end
        self._waiting: list[Bytes] = []
        self._waiting_records = 0
        self._handle = os.open(path, os.O_WRONLY)
        try:
            os.ftruncate(self._handle, end)
            os.fsync(self._handle)
        except OSError:
            os.close(self._handle)
            raise

    @classmethod
    def create(cls, path: Path, revision: int, first: int) -> JournalWriter:
        """Begin a new file for the records from `first` on.

        Raises:
            OSError: it can't be written.
        """
        start = JournalHeader(revision, first, secrets.randbits(64))
        fault_injection.writing(JOURNAL_HEADER_NBYTES)
        write_atomic(path, lambda beside: beside.write_bytes(pack_journal_header(start)))
        return cls(path, start, JOURNAL_HEADER_NBYTES, first)

    @property
    def next(self) -> int:
        """Number of the next record."""
        return self.durable + self._waiting_records

    def add(self, values: bytes, payload: Bytes) -> None:
        """Have a record wait; `payload` must stay as it is until it has been written.

        Raises:
            UsageError: the payload is too long.
        """
        seed = self.start.key + self._end + self.waiting_nbytes
        pieces = encode_record(self.next, self.durable, values, payload, seed)
        self._waiting += pieces
        self.waiting_nbytes += sum(map(len, pieces))
        self._waiting_records += 1

    def write(self) -> None:
        """Write what waits; it is on the disk when this returns.

        Raises:
            OSError: it can't be written. It goes on waiting, and is written anew the next time, all of it: after an
                fdatasync that failed nobody knows what was kept.
        """
        if not self._waiting:
            return
        try:
            write_at(self._handle, self._waiting, self._end)
            os.fdatasync(self._handle)
        except OSError:
            with contextlib.suppress(
                OSError
            ):  # what stays is written over: the same bytes, at the same place
                os.ftruncate(self._handle, self._end)
            raise
        self._end += self.waiting_nbytes
        self.durable = self.next
        self._waiting, self.waiting_nbytes, self._waiting_records = [], 0, 0

    def close(self) -> None:
        """Close the file; what waits is lost."""
        os.close(self._handle)


_BLOCK_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """A record as it was read.

    Attributes:
        sequence: its number.
        durable: how many records were on the disk when it was begun.
        values, payload: what was appended.
        stop: where it ends in its file.
    """

    sequence: int
    durable: int
    values: dict[str, Any]
    payload: bytes
    stop: int


class JournalReader:
    """A journal's file, for reading; what is appended to it later is not seen.

    Args:
        path: the file.

    Attributes:
        path: the file.
        start: what it begins with.
        nbytes: of the file.

    Raises:
        DamagedCheckpoint: it can't be read, or is no journal.
        UsageError: a newer version of Paceline wrote it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DamagedCheckpoint(f"{str(path)!r} can't be read: {error.strerror}") from error
        try:
            self.nbytes = os.fstat(self._handle).st_size
            self.start = parse_journal_header(self._read(0, JOURNAL_HEADER_NBYTES))
        except DamagedCheckpoint as error:
            self.close()
            raise DamagedCheckpoint(
                f"{str(path)!r} is damaged at its beginning: {error}", remedy="put it back from a copy"
            ) from error
        except UsageError as error:
            self.close()
            raise UsageError(f"{str(path)!r} can't be read: {error}") from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def records(self) -> Iterator[JournalRecord]:
        """Yield the records in order, up to the end of the file.

        Raises:
            DamagedCheckpoint: what follows is no record, or not the next one.
        """
        at, due = JOURNAL_HEADER_NBYTES, self.start.first
        while at < self.nbytes:
            record = self._record(at)
            if record.sequence != due:
                raise DamagedCheckpoint(f"record {record.sequence} is there, where record {due} is due")
            yield record
            at, due = record.stop, due + 1

    def durable_behind(self, at: int) -> int:
        """Return how many records were on the disk, as the good records behind a bad one tell; 0: there are none."""
        durable, searched = 0, at + 1
        while (found := self._find(searched)) is not None:
            try:
                record = self._record(found)
            except DamagedCheckpoint:
                searched = found + 1
            else:
                durable, searched = max(durable, record.durable), record.stop
        return durable

    def _record(self, at: int) -> JournalRecord:
        """Return the record at a place; raise a DamagedCheckpoint if there is none that is whole."""
        head = parse_record_header(self._read(at, RECORD_HEADER_NBYTES))
        stop = at + head.total_nbytes
        if stop > self.nbytes:
            raise DamagedCheckpoint(f"a record ends at byte {stop}, its file at byte {self.nbytes}")
        front_nbytes = RECORD_HEADER_NBYTES + head.size
        front = self._read(at, front_nbytes)
        payload = self._read(at + front_nbytes, head.nbytes)
        checksum = self._read(stop - CHECKSUM_NBYTES, CHECKSUM_NBYTES)
        values = parse_record_values(front, payload, checksum, self.start.key + at)
        return JournalRecord(head.sequence, head.durable, values, payload, stop)

    def _find(self, at: int) -> int | None:
        """Return where the mark of a record is next, at `at` or later."""
        while at < self.nbytes:
            block = self._read(at, _BLOCK_NBYTES)
            where = block.find(RECORD_MARK)
            if where >= 0:
                return at + where
            at += max(1, len(block) - len(RECORD_MARK) + 1)
        return None

    def _read(self, at: int, nbytes: int) -> bytes:
        """Return bytes of the file, fewer where it ends before."""
        try:
            data = os.pread(self._handle, nbytes, at)
            while (
                data
                and len(data) < nbytes
                and (more := os.pread(self._handle, nbytes - len(data), at + len(data)))
            ):
                data += more
        except OSError as error:
            raise DamagedCheckpoint(f"byte {at} can't be read: {error.strerror}") from error
        return data
