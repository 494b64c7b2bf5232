"""The journal's file that is being written: records wait in memory, and reach the disk together."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from paceline import faults
from paceline.durable import write_whole
from paceline.exchange.envelope import Bytes
from paceline.star.keeping.disk import write_at
from paceline.star.keeping.records import START_NBYTES, Start, encode, pack_start

__all__ = ["LogFile"]


class LogFile:
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

    def __init__(self, path: Path, start: Start, end: int, after: int) -> None:
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
    def create(cls, path: Path, revision: int, first: int) -> LogFile:
        """Begin a new file for the records from `first` on.

        Raises:
            OSError: it can't be written.
        """
        start = Start(revision, first, secrets.randbits(64))
        faults.writing(START_NBYTES)
        write_whole(path, lambda beside: beside.write_bytes(pack_start(start)))
        return cls(path, start, START_NBYTES, first)

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
        pieces = encode(self.next, self.durable, values, payload, seed)
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
