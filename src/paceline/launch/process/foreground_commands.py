"""Commands that run for as long as this one does: one here, or one for each host, with what they write.

Phases of :func:`run_commands`: start all; copy their lines; when one fails, give the others time to fail of the same
cause; end whatever still runs.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from shutil import which
from typing import IO

from paceline._core.child_process import (
    POLL_SECONDS,
    ChildProcess,
    sigterm_raises,
    stop_processes,
    with_pdeathsig,
)
from paceline.errors import UsageError
from paceline.launch.agent.job_outcome import exit_status

__all__ = ["run_commands"]

_FOLLOW_SECONDS = 10.0


def run_commands(command_of_host: Mapping[str, Sequence[str]], follow: float = _FOLLOW_SECONDS) -> int:
    """Run a command for each host, and return the exit code of the first that failed, else 0.

    They end with this process, however it ends.

    Args:
        command_of_host: where there are several, their lines are shown behind the names of their hosts.
        follow: seconds that the others have to end after one has failed.

    Raises:
        UsageError: there is no such program.
    """
    running: dict[str, ChildProcess] = {}
    copies: list[threading.Thread] = []
    with sigterm_raises():
        try:
            for host, command in command_of_host.items():
                running[host] = child = _start(command, piped=len(command_of_host) > 1)
                if child.process.stdout is not None:
                    copies.append(_copy(host, child.process.stdout))
            return _await(running, follow)
        finally:
            stop_processes(list(running.values()))
            for copy in copies:
                copy.join(timeout=1.0)  # a child of the command may live on and hold the other end


def _start(command: Sequence[str], *, piped: bool) -> ChildProcess:
    output = subprocess.PIPE if piped else None
    error = subprocess.STDOUT if piped else None
    env = {"PYTHONUNBUFFERED": "1", **os.environ}
    line = with_pdeathsig(_found(command))
    return ChildProcess(
        subprocess.Popen(
            line, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=error, process_group=0
        )
    )


def _found(command: Sequence[str]) -> list[str]:
    path = which(command[0])
    if path is None:
        raise UsageError(
            f"there is no program {command[0]!r} on this machine", remedy="install it, or name another"
        )
    return [path, *command[1:]]


def _copy(host: str, lines: IO[bytes]) -> threading.Thread:
    """Copy lines to this terminal until there are no more, each behind the host's name."""

    def run() -> None:
        with contextlib.suppress(OSError, ValueError), lines:
            for line in lines:
                sys.stdout.write(f"{host} | {line.decode(errors='replace').rstrip()}\n")
                sys.stdout.flush()

    thread = threading.Thread(target=run, name=f"paceline-lines-{host}", daemon=True)
    thread.start()
    return thread


def _await(running: Mapping[str, ChildProcess], follow: float) -> int:
    """Return the first exit code that is an error, once all have ended or have had time to; else 0."""
    first, deadline = 0, float("inf")
    while time.monotonic() < deadline:
        codes = [child.exit_code() for child in running.values()]
        failed = next((code for code in codes if code), 0)
        if failed and not first:
            first, deadline = failed, time.monotonic() + follow
        if None not in codes:
            break
        time.sleep(POLL_SECONDS)
    return exit_status(first)
