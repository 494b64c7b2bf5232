"""The standby's side of a copy: writes what an active hub sends into its own folder, from which a hub can recover."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from pathlib import Path

from paceline._core.file_lock import FolderLock
from paceline._core.files import fsync, open_private
from paceline.async_dp.standby.mirror_source import CopiedFile, MirrorChunk, head_digest
from paceline.async_dp.wal.durable_files import disk_errors, make_folder
from paceline.async_dp.wal.hub_folder import LEDGER, HubFolder
from paceline.async_dp.wal.hub_term import StandbyMark
from paceline.errors import DamagedEnvelope, UsageError
from paceline.testing import fault_injection

__all__ = ["MirrorTarget"]

_NAME = re.compile(r"journal-\d{12,}\.log|snapshot-\d{12,}\.safetensors|ledger\.jsonl")


class MirrorTarget:
    """A standby's folder, which no other process writes to until this is closed.

    Args:
        path: the folder: empty, or an earlier copy.

    Attributes:
        mark: run and term of the active hub.

    Raises:
        UsageError: it holds a run that is no copy, a process uses it, or it can't be written.
        DamagedCheckpoint: its mark is damaged.
    """

    def __init__(self, path: Path) -> None:
        make_folder(path, "standby hub")
        self._lock = FolderLock(path / "hub.lock", "hub")
        with ExitStack() as undo, disk_errors(path, "correct that, then start the standby again", "opened"):
            undo.callback(self._lock.close)
            self.folder = HubFolder(path)
            mark = StandbyMark.read(path)
            if mark is None and self.folder.holds_run():
                raise UsageError(
                    f"{str(path)!r} holds a run that is no standby's copy",
                    remedy="give the standby a folder of its own; --standby shared waits for a folder that both share",
                )
            self.mark = mark or StandbyMark()
            self.mark.write(path)
            self.folder.remove_temporary()
            undo.pop_all()

    def describe(self, run: str, term: int, *, in_sync: bool) -> None:
        """Store run and term of the active hub, and whether the copy has all that it has acknowledged.

        Raises:
            UsageError: the copy is of another run.
            CheckpointError: they can't be written.
        """
        if self.mark.run and run != self.mark.run:
            raise UsageError(
                f"{str(self.folder.path)!r} is a copy of run {self.mark.run!r}, the active hub serves run {run!r}",
                remedy="give the standby another folder",
            )
        mark = StandbyMark(run, term, in_sync)
        if mark != self.mark:
            mark.write(self.folder.path)
            self.mark = mark

    def copied(self) -> dict[str, CopiedFile]:
        """Return the files that need not be sent again, as far as they are complete here."""
        paths = [*self.folder.journals().values(), *self.folder.snapshots().values()]
        paths += [self.folder.ledger] if self.folder.ledger.exists() else []
        return {path.name: CopiedFile(path.stat().st_size, head_digest(path)) for path in paths}

    def write(self, chunk: MirrorChunk) -> None:
        """Write bytes of a file; those of a journal are on disk when this returns.

        Raises:
            DamagedEnvelope: they don't continue what is here.
            CheckpointError: they can't be written.
        """
        if not _NAME.fullmatch(chunk.name):
            raise DamagedEnvelope(f"{chunk.name!r} is no file of a hub", part="header")
        path = self.folder.path / chunk.name
        is_snapshot, is_ledger = chunk.name.startswith("snapshot"), chunk.name == LEDGER
        target = path.with_name(f".{chunk.name}-copy") if is_snapshot else path
        with disk_errors(path, "free disk space: the copy continues by itself"):
            fault_injection.before_write(len(chunk.payload))
            handle = (
                os.open(target, os.O_WRONLY)
                if chunk.offset
                else open_private(target, os.O_WRONLY | os.O_CREAT)
            )
            try:
                if chunk.offset > os.fstat(handle).st_size:
                    raise DamagedEnvelope(f"{chunk.name} continues at byte {chunk.offset}", part="header")
                os.ftruncate(handle, chunk.offset)
                _write_all(handle, chunk.payload, chunk.offset)
                if chunk.complete or not (is_snapshot or is_ledger):
                    os.fsync(handle)
            finally:
                os.close(handle)
            if chunk.complete and is_snapshot:
                os.replace(target, path)
                fsync(self.folder.path)
                self.folder.remove_old()
            elif not chunk.offset:
                fsync(self.folder.path)

    def close(self) -> None:
        """Release the folder; may be called twice."""
        self._lock.close()


def _write_all(handle: int, payload: bytes, offset: int) -> None:
    view = memoryview(payload)
    while view:
        nbytes = os.pwrite(handle, view, offset)
        view, offset = view[nbytes:], offset + nbytes
