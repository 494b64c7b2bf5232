"""One process at a time: a file that is locked, which says who holds it, and is free again when its process ends.

One hub or worker at a time: a lock on a file of its folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from paceline.errors import PacelineError, UsageError

__all__ = ["FileLock", "FolderLock", "LockHolder"]


@dataclass(frozen=True)
class LockHolder:
    """Who holds a lock.

    Attributes:
        own: whether it is this process. told: who it is, in words.
    """

    own: bool
    told: str


class FileLock:
    """A file that one process at a time may hold, until it closes it or ends.

    Args:
        path: the file, in a folder that exists; it is made where it is absent.

    Raises:
        OSError: it can't be opened.
    """

    def __init__(self, path: Path) -> None:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self._file = os.fdopen(handle, "r+b", buffering=0)  # closed with this object at the latest

    def take(self, patience: float, nap: float) -> LockHolder | None:
        """Wait for the lock, and write down who holds it.

        Args:
            patience: seconds to wait for another process; this one is not waited for. nap: between two tries.

        Returns:
            who holds it instead; None: it is held now.

        Raises:
            OSError: its file system has no locks, or it can't be written.
        """
        deadline = time.monotonic() + patience
        while not self._taken():
            holder = self._holder()
            if holder.own or time.monotonic() > deadline:
                return holder
            time.sleep(nap)
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": now}).encode()
        os.pwrite(self._file.fileno(), text, 0)
        os.ftruncate(self._file.fileno(), len(text))
        return None

    def _taken(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _holder(self) -> LockHolder:
        try:
            told = json.loads(os.pread(self._file.fileno(), 1000, 0))
            own = (told["pid"], told["host"]) == (os.getpid(), socket.gethostname())
            return LockHolder(own, f"process {told['pid']} on {told['host']}, since {told['since']}")
        except (ValueError, KeyError, TypeError):
            return LockHolder(False, "a process that has not yet said which it is")

    def close(self) -> None:
        """Let the next one hold it; closing twice is closing once."""
        self._file.close()


_PATIENCE_SECONDS, _NAP_SECONDS = 5.0, 0.05
"""How long a lock is waited for: a process that was killed may take a moment to be gone."""


class FolderLock:
    """Makes this the only one who writes to a folder, until it is closed or its process ends.

    Args:
        path: the file that is locked, in a folder that exists.
        whose: who it is that locks, for messages: ``"hub"``.
        seconds: to wait for another process to end; None: 5.
        busy: type of the error where another process holds it.

    Raises:
        PacelineError: of type `busy`: a process holds it, whose number and host are told.
        UsageError: it can't be locked.
    """

    def __init__(
        self, path: Path, whose: str, *, seconds: float | None = None, busy: type[PacelineError] = UsageError
    ) -> None:
        try:
            self._lock = FileLock(path)
        except OSError as error:
            raise _unlockable(path, error) from error
        try:
            self._take(path, whose, _PATIENCE_SECONDS if seconds is None else seconds, busy)
        except OSError as error:
            self.close()
            raise _unlockable(path, error) from error
        except BaseException:
            self.close()
            raise

    def _take(self, path: Path, whose: str, seconds: float, busy: type[PacelineError]) -> None:
        holder = self._lock.take(seconds, _NAP_SECONDS)
        if holder is not None:
            own = holder.own
            raise busy(
                f"{str(path.parent)!r} is in use by {'this' if own else 'another'} {whose}: {holder.told}",
                remedy=f"{'close it' if own else f'end that {whose}'} first, or name another folder",
            )

    def close(self) -> None:
        """Let the next one write; closing twice is closing once."""
        self._lock.close()


def _unlockable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"{str(path)!r} can't be locked: {error.strerror or error}",
        remedy="name a folder that you may write to, on a file system with locks",
    )
