"""Ranks that tests may kill, forked from a warm process that has imported torch and started no thread.

    def scenario(fork, folder, *args):           # runs in the warm process; at the top level of the test module
        ranks = [fork(rank_main, rank) for rank in range(3)]
        ranks[1].kill()
        return ranks[0].receive()                # what the rank sent

    def rank_main(send, rank):                   # runs in a process of its own, and ends as a program ends
        send("ready")

    def test_it(killable):
        assert killable.run_ranks(scenario) == "ready"

Forking takes milliseconds where starting Python and importing torch takes seconds. Ranks that still run at the end of
a scenario are killed; the warm process itself dies with pytest.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any

from warm_start import die_with, end_as_a_program, preload_modules, start_warm_process

__all__ = ["KillableRanks", "RankProcess", "ScenarioError"]


class ScenarioError(Exception):
    """A scenario failed; the text is its traceback."""


class KillableRanks:
    """The warm process, seen from the test; starts when first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._pipe: Connection | None = None

    def run_ranks(self, scenario: Callable[..., Any], *args: Any, timeout: float = 60.0) -> Any:
        """Run ``scenario(fork, folder, *args)`` in the warm process and return its result.

        Raises:
            ScenarioError: the scenario raised, or did not end in time.
        """
        pipe = self._start()
        pipe.send_bytes(pickle.dumps((list(sys.path), pickle.dumps((scenario, args)))))
        if not pipe.poll(timeout):
            self.close()
            raise ScenarioError(f"the scenario did not end within {timeout:g} s")
        succeeded, value = pickle.loads(pipe.recv_bytes())
        if not succeeded:
            raise ScenarioError(value)
        return value

    def _start(self) -> Connection:
        if self._process is None or self._process.poll() is not None or self._pipe is None:
            self._pipe, theirs = Pipe()
            self._process = start_warm_process(__file__, theirs.fileno())
            theirs.close()
            self._pipe.poll(120)
            self._pipe.recv_bytes()
        return self._pipe

    def close(self) -> None:
        """End the warm process, and with it all that it forked."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None


# In the warm process.


class RankProcess:
    """A process that a scenario forked."""

    def __init__(self, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._pipe, theirs = Pipe()
        self._code: int | None = None
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            die_with(parent)
            raise _BecomeRank(work, theirs, args)
        theirs.close()

    def receive(self, timeout: float = 30.0) -> Any:
        """Return the next object that the process sends.

        Raises:
            EOFError: it ended.
            TimeoutError: it sent nothing in time.
        """
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"process {self.pid} sent nothing for {timeout:g} s")
        return pickle.loads(self._pipe.recv_bytes())

    def kill(self, number: int = signal.SIGKILL) -> float:
        """Send a signal unless the process was waited for; return the time (CLOCK_MONOTONIC)."""
        at = time.monotonic()
        if self._code is None:
            os.kill(self.pid, number)
        return at

    def wait(self, timeout: float = 30.0) -> int:
        """Return the exit code, −n for signal n; kill the process after `timeout` and raise."""
        deadline = time.monotonic() + timeout
        while self._code is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self._code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                raise TimeoutError(f"process {self.pid} did not end within {timeout:g} s")
            else:
                time.sleep(0.002)
        return self._code


class _BecomeRank(BaseException):
    """Unwinds the stack of the warm process in a child that was just forked."""


def _run(scenario: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
    ranks: list[RankProcess] = []

    def fork(work: Callable[..., Any], *args: Any) -> RankProcess:
        ranks.append(RankProcess(work, args))
        return ranks[-1]

    folder = tempfile.mkdtemp(prefix="paceline-ranks-")
    try:
        outcome = True, scenario(fork, folder, *args)
    except Exception:  # noqa: BLE001 — the test shows it; in a child, _BecomeRank passes
        outcome = False, traceback.format_exc()
    for rank in ranks:
        rank.kill()
        rank.wait()
    shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _serve(pipe: Connection) -> None:
    preload_modules()
    pipe.send_bytes(b"ready")
    while True:
        sys.path[:], call = pickle.loads(pipe.recv_bytes())
        scenario, args = pickle.loads(call)
        pipe.send_bytes(pickle.dumps(_run(scenario, args)))


def main() -> None:
    """Run scenarios until the other end of the pipe is closed; in a child, be a rank."""
    fd, parent = map(int, sys.argv[1:])
    die_with(parent)
    pipe = Connection(fd)
    try:
        _serve(pipe)
    except EOFError:
        return
    except _BecomeRank as begin:
        work, own, args = begin.args
    pipe.close()

    def send(value: Any) -> None:
        own.send_bytes(pickle.dumps(value))

    end_as_a_program(work, send, *args)


if __name__ == "__main__":
    main()
