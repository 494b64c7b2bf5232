"""Requests from a launcher to its ranks to leave, before it ends them by signals.

To other ranks, a rank that ends is one that failed. So `paceline.Watchdog` listens, in a file whose name the launcher
passes to each rank: a rank that is requested to leave informs the others, and reports which ranks failed.

    no file     not listening                      "here"      the rank listens
    "failed"    request to leave: a rank failed    "changed"   request to leave: the world changes

After its last report the rank removes the file, and the launcher stops waiting for it.

To `paceline.Checkpoint`, SIGTERM is a warning, after which the ranks save together. They can't once one has failed, so
a rank that does notes it in a second file, and the launcher then ends it by SIGKILL at once.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Literal

__all__ = [
    "VARIABLE",
    "Reason",
    "ShutdownListener",
    "is_listening",
    "note_saves_on_sigterm",
    "request_shutdown",
    "saves_file",
]

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


def saves_file(path: Path) -> Path:
    """Return the file that exists once a rank saves on SIGTERM, beside the one by which it is requested to leave."""
    return path.with_name(f"{path.name}.saves")


def note_saves_on_sigterm() -> None:
    """Note for the launcher, if there is one, that SIGTERM has this rank save, and nothing else."""
    name = os.environ.get(VARIABLE)
    if name:
        with contextlib.suppress(OSError):
            saves_file(Path(name)).touch()


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
