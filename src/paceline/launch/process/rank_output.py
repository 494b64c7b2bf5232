"""Output of ranks: log files, or this terminal; its end is kept for the message of a failure."""

from __future__ import annotations

import contextlib
import itertools
import os
import pty
import shutil
import tempfile
import threading
import tty
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from paceline.errors import UsageError
from paceline.world.live_file import dead_marker

__all__ = ["LogFollower", "RankLogs", "StderrTee", "check_log_dir", "last_lines"]

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


class LogFollower:
    """Copies to this terminal what a rank writes into its log once it is rank 0.

    Args:
        log: of the rank.
        leads: returns whether it is rank 0; it stays so until it ends.
    """

    def __init__(self, log: Path, leads: Callable[[], bool]) -> None:
        self._log, self._leads = log, leads
        self._position, self._follows = 0, False

    def copy(self) -> None:
        """Copy what is new; the launcher calls this often, and once the rank has ended."""
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            if not self._follows:  # what it writes after this may be rank 0's
                self._position, before = file.seek(0, os.SEEK_END), self._position
                if not self._leads():
                    return
                self._follows, self._position = True, before
            file.seek(self._position)
            while data := file.read(_TAIL_NBYTES):
                self._position += len(data)
                while data:
                    data = data[os.write(1, data) :]


def last_lines(tee: StderrTee | None, log: Path | None) -> tuple[str, ...]:
    """Return the last lines of a rank's log file, or of what the tee kept; none where neither has any."""
    text = tee.text() if tee else ""
    if log is not None:
        with contextlib.suppress(OSError), log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_NBYTES))
            text = file.read().decode(errors="replace")
    return tuple(text.rstrip().splitlines()[-_TAIL_LINES:])


def check_log_dir(folder: Path | None) -> None:
    """Create the folder for logs; raise UsageError if it can't be created or written."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"log_dir {folder} can't be written: {error.strerror}",
            remedy="name a folder that you may write to",
        ) from error


class RankLogs:
    """Logs and other files of one host's ranks: in a private folder for the duration of a with-statement.

    Rank 0 writes to the terminal, to which the log of a rank that takes its place is copied. Logs of the first start
    are ``rank<k>.log``, those after restart n ``restart<n>/rank<k>.log``, and those of processes that joined the
    running world ``rank<k>.1.log`` and so on.

    Args:
        folder: for permanent logs; None: they are kept only to explain a failure.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def __enter__(self) -> RankLogs:
        self._private = Path(tempfile.mkdtemp(prefix="paceline-run-"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._private, ignore_errors=True)

    def shutdown_file(self, local_rank: int) -> Path:
        """Return the file that requests a rank's shutdown (`paceline._core.processes.graceful_shutdown`)."""
        return self._private / f"leave{local_rank}"

    def live_file(self, member: str) -> Path:
        """Return the file by which a rank reports that it can recover in place (`paceline.world.live_file`)."""
        return self._private / f"{member.replace('/', '-')}.live"

    def mark_dead(self, member: str) -> None:
        """Let the ranks of this host know that a process has ended."""
        with contextlib.suppress(OSError):
            dead_marker(self._private, member).touch()

    def clear_marks(self) -> None:
        """Remove what the ranks of an earlier world left; all of them have ended."""
        for pattern in ("*.live", "*.live.part", "*.dead"):
            for path in self._private.glob(pattern):
                path.unlink(missing_ok=True)

    def store_file(self, restart: int) -> Path:
        """Return the file in which the ranks of a single host meet after a restart; others can't enter its folder."""
        return self._private / f"store{restart}"

    def path(self, rank: int, restart: int, *, joiner: bool = False) -> Path | None:
        """Return the log file of a rank after a restart, None for the terminal; its folder is created.

        Args:
            rank: number in the world.
            restart: number of the world.
            joiner: whether the process joins the running world: its log gets the next free name.
        """
        if rank == 0:
            return None
        base = self._folder or self._private
        folder = base / f"restart{restart}" if restart else base
        folder.mkdir(parents=True, exist_ok=True)
        if joiner:
            names = (folder / f"rank{rank}.{number}.log" for number in itertools.count(1))
            return next(name for name in names if not name.exists())
        for old in folder.glob(f"rank{rank}.*.log"):  # of an earlier job in this folder
            old.unlink(missing_ok=True)
        return folder / f"rank{rank}.log"
