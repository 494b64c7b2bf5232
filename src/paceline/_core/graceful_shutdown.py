"""Requests from a launcher to its ranks to leave, before it ends them by signals.

To other ranks, a rank that ends is one that failed. So `paceline.Watchdog` listens, in a file whose name the launcher
passes to each rank: a rank that is requested to leave informs the others, and reports which ranks failed.

    no file     not listening                      "here"      the rank listens
    "failed"    request to leave: a rank failed    "changed"   request to leave: the world changes

After its last report the rank removes the file, and the launcher stops waiting for it.
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
    """Request a rank to leave if it listens; if that can't be written, a signal has to do."""
    if is_listening(path):
        with contextlib.suppress(OSError):
            path.write_text(reason)


def is_listening(path: Path) -> bool:
    """Return whether a rank listens and has not finished its reports."""
    return path.exists()


class ShutdownListener:
    """The side of a rank, which listens from now on if its launcher named a file; errors of the file are ignored."""

    def __init__(self) -> None:
        self._path = Path(os.environ.get(VARIABLE) or os.devnull)
        with contextlib.suppress(OSError):
            self._path.write_text("here")

    def requested(self) -> Reason | None:
        """Return why this rank is to leave, None if it is not."""
        with contextlib.suppress(OSError):
            match self._path.read_text():
                case "failed":
                    return "failed"
                case "changed":
                    return "changed"
        return None

    def done(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):
            if self._path.is_file():
                self._path.unlink()
