"""A rank as a process of this machine: started on a leash, its output kept, its end noticed at once.

The files of the ranks of a run: where they write, and in which they are asked to leave.
"""

from __future__ import annotations

import contextlib
import os
import pty
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tty
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from paceline._core.child_process import POLL_SECONDS, ChildProcess, with_pdeathsig

__all__ = ["RankLogs", "RankProcess", "StderrTee", "start_rank", "wait_for_exit"]

_TAIL_LINES = 20


_TAIL_NBYTES = 16384


class StderrTee:
    """Error output on its way to this terminal, of which the end is kept.

    Whoever writes finds a terminal where this process has one: its progress bars look as usual.
    """

    def __init__(self) -> None:
        if os.isatty(2):
            self._read, self.write = pty.openpty()
            tty.setraw(self.write)  # lines end as they were written
        else:
            self._read, self.write = os.pipe()
        self._end = b""
        self._thread = threading.Thread(target=self._run, name="paceline-stderr", daemon=True)
        self._thread.start()

    def text(self) -> str:
        """Return the end of what was written, once the writer has ended."""
        self._thread.join(timeout=1.0)  # a child of it may live on and hold the other end
        return self._end.decode(errors="replace")

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # a pseudo terminal that all have left: EIO
            while data := os.read(self._read, _TAIL_NBYTES):
                self._end = (self._end + data)[-_TAIL_NBYTES:]
                while data:
                    data = data[os.write(2, data) :]
        os.close(self._read)


@dataclass(frozen=True)
class RankProcess(ChildProcess):
    """A rank of a world; its output goes to `log`, or to this terminal, which `copy` may follow."""

    rank: int
    local_rank: int
    log: Path | None = None
    copy: StderrTee | None = None

    def tail(self, lines: int = _TAIL_LINES) -> tuple[str, ...]:
        """Return the last lines that it wrote, as far as they were kept."""
        text = self.copy.text() if self.copy else ""
        if self.log is not None:
            with contextlib.suppress(OSError), self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_NBYTES))
                text = file.read().decode(errors="replace")
        return tuple(text.rstrip().splitlines()[-lines:])


def start_rank(
    argv: Sequence[str],
    env: Mapping[str, str],
    rank: int,
    local_rank: int,
    log: Path | None,
    *,
    follow: bool = False,
) -> RankProcess:
    """Start ``python *argv`` with the variables `env` as a rank that ends with this process.

    Args:
        argv: arguments to this Python.
        env: all variables.
        rank, local_rank: its numbers in the world and on this machine.
        log: file for its output; None: this terminal.
        follow: keep the end of what it writes as errors to this terminal.
    """
    copy = StderrTee() if follow and log is None else None
    with contextlib.ExitStack() as files:
        output = files.enter_context(log.open("wb")) if log else None
        if copy:
            files.callback(os.close, copy.write)
        process = subprocess.Popen(
            with_pdeathsig([sys.executable, *argv]),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else copy and copy.write,
            process_group=0,
        )
    return RankProcess(process, rank, local_rank, log, copy)


def wait_for_exit(running: Sequence[ChildProcess], seconds: float) -> None:
    """Return as soon as one of the processes that still run ends, and after `seconds` at the latest."""
    still = [one for one in running if one.exit_code() is None]
    if not still or not hasattr(os, "pidfd_open"):
        time.sleep(min(seconds, POLL_SECONDS) if still else seconds)
        return
    ends = select.poll()
    with contextlib.ExitStack() as files:
        for one in still:
            end = os.pidfd_open(one.process.pid)
            files.callback(os.close, end)
            ends.register(end, select.POLLIN)
        ends.poll(seconds * 1000)


class RankLogs:
    """Files of one host, as long as a with-statement lasts; logs in a folder that was named, for good.

    Rank 0 writes to the terminal. Logs of the first start are ``rank<k>.log``, those after restart n
    ``restart<n>/rank<k>.log``.

    Args:
        folder: where logs go; None: kept only to explain a failure.
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

    def leave_file(self, local_rank: int) -> Path:
        """Return the file in which a rank is asked to leave (`paceline._core.graceful_shutdown`)."""
        return self._private / f"leave{local_rank}"

    def of(self, rank: int, restart: int) -> Path | None:
        """Return the file for a rank after so many restarts, None for the terminal; its folder is made."""
        if rank == 0:
            return None
        base = self._folder or self._private
        folder = base / f"restart{restart}" if restart else base
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"rank{rank}.log"
