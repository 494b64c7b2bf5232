"""A rank as a process of this machine: its start, end and exit status."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline._core.cpu_cores import usable_cores
from paceline._core.network_interfaces import list_interfaces
from paceline._core.processes.child_process import POLL_SECONDS, ChildProcess, with_pdeathsig
from paceline.launch.process.rank_output import StderrTee, last_lines

__all__ = [
    "RankProcess",
    "default_environment",
    "exit_remedy",
    "exit_status",
    "loopback_environment",
    "start_rank",
    "wait_for_exit",
]


@dataclass(frozen=True)
class RankProcess(ChildProcess):
    """A rank of a world; its output goes to `log`, or to this terminal, optionally through `tee`."""

    rank: int
    local_rank: int
    log: Path | None = None
    tee: StderrTee | None = None

    def tail(self) -> tuple[str, ...]:
        """Return the last lines of output, as far as they were kept."""
        return last_lines(self.tee, self.log)


def start_rank(
    argv: Sequence[str],
    env: Mapping[str, str],
    rank: int,
    local_rank: int,
    log: Path | None,
    *,
    follow: bool = False,
) -> RankProcess:
    """Start ``python *argv`` as a rank that ends with this process.

    Args:
        argv: arguments to this Python.
        env: the complete environment.
        rank: number in the world.
        local_rank: number on this machine.
        log: file for its output; None: this terminal.
        follow: keep the end of the error output that it writes to this terminal.
    """
    tee = StderrTee() if follow and log is None else None
    with contextlib.ExitStack() as files:
        output = files.enter_context(log.open("wb")) if log else None
        if tee:
            files.callback(os.close, tee.write)
        process = subprocess.Popen(
            with_pdeathsig([sys.executable, *argv]),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else tee and tee.write,
            process_group=0,
        )
    return RankProcess(process, rank, local_rank, log, tee)


def default_environment(ranks: int) -> dict[str, str]:
    """Return the default variables of one of `ranks` ranks on this machine: its share of the cores as threads."""
    threads = str(max(1, int(usable_cores() / ranks)))
    return {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}


def loopback_environment() -> dict[str, str]:
    """Return the variables with which gloo and NCCL listen on this machine only, for ranks of a single host."""
    names = [one.name for one in list_interfaces() if one.loopback and one.up]
    return {name: names[0] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if names}


def wait_for_exit(running: Sequence[ChildProcess], seconds: float) -> None:
    """Return as soon as one of the running processes ends, and after `seconds` at the latest."""
    alive = [one for one in running if one.exit_code() is None]
    if not alive or not hasattr(os, "pidfd_open"):
        time.sleep(min(seconds, POLL_SECONDS) if alive else seconds)
        return
    poll = select.poll()
    with contextlib.ExitStack() as files:
        for one in alive:
            pidfd = os.pidfd_open(one.process.pid)
            files.callback(os.close, pidfd)
            poll.register(pidfd, select.POLLIN)
        poll.poll(seconds * 1000)


def exit_status(code: int | None) -> int:
    """Return the exit status of a process as a shell reports it; None: unknown.

    Example:
        >>> exit_status(3), exit_status(-9), exit_status(None)
        (3, 137, 1)
    """
    return 1 if code is None else code if code >= 0 else 128 - code


def exit_remedy(exit_code: int | None) -> str:
    """Return the remedy for a rank that ended with this exit code; −n: by signal n."""
    if exit_code == -signal.SIGKILL:
        return "a process killed from outside often was out of memory: try fewer ranks or a smaller batch"
    return "correct what its output says; the other ranks have been ended"
