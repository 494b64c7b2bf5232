"""An orderly end: before a launcher ends ranks by signals, it asks those that listen to leave by themselves.

A rank that the others see end is to them one that failed. So `paceline.Watchdog` listens, in a file that the launcher
names to each rank: a rank that is asked tells the others that it leaves, and whom it knows to have failed.

    no file     nobody listens                  "here"      the rank listens
    "failed"    it is to leave: a rank failed   "changed"   it is to leave: the world is to be another one

When a rank has nothing to say, it removes the file; the launcher waits no longer for it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Literal

__all__ = ["VARIABLE", "Reason", "ShutdownListener", "is_listening", "request_shutdown"]

VARIABLE = "PACELINE_LEAVE_FILE"
"""Names the file to a rank."""

Reason = Literal["failed", "changed"]


def request_shutdown(path: Path, reason: Reason) -> None:
    """Ask a rank to leave, if it listens; where that can't be written down, a signal will have to do."""
    if is_listening(path):
        with contextlib.suppress(OSError):
            path.write_text(reason)


def is_listening(path: Path) -> bool:
    """Return whether a rank listens, and has not yet said all that it has to say."""
    return path.exists()


class ShutdownListener:
    """The side of a rank, which listens from now on, unless its launcher asks nobody.

    What goes wrong with the file is nothing to fail for.
    """

    def __init__(self) -> None:
        self._path = Path(os.environ.get(VARIABLE) or os.devnull)
        with contextlib.suppress(OSError):
            self._path.write_text("here")

    def asked(self) -> Reason | None:
        """Return why this rank is asked to leave, None if it is not."""
        with contextlib.suppress(OSError):
            match self._path.read_text():
                case "failed":
                    return "failed"
                case "changed":
                    return "changed"
        return None

    def done(self) -> None:
        """Tell that this rank listens no more."""
        with contextlib.suppress(OSError):
            if self._path.is_file():
                self._path.unlink()
