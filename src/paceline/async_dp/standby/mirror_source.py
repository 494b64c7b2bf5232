"""The active hub's side of a copy: which bytes of its folder a standby lacks.

Journals are copied as they are, byte by byte, so the copy has their checksums, and recovery verifies it as the
original. Only bytes that are on disk here are copied. The end of the journals comes first; a newer snapshot, which only
shortens a recovery, and the ledger, which is for people, are copied when nothing else waits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from paceline.async_dp.wal.hub_folder import LEDGER, HubFolder
from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.errors import CheckpointError

__all__ = ["CHUNK_NBYTES", "CopiedFile", "MirrorChunk", "MirrorSource", "head_digest"]

CHUNK_NBYTES = 1 << 20
_HEAD_NBYTES = {"journal": 64, "snapshot": 64 << 10, LEDGER: 64}
"""A journal's header has a random key; the beginning of a snapshot has its record number and its revision."""

_LEDGER_NBYTES = 1 << 20  # per chunk: at least one line


@dataclass(frozen=True)
class CopiedFile:
    """A file that a standby has: its size and `head_digest`."""

    nbytes: int
    digest: str


@dataclass(frozen=True)
class MirrorChunk:
    """Bytes of a file."""

    name: str
    offset: int
    payload: bytes
    complete: bool  # a snapshot ends with it


def head_digest(path: Path) -> str:
    """Return a digest that identifies a journal or snapshot.

    Raises:
        OSError: it can't be read.
    """
    with open(path, "rb") as file:
        return xxh3_64_hexdigest(file.read(_HEAD_NBYTES[path.name.partition("-")[0]]))


class MirrorSource:
    """Yields what a standby lacks.

    Args:
        journal: of the active hub.
        copied: files that the standby has, by name.

    Raises:
        CheckpointError: the standby has records that this hub has not.
    """

    def __init__(self, journal: HubJournal, copied: Mapping[str, CopiedFile]) -> None:
        self._journal, self._folder = journal, journal.folder
        self._offsets: dict[str, int] = {}  # copied bytes by file
        self._partial: Path | None = None  # journal that is being copied
        self._base: int | None = None  # revision of the newest snapshot that the standby has
        for path in self._files(self._folder):
            found = copied.get(path.name)
            if found is not None and found.digest == head_digest(path):
                self._accept(path, found)

    @staticmethod
    def _files(folder: HubFolder) -> list[Path]:
        ledger = [folder.ledger] if folder.ledger.exists() else []
        return [*folder.journals().values(), *folder.snapshots().values(), *ledger]

    def _accept(self, path: Path, found: CopiedFile) -> None:
        size = self._size(path)
        if path.name == LEDGER and found.nbytes > size:
            return  # a crash of this machine took the end of it
        if found.nbytes > size:
            raise CheckpointError(
                f"the standby's {path.name} has {found.nbytes} bytes, this hub's {size}: it has other records",
                remedy="give the standby an empty folder",
            )
        self._offsets[path.name] = found.nbytes
        for revision, snapshot in self._folder.snapshots().items():
            if snapshot == path and found.nbytes == size and revision > (self._base or -1):
                self._base = revision

    def next_chunk(self) -> MirrorChunk | None:
        """Return the next bytes; None if the standby has been sent everything.

        Raises:
            OSError: a file can't be read.
        """
        while (path := self._next_file()) is not None:
            chunk = self._read(path)
            if chunk is not None:
                return chunk
        return None

    @property
    def in_sync(self) -> bool:
        """Whether all records on disk were sent."""
        path = self._next_file()
        lacks_base = self._base is None and bool(self._folder.snapshots())
        return path is None or not (lacks_base or path.name.startswith("journal"))

    def _next_file(self) -> Path | None:
        journals, snapshots = self._folder.journals(), self._folder.snapshots()
        if self._partial is not None and self._partial not in journals.values():
            self._base = self._partial = None  # removed too early: the copy continues with a newer snapshot
        if self._base is None and snapshots:
            return next(iter(snapshots.values()))
        first = max((each for each in journals if each <= (self._base or 0)), default=0)
        for revision, path in reversed(journals.items()):
            if revision >= first and self._offsets.get(path.name, 0) < self._size(path):
                return path
        for revision, path in snapshots.items():
            if revision > (self._base or 0):
                return path
        ledger = self._folder.ledger
        return ledger if self._offsets.get(LEDGER, 0) < self._size(ledger) else None

    def _read(self, path: Path) -> MirrorChunk | None:
        """Return the next bytes of a file, None if it was removed."""
        offset = self._offsets.get(path.name, 0)
        try:
            size = self._size(path)
            with open(path, "rb") as file:
                most = _LEDGER_NBYTES if path.name == LEDGER else CHUNK_NBYTES
                payload = os.pread(file.fileno(), min(most, size - offset), offset)
        except FileNotFoundError:
            return None
        if path.name == LEDGER:  # whole lines, since recovery takes a part of one for damage
            payload = payload[: payload.rfind(b"\n") + 1]
        end = self._offsets[path.name] = offset + len(payload)
        is_snapshot, complete = path.name.startswith("snapshot"), end == size
        if is_snapshot and complete:
            self._base = next(each for each, found in self._folder.snapshots().items() if found == path)
        elif path.name.startswith("journal"):
            self._partial = None if complete else path
        return MirrorChunk(path.name, offset, payload, is_snapshot and complete)

    def _size(self, path: Path) -> int:
        """Return the number of bytes of a file that are on disk."""
        current, nbytes = self._journal.position
        return nbytes if path == current else path.stat().st_size
