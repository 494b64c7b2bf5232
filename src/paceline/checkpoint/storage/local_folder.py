"""Folder with the checkpoints of a run, on a disk that all ranks share.

    runs/a/
        lock                       held by rank 0 of the run that writes here
        step-00000200/             complete: renamed to this only once everything in it is on the disk
        step-00000300.tmp-5f0c…/   being written, or left by a run that died: removed by the next run
        step-00000100.damaged/     skipped by a resume: kept until enough newer ones exist

Folders are renamed, never overwritten, so the file system must rename a folder atomically. Most do; those over object
stores copy file by file, and are refused: name the object store by its URL instead.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from paceline._core.file_lock import FolderLock
from paceline._core.files import fsync, make_private_folder, open_private
from paceline.errors import CheckpointError, UsageError

__all__ = ["LocalFiles", "LocalFolder", "checkpoint_name", "step_of"]

_NOT_ATOMIC = (
    "s3fs", "gcsfuse", "goofys", "rclone", "blobfuse", "mountpoint-s3", "ossfs", "cosfs", "jfs-gateway",
)  # fmt: skip
"""File systems that rename a folder by copying its files."""

_LOCK_SECONDS = 20.0
"""Wait for the lock: a run that was killed may take a moment to end."""


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    """Return the step of a checkpoint by its name.

    Example:
        >>> step_of(checkpoint_name(200))
        200
    """
    return int(name.rpartition("-")[2])


class _LocalFile:
    """An open file."""

    _handle = -1

    def __init__(self, path: Path | str) -> None:
        self._handle = os.open(path, os.O_RDONLY)
        self.nbytes = os.fstat(self._handle).st_size

    def read_into(self, start: int, target: memoryview) -> None:
        while len(target):
            nbytes = os.preadv(self._handle, [target], start)
            if not nbytes:
                raise EOFError(f"it ends at byte {start}")
            start, target = start + nbytes, target[nbytes:]

    def for_thread(self) -> contextlib.AbstractContextManager[_LocalFile]:
        """Return the same file with a handle of its own, since the kernel reads ahead for each handle."""
        try:
            return contextlib.closing(_LocalFile(f"/proc/self/fd/{self._handle}"))  # also if it was removed
        except OSError:
            return contextlib.nullcontext(self)

    def close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def __del__(self) -> None:
        self.close()


class LocalFiles:
    """The files of a checkpoint in a folder of its own.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.name

    @property
    def location(self) -> str:
        """Path of the folder."""
        return str(self.path)

    def read(self, file: str) -> bytes:
        """Return a small file; errors as for `CheckpointFiles.read`."""
        return (self.path / file).read_bytes()

    def open(self, file: str) -> _LocalFile:
        """Open a file; errors as for `CheckpointFiles.read`."""
        return _LocalFile(self.path / file)


class _LocalAttempt:
    """A checkpoint that is written to a folder with a temporary name, the same for all ranks."""

    prefix = ""

    def __init__(self, store: LocalFolder, name: str, mark: str) -> None:
        self._store, self._name = store, name
        self.folder = store.path / f"{name}.tmp-{mark}"
        make_private_folder(self.folder)

    def publish(self, names: Sequence[str]) -> None:
        pass  # they are there

    def link(self, name: str, earlier: str) -> bool:
        try:
            os.link(self._store.path / earlier / name, self.folder / name)
        except OSError:  # file systems without hard links, or the checkpoint is gone
            return False
        return True

    def report(self, name: str, text: bytes) -> None:
        waiting = self.folder / f".{name}"
        _write(waiting, text)
        os.replace(waiting, self.folder / name)  # the last step: from here on rank 0 may rename the folder

    def reported(self, name: str) -> bytes | None:
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def complete(self, last: Sequence[tuple[str, bytes]], sizes: Mapping[str, int]) -> None:
        for name, nbytes in sizes.items():
            if (self.folder / name).stat().st_size != nbytes:
                raise OSError(errno.EIO, f"{name} is shorter or longer than what was written to it")
        for name, content in last:
            _write(self.folder / name, content)
        fsync(self.folder)
        final = self._store.path / self._name
        if final.exists():  # from an earlier attempt at this step, skipped when the run resumed
            self._store.set_aside(self._name)
        os.rename(self.folder, final)
        fsync(self._store.path)

    def abandon(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class LocalFolder:
    """The checkpoints of one run, in a folder. See `CheckpointStore` for the methods.

    Args:
        path: the folder; it need not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()  # the program may change its directory

    @property
    def location(self) -> str:
        """The path."""
        return str(self.path)

    def names(self) -> list[str]:
        """Return the names of complete checkpoints, newest first."""
        found = [
            path.name for path in self.path.glob("step-*") if path.name[5:].isdecimal() and path.is_dir()
        ]
        return sorted(found, key=step_of, reverse=True)

    def files(self, name: str) -> LocalFiles:
        """Return the files of a checkpoint."""
        return LocalFiles(self.path / name)

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
        """Rename a folder as an attempt does, and check the result."""
        mark = uuid.uuid4().hex
        before, after = self._probe(mark), self._probe(f"{mark}-after")
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

    def _probe(self, mark: str) -> Path:
        return self.path / f"probe.tmp-{mark}"

    def put_probe(self, mark: str) -> None:
        """Leave a mark by which ranks find out whether they see the same disk."""
        self._probe(mark).mkdir()

    def sees_probe(self, mark: str) -> bool:
        """Return whether this rank sees the mark."""
        return self._probe(mark).is_dir()

    def remove_probe(self, mark: str) -> None:
        """Remove the mark."""
        shutil.rmtree(self._probe(mark), ignore_errors=True)

    # ------------------------------------------------------------------ during a run

    def begin(self, step: int, mark: str) -> _LocalAttempt:
        """Begin to write the checkpoint of `step`.

        Raises:
            OSError: its folder can't be made.
        """
        return _LocalAttempt(self, checkpoint_name(step), mark)

    def set_aside(self, name: str) -> None:
        """Rename a damaged checkpoint, so that no resume reads it again."""
        path = self.path / name
        aside = path.with_suffix(".damaged")
        if not path.exists():  # another call was faster
            return
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, aside)

    def remove(self, names: Iterable[str]) -> None:
        """Remove complete checkpoints, and damaged ones older than all that are left; rename them first."""
        old = [self.path / name for name in names]
        left = [name for name in self.names() if self.path / name not in old]
        if left:
            old += [
                path for path in self.path.glob("step-*.damaged") if step_of(path.stem) < step_of(left[-1])
            ]
        for path in old:
            doomed = path.with_name(f"{path.name}.tmp-old")
            with contextlib.suppress(OSError):
                os.rename(path, doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    """Write a private file, and flush it to the disk."""
    with open(path, "wb", opener=open_private) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


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
        remedy="keep checkpoints on a local disk, NFS or Lustre, or name the object store by its URL, such as s3://…",
    )
