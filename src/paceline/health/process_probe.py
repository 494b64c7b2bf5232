"""Processes of this host that are not our children: whether they run, are stopped, or are gone.

How this rank stands, as it tells the others: what its training thread wrote down, and whether that thread moves.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass
from typing import Literal

from paceline._core.process_exit import exit_status_of, has_ended
from paceline._core.step_state import step_state
from paceline.health import stack_probe
from paceline.health.heartbeat import Heartbeat
from paceline.world.environment import boot_id

__all__ = ["ProbedProcess", "RankState", "host_key", "start_of"]


def host_key() -> str:
    """Return what processes have in common that see each other's process ids, and nobody else."""
    spaces = []
    for name in ("pid", "net"):
        with contextlib.suppress(OSError):
            spaces.append(os.readlink(f"/proc/self/ns/{name}"))
    return " ".join([socket.gethostname(), boot_id(), *spaces])


def start_of(pid: int) -> int:
    """Return when a process began, in ticks since the boot; 0 if it is gone, or the system does not tell."""
    return _stat(pid)[1]


def _stat(pid: int) -> tuple[str, int]:
    """Return state and start of a process (proc(5)), ("", 0) if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[19])
    except (OSError, IndexError, ValueError):
        return "", 0


@dataclass
class ProbedProcess:
    """A process of this host.

    Args:
        pid: its number.
        start: when it began, as `start_of` told it: numbers are used again.
    """

    pid: int
    start: int

    def __post_init__(self) -> None:
        self.pidfd = -1
        with contextlib.suppress(OSError, AttributeError):
            self.pidfd = os.pidfd_open(self.pid)

    def state(self) -> Literal["runs", "stopped", "gone"]:
        """Return how it is."""
        if has_ended(self.pidfd):
            return "gone"
        letter, start = _stat(self.pid)
        if letter in ("T", "t"):
            return "stopped"
        known = self.start != 0  # else this system tells nothing of processes
        return "gone" if known and (letter in ("", "Z", "X") or start != self.start) else "runs"

    def code(self) -> int | None:
        """Return how it ended: its exit code, −n where signal n ended it, None if nobody can tell."""
        return exit_status_of(self.pidfd, self.pid).code

    def close(self) -> None:
        """Let go of it."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class RankState:
    """Of the training thread.

    Args:
        ident: the thread.

    Attributes:
        fingerprint: of its stack, when it was looked at last.
        since: when it was found to have moved, a value of ``time.monotonic()``.
    """

    def __init__(self, ident: int) -> None:
        self._ident = ident
        self.fingerprint, self.since = 0, time.monotonic()
        self._called_since = 0.0  # a collective that nobody wrote down

    def row(self, rank: int, sequence: int, stopped: tuple[int, ...]) -> Heartbeat:
        """Look at the thread, and return the row that tells of it."""
        now, frame = time.monotonic(), stack_probe.frame_of(self._ident)
        fingerprint = stack_probe.fingerprint(frame)
        if fingerprint != self.fingerprint:
            self.fingerprint, self.since = fingerprint, now
        waiting, age = step_state.waiting, time.perf_counter() - step_state.since
        if waiting or not stack_probe.in_collective(frame):
            self._called_since = 0.0
        else:
            self._called_since = self._called_since or now
            waiting, age = True, now - self._called_since
        return Heartbeat(
            rank,
            sequence,
            step_state.step,
            step_state.phase,
            step_state.task,
            step_state.bucket,
            waiting,
            max(0.0, age),
            now - self.since,
            step_state.rounds,
            step_state.busy_seconds,
            step_state.sees_waiting,
            stopped,
        )
