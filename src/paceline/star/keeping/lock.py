"""One process at a time: a lock on a file, which says who holds it and ends with its process."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from datetime import datetime
from pathlib import Path

from paceline.errors import UsageError

__all__ = ["Lock"]

_PATIENCE_SECONDS = 5.0
"""How long a lock is waited for: a process that was killed may take a moment to be gone."""


class Lock:
    """Makes this the only one who writes to a folder, until it is closed or its process ends.

    Args:
        path: the file that is locked, in a folder that exists.
        whose: who it is that locks, for messages: ``"hub"``.

    Raises:
        UsageError: another process holds it, whose number and host are told; or it can't be locked.
    """

    def __init__(self, path: Path, whose: str) -> None:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            self._file = os.fdopen(handle, "r+b", buffering=0)  # closed with this object at the latest
        except OSError as error:
            raise _unlockable(path, error) from error
        try:
            self._take(path, whose)
        except OSError as error:
            self.close()
            raise _unlockable(path, error) from error
        except BaseException:
            self.close()
            raise

    def _take(self, path: Path, whose: str) -> None:
        """Wait for the lock, and write down who holds it."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self._taken():
            own, holder = self._holder()
            if own or time.monotonic() > deadline:
                raise UsageError(
                    f"{str(path.parent)!r} is in use by {'this' if own else 'another'} {whose}: {holder}",
                    remedy=f"{'close it' if own else f'end that {whose}'} first, or name another folder",
                )
            time.sleep(0.05)
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": now}).encode()
        os.pwrite(self._file.fileno(), text, 0)
        os.ftruncate(self._file.fileno(), len(text))

    def _taken(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _holder(self) -> tuple[bool, str]:
        """Return whether this process holds it, and who does, in words."""
        try:
            told = json.loads(os.pread(self._file.fileno(), 1000, 0))
            own = (told["pid"], told["host"]) == (os.getpid(), socket.gethostname())
            return own, f"process {told['pid']} on {told['host']}, since {told['since']}"
        except (ValueError, KeyError, TypeError):
            return False, "a process that has not yet said which it is"

    def close(self) -> None:
        """Let the next one write; closing twice is closing once."""
        self._file.close()


def _unlockable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"{str(path)!r} can't be locked: {error.strerror or error}",
        remedy="name a folder that you may write to, on a file system with locks",
    )
