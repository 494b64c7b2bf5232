"""The folder of a run's checkpoints: which are there, who may write, how one becomes the newest.

    runs/a/
        lock                       held by rank 0 of the run that writes here
        step-00000200/             complete: it has this name only since everything in it is on the disk
        step-00000300.tmp-5f0c…/   being written, or left by a run that died: swept up by the next run
        step-00000100.damaged/     passed over by a resume: kept until enough newer ones are there

A folder is renamed, never overwritten, so the file system must rename in one step. Most do; those over an object
store copy file after file, and are refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from pathlib import Path

from paceline._core.file_lock import FileLock
from paceline._core.files import fsync
from paceline.checkpoint.format.manifest import MANIFEST, SUM, Manifest
from paceline.errors import CheckpointError, UsageError

__all__ = ["CheckpointFolder", "CheckpointLock", "checkpoint_name"]

_COPIES = (
    "s3fs",
    "gcsfuse",
    "goofys",
    "rclone",
    "blobfuse",
    "mountpoint-s3",
    "ossfs",
    "cosfs",
    "jfs-gateway",
)
"""File systems that rename a folder by copying what is in it."""

_PATIENCE_SECONDS, _NAP_SECONDS = 20.0, 0.1
"""How long a lock is waited for: a run that was killed may take a moment to be gone."""


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


class CheckpointFolder:
    """Where the checkpoints of one run are.

    Args:
        path: the folder; it need not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    # ------------------------------------------------------------------ what is there

    def complete(self) -> list[Path]:
        """Return the checkpoints that were completed, the newest first."""
        found = [path for path in self.path.glob("step-*") if path.name[5:].isdecimal() and path.is_dir()]
        return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)

    # ------------------------------------------------------------------ before a run

    def prepare(self) -> None:
        """Make the folder and see whether it is fit to hold checkpoints; nothing in it is touched.

        Raises:
            UsageError: it can't be written, or its file system does not rename a folder in one step.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            kind = _kind_of(self.path, Path("/proc/self/mounts"))
            if any(name in kind for name in _COPIES):
                raise _not_atomic(self.path, f"{kind} copies where others rename")
            self._try_rename()
        except OSError as error:
            raise UsageError(
                f"can't write checkpoints to {str(self.path)!r}: {error.strerror or error}",
                remedy="name a folder that you may write to",
            ) from error

    def _try_rename(self) -> None:
        """Rename a folder as `complete_with` will, and look at what came of it."""
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
                raise _not_atomic(self.path, "a folder that was renamed is another one")
        finally:
            shutil.rmtree(before, ignore_errors=True)
            shutil.rmtree(after, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what runs that died have left half written; only the holder of the lock may."""
        for path in self.path.glob("*.tmp-*"):
            self.remove(path)

    def remove(self, growing: Path) -> None:
        """Remove what was not completed."""
        shutil.rmtree(growing, ignore_errors=True)

    # ------------------------------------------------------------------ during a run

    def growing(self, step: int, mark: str) -> Path:
        """Return where the checkpoint of `step` grows; `mark` tells apart runs that wrote here."""
        return self.path / f"{checkpoint_name(step)}.tmp-{mark}"

    def probe(self, mark: str) -> Path:
        """Return a folder by which ranks find out whether they see the same disk."""
        return self.path / f"probe.tmp-{mark}"

    def complete_with(self, growing: Path, manifest: Manifest) -> Path:
        """Turn `growing`, whose files are on the disk, into the newest checkpoint, and return where it is.

        Raises:
            OSError: it can't be written; what was complete before stays.
        """
        for name, file in manifest.files.items():
            if (growing / name).stat().st_size != file.nbytes:
                raise OSError(errno.EIO, f"{name} is not as long as what was written to it")
        final = self.path / checkpoint_name(manifest.step)
        text = manifest.text()
        for name, content in ((MANIFEST, text), (SUM, manifest.sum_of(text))):
            with open(growing / name, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        fsync(growing)
        if final.exists():  # an earlier try of this step, passed over when the run resumed
            self.set_aside(final)
        os.rename(growing, final)
        fsync(self.path)
        return final

    def set_aside(self, path: Path) -> None:
        """Rename a checkpoint that is not intact, so that no resume reads it again."""
        aside = path.with_suffix(".damaged")
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, aside)

    def remove_old(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints, and what was set aside before those; out of sight first."""
        kept = self.complete()
        old = kept[keep:]
        if len(kept) >= keep:
            last = kept[:keep][-1].name
            old += [path for path in self.path.glob("step-*.damaged") if path.stem < last]
        for path in old:
            gone = path.with_name(f"{path.name}.tmp-old")
            with contextlib.suppress(OSError):
                os.rename(path, gone)
                shutil.rmtree(gone, ignore_errors=True)


class CheckpointLock:
    """Makes one run the only one that writes to a folder, until it is closed or its process ends.

    Args:
        folder: the run's folder, which exists.
        patience: seconds to wait for a run that is about to end.

    Raises:
        CheckpointError: another run holds it; the message says which.
        UsageError: it can't be written, or its file system has no locks.
    """

    def __init__(self, folder: Path, patience: float = _PATIENCE_SECONDS) -> None:
        try:
            self._lock = FileLock(folder / "lock")
            holder = self._lock.take(patience, _NAP_SECONDS)
        except OSError as error:
            raise UsageError(
                f"can't lock {str(folder)!r} for this run: {error.strerror or error}",
                remedy="name another folder, of your own, or on a file system with locks",
            ) from error
        if holder is not None:
            self.close()
            whose, own = "this" if holder.own else "another", holder.own
            raise CheckpointError(
                f"{whose} run writes checkpoints to {str(folder)!r} already: {holder.told}",
                remedy=f"{'close() that Checkpoint' if own else 'end that run'} first, or name another folder",
            )

    def close(self) -> None:
        """Let the next run write; closing twice is closing once."""
        self._lock.close()


def _kind_of(path: Path, mounts: Path) -> str:
    """Return the type and source of the file system that `path` is on, as far as `mounts` tells."""
    best, kind, whole = "", "", str(path.resolve())
    with contextlib.suppress(OSError):
        for line in mounts.read_text(errors="replace").splitlines():
            source, point, type_, *_ = [*line.split(" "), "", "", ""]
            inside = whole == point or whole.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, f"{type_} {source}"
    return kind


def _not_atomic(path: Path, why: str) -> UsageError:
    return UsageError(
        f"{str(path)!r} is on a file system that does not rename folders in one step: {why}",
        remedy="keep checkpoints on a local disk, NFS, Lustre or the like, and copy finished ones elsewhere",
    )
