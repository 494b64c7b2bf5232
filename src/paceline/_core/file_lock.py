"""Locks on files, one process at a time: released when the process ends, with the holder named in the file."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from paceline._core.files import open_private
from paceline.errors import PacelineError, UsageError

__all__ = ["FileLock", "FolderLock", "LockHolder"]

_TIMEOUT_SECONDS, _RETRY_SECONDS = 5.0, 0.05
"""How long a folder's lock is waited for: a process that was killed may take a moment to end."""


@dataclass(frozen=True)
class LockHolder:
    """The process that holds a lock.

    Attributes:
        own: whether it is this process.
        description: process, host and time.
    """

    own: bool
    description: str


class FileLock:
    """A file that one process at a time can lock, until it closes it or ends.

    Args:
        path: the file, in a folder that exists; created if it is absent.

    Raises:
        OSError: it can't be opened.
    """

    def __init__(self, path: Path) -> None:
        handle = open_private(path, os.O_RDWR | os.O_CREAT)
        self._file = os.fdopen(handle, "r+b", buffering=0)  # closed with this object at the latest
        _open_locks.add(self)

    def acquire(self, timeout: float, interval: float) -> LockHolder | None:
        """Wait for the lock, and write this process's name to the file.

        Args:
            timeout: seconds to wait for another process; this one is not waited for.
            interval: seconds between two attempts.

        Returns:
            None once the lock is acquired, else its holder.

        Raises:
            OSError: its file system has no locks, or it can't be written.
        """
        deadline = time.monotonic() + timeout
        while not self._try_lock():
            holder = self._holder()
            if holder.own or time.monotonic() > deadline:
                return holder
            time.sleep(interval)
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": now}).encode()
        os.pwrite(self._file.fileno(), text, 0)
        os.ftruncate(self._file.fileno(), len(text))
        return None

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _holder(self) -> LockHolder:
        try:
            found = json.loads(os.pread(self._file.fileno(), 1000, 0))
            own = (found["pid"], found["host"]) == (os.getpid(), socket.gethostname())
            return LockHolder(own, f"process {found['pid']} on {found['host']}, since {found['since']}")
        except (ValueError, KeyError, TypeError):
            return LockHolder(False, "a process that has not written its name yet")

    def close(self) -> None:
        """Release the lock; closing twice is no error."""
        if not self._file.closed:
            with suppress(
                OSError
            ):  # closing releases it too, unless a copy of the descriptor is open elsewhere
                fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()

    def forget(self) -> None:
        """Close a forked child's copy of the file, and leave the lock to the parent."""
        self._file.close()


# A lock of flock(2) belongs to the open file, which a forked child shares: it would outlive its holder.
_open_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_open_locks):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)


class FolderLock:
    """Makes this process the only writer of a folder, until it is closed or the process ends.

    Args:
        path: the file to lock, in the folder, which exists.
        owner: the kind of process, for messages: ``"hub"``.
        timeout: seconds to wait for another process to end.
        busy: type of the error if a process holds the lock.

    Raises:
        PacelineError: of type `busy`: a process, which is named, holds the lock.
        UsageError: the file can't be locked.
    """

    def __init__(
        self,
        path: Path,
        owner: str,
        *,
        timeout: float | None = None,
        busy: type[PacelineError] = UsageError,
    ) -> None:
        self._lock: FileLock | None = None
        try:
            self._lock = FileLock(path)
            holder = self._lock.acquire(_TIMEOUT_SECONDS if timeout is None else timeout, _RETRY_SECONDS)
        except OSError as error:
            self.close()
            raise UsageError(
                f"{str(path)!r} can't be locked: {error.strerror or error}",
                remedy="name a folder that you may write to, on a file system with locks",
            ) from error
        except BaseException:
            self.close()
            raise
        if holder is not None:
            self.close()
            own = holder.own
            raise busy(
                f"{str(path.parent)!r} is in use by {'this' if own else 'another'} {owner}: {holder.description}",
                remedy=f"{'close it' if own else f'end that {owner}'} first, or name another folder",
            )

    def close(self) -> None:
        """Release the lock; closing twice is no error."""
        if self._lock is not None:
            self._lock.close()
