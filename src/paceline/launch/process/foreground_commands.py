"""Runs commands in the foreground: one, or one per host with its output labelled.

All commands are started; when one fails, the others get time to fail of the same cause; then what still runs is ended.
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

from paceline._core.processes.child_process import (
    POLL_SECONDS,
    ChildProcess,
    stop_processes,
    with_pdeathsig,
)
from paceline._core.processes.warning_signals import WarnedExit, warnings_raise
from paceline.errors import RankFailed, UsageError
from paceline.launch.process.rank_process import exit_status
from paceline.world.live_file import LEFT_EXIT_CODE

__all__ = ["run_commands"]

_FOLLOW_SECONDS = 10.0


def run_commands(
    command_of_host: Mapping[str, Sequence[str]],
    follow: float = _FOLLOW_SECONDS,
    *,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> int:
    """Run a command per host, and return the first exit status that is not 0, else 0.

    The commands end with this process, however it ends. SIGTERM and SIGUSR1 are passed on to them once, so that ranks
    may save and leave; a second signal ends all at once.

    Args:
        command_of_host: if there are several, their output lines are prefixed with the names of their hosts.
        follow: seconds that the others have to end after one has failed.
        env: variables to set in addition to those of this process.
        timeout: seconds until the commands count as hung; None: no limit.

    Raises:
        UsageError: a program does not exist.
        RankFailed: time was up; the commands have been ended.
        SystemExit: after SIGTERM or SIGUSR1: code 75 if a command ended with that, else 128 + the number.
    """
    variables = {"PYTHONUNBUFFERED": "1", **os.environ, **(env or {})}
    running: list[ChildProcess] = []
    copiers: list[threading.Thread] = []
    warned = False
    with warnings_raise():
        try:
            for host, command in command_of_host.items():
                child = _start(command, variables, piped=len(command_of_host) > 1)
                running.append(child)
                if child.process.stdout is not None:
                    copiers.append(_copy_lines(host, child.process.stdout))
            return exit_status(_wait(running, follow, timeout))
        except WarnedExit as warning:
            warned = True
            for child in running:
                child.signal(warning.number)
            codes = _wait_for_all(running)
            raise SystemExit(LEFT_EXIT_CODE if LEFT_EXIT_CODE in codes else warning.code) from None
        finally:
            stop_processes(running, 0.0 if warned else None)
            for thread in copiers:
                thread.join(timeout=1.0)  # a child of the command may keep the other end open


def _start(command: Sequence[str], env: Mapping[str, str], *, piped: bool) -> ChildProcess:
    path = which(command[0])
    if path is None:
        raise UsageError(
            f"no program {command[0]!r} on this machine", remedy="install it, or name another one"
        )
    return ChildProcess(
        subprocess.Popen(
            with_pdeathsig([path, *command[1:]]),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else None,
            stderr=subprocess.STDOUT if piped else None,
            process_group=0,
        )
    )


def _copy_lines(host: str, lines: IO[bytes]) -> threading.Thread:
    """Copy lines to this terminal in a thread, each prefixed with the host's name."""

    def run() -> None:
        with contextlib.suppress(OSError, ValueError), lines:
            for line in lines:
                sys.stdout.write(f"{host} | {line.decode(errors='replace').rstrip()}\n")
                sys.stdout.flush()

    thread = threading.Thread(target=run, name=f"paceline-lines-{host}", daemon=True)
    thread.start()
    return thread


def _wait_for_all(running: Sequence[ChildProcess]) -> list[int]:
    """Return the exit codes of all."""
    while any(child.exit_code() is None for child in running):
        time.sleep(POLL_SECONDS)
    return [child.exit_code() or 0 for child in running]


def _wait(running: Sequence[ChildProcess], follow: float, timeout: float | None) -> int:
    """Return the first exit code that is not 0, once all have ended or `follow` has passed; else 0."""
    first, follow_until = 0, float("inf")
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    while time.monotonic() < follow_until:
        codes = [child.exit_code() for child in running]
        failed = next((code for code in codes if code), 0)
        if failed and not first:
            first, follow_until = failed, time.monotonic() + follow
        if None not in codes:
            break
        if time.monotonic() > deadline:
            raise RankFailed(
                f"the commands had not ended after {timeout:g} s",
                remedy="raise the time limit, or find out what they wait for",
            )
        time.sleep(POLL_SECONDS)
    return first
