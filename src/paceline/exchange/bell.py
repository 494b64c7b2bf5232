"""A bell: any thread rings it, and one that waits for several things at once hears it."""

from __future__ import annotations

import os
from threading import Lock

__all__ = ["Bell"]


class Bell:
    """Has a file descriptor that can be read from once it was rung (eventfd(2)).

    Example:
        >>> bell = Bell()
        >>> bell.ring()
        >>> bell.hush(), bell.hush()
        (True, False)
        >>> bell.close()
    """

    def __init__(self) -> None:
        self._lock = Lock()  # a number that was closed may be another file's soon
        self._handle = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor, −1 once it is closed."""
        return self._handle

    def ring(self) -> None:
        """Ring; from any thread, and in vain once it is closed."""
        with self._lock:
            if self._handle >= 0:
                os.eventfd_write(self._handle, 1)

    def hush(self) -> bool:
        """Return whether it was rung since the last call."""
        try:
            return os.eventfd_read(self._handle) > 0
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Give the descriptor back; closing twice is closing once."""
        with self._lock:
            if self._handle >= 0:
                os.close(self._handle)
            self._handle = -1
