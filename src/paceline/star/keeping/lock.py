"""One hub or worker at a time: a lock on a file of its folder."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import UsageError
from paceline.locking import FileLock

__all__ = ["Lock"]

_PATIENCE_SECONDS, _NAP_SECONDS = 5.0, 0.05
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
            self._lock = FileLock(path)
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
        holder = self._lock.take(_PATIENCE_SECONDS, _NAP_SECONDS)
        if holder is not None:
            own = holder.own
            raise UsageError(
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
