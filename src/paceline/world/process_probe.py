"""State of processes on this host that are not our children: running, stopped or gone."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Literal

from paceline._core.processes.process_exit import exit_status_of, has_ended
from paceline.world.environment import boot_id

__all__ = ["LocalProcess", "has_process_ended", "host_key", "process_start_ticks"]


def host_key() -> str:
    """Return a text that only processes share that see each other's process ids."""
    namespaces = []
    for name in ("pid", "net"):
        with contextlib.suppress(OSError):
            namespaces.append(os.readlink(f"/proc/self/ns/{name}"))
    return " ".join([socket.gethostname(), boot_id(), *namespaces])


def process_start_ticks(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; 0 if it is gone or the system lacks /proc."""
    return _state_and_start(pid)[1]


def _state_and_start(pid: int) -> tuple[str, int]:
    """Return the state letter and start time of a process (proc(5)); ("", 0) if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[19])
    except (OSError, IndexError, ValueError):
        return "", 0


def has_process_ended(pid: int, start_ticks: int) -> bool:
    """Return whether a process on this host has ended, also if its parent has not noticed; see `LocalProcess`."""
    process = LocalProcess(pid, start_ticks)
    try:
        return process.state() == "gone"
    finally:
        process.close()


class LocalProcess:
    """A process on this host.

    Args:
        pid: process id.
        start_ticks: from `process_start_ticks`; identifies the process, since ids are reused.
    """

    def __init__(self, pid: int, start_ticks: int) -> None:
        self.pid, self.start_ticks = pid, start_ticks
        self.pidfd = -1
        with contextlib.suppress(OSError, AttributeError):
            self.pidfd = os.pidfd_open(pid)

    def state(self) -> Literal["runs", "stopped", "gone"]:
        """Return the present state."""
        if has_ended(self.pidfd):
            return "gone"
        letter, start_ticks = _state_and_start(self.pid)
        if letter in ("T", "t"):
            return "stopped"
        has_proc = self.start_ticks != 0
        ended = letter in ("", "Z", "X") or start_ticks != self.start_ticks
        return "gone" if has_proc and ended else "runs"

    def exit_code(self) -> int | None:
        """Return the exit code; −n if signal n ended the process, None if unknown."""
        return exit_status_of(self.pidfd, self.pid).code

    def close(self) -> None:
        """Release the descriptor."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
