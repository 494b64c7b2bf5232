"""Child processes with their process groups: exit codes, signals, termination."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

from paceline._core.processes import pdeathsig

__all__ = ["POLL_SECONDS", "ChildProcess", "sigterm_raises", "stop_processes", "with_pdeathsig"]

POLL_SECONDS = 0.05
"""Between two polls of children."""

_TERMINATE_SECONDS = 5.0  # between SIGTERM and SIGKILL


@dataclass(frozen=True)
class ChildProcess:
    """A process that leads its own process group, so that its children end with it."""

    process: subprocess.Popen[bytes]

    def exit_code(self) -> int | None:
        """Return the exit code (−n: ended by signal n), None while it runs; it is not reaped."""
        if self.process.returncode is not None:
            return self.process.returncode
        ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def signal(self, number: int) -> None:
        """Send a signal to the process alone, unless it has ended."""
        if self.exit_code() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.process.pid, number)

    def signal_group(self, number: int) -> None:
        """Send a signal to the process and its children, unless it was reaped: its id may be another's then."""
        if self.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def with_pdeathsig(command: Sequence[str]) -> list[str]:
    """Return the command that runs `command` so that it ends with this process, however that ends."""
    return [sys.executable, "-I", "-S", pdeathsig.__file__, str(os.getpid()), *command]


def stop_processes(running: Sequence[ChildProcess], seconds: float | None = None) -> None:
    """End every process and its children: by SIGTERM, and after `seconds` (default: 5) by SIGKILL."""
    for child in running:
        if child.exit_code() is None:
            child.signal_group(signal.SIGTERM)
            child.signal_group(signal.SIGCONT)
    deadline = time.monotonic() + (_TERMINATE_SECONDS if seconds is None else seconds)
    while time.monotonic() < deadline and any(child.exit_code() is None for child in running):
        time.sleep(POLL_SECONDS)
    for child in running:
        child.signal_group(signal.SIGKILL)
        child.process.wait()


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that children are ended in order; in the main thread only.

    A signal that this process ignores (SIGHUP under nohup) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    handled = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
