"""Error output of a rank: shown on this terminal, and its end kept for the message of its failure."""

from __future__ import annotations

import contextlib
import os
import pty
import threading
import tty
from pathlib import Path

__all__ = ["StderrTee", "last_lines"]

_TAIL_LINES, _TAIL_NBYTES = 20, 16384


class StderrTee:
    """Copies a child's error output to this terminal, and keeps its end.

    The child sees a terminal if this process has one, so progress bars look as usual.
    """

    def __init__(self) -> None:
        if os.isatty(2):
            self._read, self.write = pty.openpty()
            tty.setraw(self.write)  # keeps line ends as they are
        else:
            self._read, self.write = os.pipe()
        self._end = b""
        self._thread = threading.Thread(target=self._run, name="paceline-stderr", daemon=True)
        self._thread.start()

    def text(self) -> str:
        """Return the end of the output, once the child has ended."""
        self._thread.join(timeout=1.0)  # a child of the child may keep the other end open
        return self._end.decode(errors="replace")

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # EIO: the pseudo terminal was closed
            while data := os.read(self._read, _TAIL_NBYTES):
                self._end = (self._end + data)[-_TAIL_NBYTES:]
                while data:
                    data = data[os.write(2, data) :]
        os.close(self._read)


def last_lines(tee: StderrTee | None, log: Path | None) -> tuple[str, ...]:
    """Return the last lines of a rank's log file, or of what the tee kept; none where neither has any."""
    text = tee.text() if tee else ""
    if log is not None:
        with contextlib.suppress(OSError), log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_NBYTES))
            text = file.read().decode(errors="replace")
    return tuple(text.rstrip().splitlines()[-_TAIL_LINES:])
