"""Folder with the checkpoints of a run: which are complete, which run may write, how a new one is added.

    runs/a/
        lock                       held by rank 0 of the run that writes here
        step-00000200/             complete: renamed to this only once everything in it is on the disk
        step-00000300.tmp-5f0c…/   being written, or left by a run that died: removed by the next run
        step-00000100.damaged/     skipped by a resume: kept until enough newer ones exist

Folders are renamed, never overwritten, so the file system must rename a folder atomically. Most do; those over object
stores copy file by file, and are refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from pathlib import Path

from paceline._core.file_lock import FolderLock
from paceline._core.files import fsync, make_private_folder, open_private
from paceline.checkpoint.format.manifest import CHECKSUM, MANIFEST, Manifest
from paceline.errors import CheckpointError, UsageError

__all__ = ["CheckpointFolder", "checkpoint_name"]

_NOT_ATOMIC = (
    "s3fs", "gcsfuse", "goofys", "rclone", "blobfuse", "mountpoint-s3", "ossfs", "cosfs", "jfs-gateway",
)  # fmt: skip
"""File systems that rename a folder by copying its files."""

_LOCK_SECONDS = 20.0
"""Wait for the lock: a run that was killed may take a moment to end."""


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        path: the folder; it need not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def complete(self) -> list[Path]:
        """Return the complete checkpoints, newest first."""
        found = [path for path in self.path.glob("step-*") if path.name[5:].isdecimal() and path.is_dir()]
        return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)

    # ------------------------------------------------------------------ before a run

    def prepare(self) -> None:
        """Make the folder, and check that it can hold checkpoints; existing ones are not touched.

        Raises:
            UsageError: it can't be written, or its file system does not rename folders atomically.
        """
        try:
            make_private_folder(self.path)
            kind = _file_system_of(self.path, Path("/proc/self/mounts"))
            if any(name in kind for name in _NOT_ATOMIC):
                raise _not_atomic(self.path, f"{kind} copies instead of renaming")
            self._try_rename()
        except OSError as error:
            raise UsageError(
                f"can't write checkpoints to {str(self.path)!r}: {error.strerror or error}",
                remedy="name a folder that you may write to",
            ) from error

    def _try_rename(self) -> None:
        """Rename a folder as `complete_with` does, and check the result."""
        mark = uuid.uuid4().hex
        before, after = self.probe(mark), self.probe(f"{mark}-after")
        before.mkdir()
        try:
            (before / "mark").write_text(mark)
            inode = before.stat().st_ino
            try:
                os.rename(before, after)
            except OSError as error:
                raise _not_atomic(self.path, f"renaming a folder fails: {error.strerror}") from error
            moved = not before.exists() and (after / "mark").read_text() == mark
            if not moved or after.stat().st_ino != inode:
                raise _not_atomic(self.path, "a renamed folder is another one")
        finally:
            shutil.rmtree(before, ignore_errors=True)
            shutil.rmtree(after, ignore_errors=True)

    def lock(self, seconds: float = _LOCK_SECONDS) -> FolderLock:
        """Make this run the only one that writes to the folder, until the lock is closed or the process ends.

        Raises:
            CheckpointError: another run holds the lock for longer than `seconds`; names it.
            UsageError: the folder can't be written, or its file system has no locks.
        """
        return FolderLock(self.path / "lock", "run", timeout=seconds, busy=CheckpointError)

    def remove_incomplete(self) -> None:
        """Remove incomplete checkpoints of runs that died; only the holder of the lock may call this."""
        for path in self.path.glob("*.tmp-*"):
            shutil.rmtree(path, ignore_errors=True)

    # ------------------------------------------------------------------ during a run

    def staging(self, step: int, mark: str) -> Path:
        """Return the folder in which the checkpoint of `step` is written; `mark` identifies the run."""
        return self.path / f"{checkpoint_name(step)}.tmp-{mark}"

    def probe(self, mark: str) -> Path:
        """Return a folder by which ranks find out whether they see the same disk."""
        return self.path / f"probe.tmp-{mark}"

    def complete_with(self, staging: Path, manifest: Manifest) -> Path:
        """Make `staging`, whose files are on the disk, the newest checkpoint, and return its path.

        Raises:
            OSError: it can't be written; earlier checkpoints stay.
        """
        for name, file in manifest.files.items():
            if (staging / name).stat().st_size != file.nbytes:
                raise OSError(errno.EIO, f"{name} is shorter or longer than what was written to it")
        final = self.path / checkpoint_name(manifest.step)
        text = manifest.to_json()
        for name, content in ((MANIFEST, text), (CHECKSUM, manifest.checksum_line(text))):
            with open(staging / name, "wb", opener=open_private) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        fsync(staging)
        if final.exists():  # from an earlier attempt at this step, skipped when the run resumed
            self.set_aside(final)
        os.rename(staging, final)
        fsync(self.path)
        return final

    def set_aside(self, path: Path) -> None:
        """Rename a damaged checkpoint, so that no resume reads it again."""
        aside = path.with_suffix(".damaged")
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, aside)

    def remove_old(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints, and damaged ones older than those; rename them first."""
        complete = self.complete()
        old = complete[keep:]
        if len(complete) >= keep:
            last = complete[:keep][-1].name
            old += [path for path in self.path.glob("step-*.damaged") if path.stem < last]
        for path in old:
            doomed = path.with_name(f"{path.name}.tmp-old")
            with contextlib.suppress(OSError):
                os.rename(path, doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def _file_system_of(path: Path, mounts: Path) -> str:
    """Return type and source of the file system that `path` is on, according to `mounts`."""
    best, kind, whole = "", "", str(path.resolve())
    with contextlib.suppress(OSError):
        for line in mounts.read_text(errors="replace").splitlines():
            source, point, type_, *_ = [*line.split(" "), "", "", ""]
            inside = whole == point or whole.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, f"{type_} {source}"
    return kind


def _not_atomic(path: Path, reason: str) -> UsageError:
    return UsageError(
        f"{str(path)!r} is on a file system that does not rename folders atomically: {reason}",
        remedy="keep checkpoints on a local disk, NFS or Lustre, and copy complete ones elsewhere",
    )
