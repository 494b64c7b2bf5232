"""The folder of a hub: which files are where, and what is swept up.

run.json                              facts of the run, told when it began
hub.lock                              held while a hub has the folder open
snapshot-000000000200.safetensors     the state at a revision; the last two are kept
journal-000000000200.log              records since that snapshot; kept since the older of the two
ledger.jsonl                          a line for each record of the whole run
snapshot-….safetensors.damaged        passed over by a recovery, until two newer ones are there
.snapshot-…                           being written, or left by a hub that died

Bytes to a place on the disk: all of them, or an error that says why not and what to do.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from paceline._core.files import fsync
from paceline.async_dp.wal.journal_records import JOURNAL_HEADER_NBYTES
from paceline.errors import CheckpointError, UsageError
from paceline.testing import fault_injection
from paceline.transport.envelope import Bytes

__all__ = ["LEDGER", "HubFolder", "write_failure", "make_folder", "write_at"]

log = logging.getLogger("paceline.async_dp")


LEDGER = "ledger.jsonl"


_LOG = re.compile(r"journal-(\d{12,})\.log")


_SNAPSHOT = re.compile(r"snapshot-(\d{12,})\.safetensors")


_DAMAGED = re.compile(r"snapshot-(\d{12,})\.safetensors\.damaged")


_LEFT = re.compile(r"\.(run\.json|journal-\d+\.log|snapshot-\d+\.safetensors)-.*")


_KEPT_SNAPSHOTS = 2


class HubFolder:
    """Where the files of one hub are.

    Args:
        path: the folder, which exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock, self.page, self.ledger = path / "hub.lock", path / "run.json", path / LEDGER

    def log(self, revision: int) -> Path:
        """Return the journal that follows the snapshot of a revision."""
        return self.path / f"journal-{revision:012d}.log"

    def snapshot(self, revision: int) -> Path:
        """Return the snapshot of a revision."""
        return self.path / f"snapshot-{revision:012d}.safetensors"

    def logs(self) -> dict[int, Path]:
        """Return the journals that are there by revision, the newest first."""
        return self._found(_LOG)

    def snapshots(self) -> dict[int, Path]:
        """Return the snapshots that are there by revision, the newest first."""
        return self._found(_SNAPSHOT)

    def _found(self, name: re.Pattern[str]) -> dict[int, Path]:
        found = {int(match[1]): path for path in self.path.iterdir() if (match := name.fullmatch(path.name))}
        return dict(sorted(found.items(), reverse=True))

    def holds_run(self) -> bool:
        """Return whether a hub has noted anything here."""
        return (
            self.page.exists()
            or bool(self.snapshots())
            or (self.ledger.exists() and self.ledger.stat().st_size > 0)
            or any(path.stat().st_size > JOURNAL_HEADER_NBYTES for path in self.logs().values())
        )

    def set_aside(self, snapshot: Path) -> None:
        """Rename a snapshot that is not intact, so that it does not count as one that is kept."""
        snapshot.replace(snapshot.with_name(f"{snapshot.name}.damaged"))

    def sweep(self) -> None:
        """Remove what hubs that died have left half written; only the holder of the lock may."""
        for path in self.path.iterdir():
            if _LEFT.fullmatch(path.name) and path.is_dir():
                shutil.rmtree(path)

    def remove_old(self) -> None:
        """Remove all snapshots but the last two, and the journals before the older of these."""
        for path in self._old():
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s is of no more use, but can't be removed: %s", path, error)

    def _old(self) -> list[Path]:
        """Return what is of no more use, snapshots first."""
        snapshots, logs = self.snapshots(), self.logs()
        kept = list(snapshots)[:_KEPT_SNAPSHOTS]
        if not kept:
            return []
        followed_by = next((revision for revision in logs if revision <= kept[-1]), 0)
        old = [path for revision, path in snapshots.items() if revision < kept[-1]]
        old += [path for revision, path in self._found(_DAMAGED).items() if revision < kept[-1]]
        return old + [path for revision, path in logs.items() if revision < followed_by]


_PIECES_AT_ONCE = 512
"""Handed to the kernel in one call; Linux takes 1024."""


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_at(handle: int, pieces: Sequence[Bytes], offset: int) -> None:
    """Write pieces one behind the other into an open file.

    Args:
        handle: of the file.
        pieces: contiguous bytes.
        offset: where the first begins.

    Raises:
        OSError: they could not all be written; a part of them may be.
    """
    for start in range(0, len(pieces), _PIECES_AT_ONCE):
        batch = [memoryview(piece).cast("B") for piece in pieces[start : start + _PIECES_AT_ONCE]]
        fault_injection.writing(sum(piece.nbytes for piece in batch))
        while batch:
            nbytes = os.pwritev(handle, batch, offset)
            offset += nbytes
            while batch and nbytes >= batch[0].nbytes:
                nbytes -= batch.pop(0).nbytes
            if batch:
                batch[0] = batch[0][nbytes:]


def make_folder(path: Path, whose: str) -> None:
    """Make a folder and those above it, unless they are there; they are on the disk when this returns.

    Args:
        path: the folder.
        whose: who needs it, for messages: ``"hub"``.

    Raises:
        UsageError: it can't be made.
    """
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        for folder in reversed(new):
            fsync(folder.parent)
    except OSError as error:
        raise UsageError(
            f"{str(path)!r} can't be the folder of a {whose}: {error.strerror or error}",
            remedy="name a folder that you may write to",
        ) from error


def write_failure(path: Path, error: OSError, remedy: str, done: str = "written") -> CheckpointError:
    """Return the error for a file that could not be written; it says so where the disk is full.

    Args:
        path: the file.
        error: what the system said.
        remedy: what the user can do, one sentence.
        done: what it could not be.
    """
    why = error.strerror or str(error)
    if error.errno in _NO_ROOM:
        why = f"the disk is full ({why})"
    return CheckpointError(f"{str(path)!r} can't be {done}: {why}", remedy=remedy)
