"""Ranks that may be killed: forked from one process that has imported torch and started no thread.

    def scene(fork, folder, *args):              # runs in the warm process; at the top level of the test module
        ranks = [fork(rank_main, rank) for rank in range(3)]
        ranks[1].kill()
        return ranks[0].hear()                   # what the rank told

    def rank_main(tell, rank):                   # runs in a process of its own, and ends as a program ends
        tell("I am here")

    def test_it(nursery):
        assert nursery.play(scene) == "I am here"

Forking costs milliseconds where starting Python and importing torch costs seconds. What a scene leaves
running is killed at its end; the warm process itself dies with pytest.
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

from warm_start import die_with, import_what_ranks_need, start_warm

__all__ = ["Child", "Nursery", "SceneError"]


class SceneError(Exception):
    """A scene failed; the text is the traceback there."""


class Nursery:
    """The warm process, as the test sees it; starts when first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._pipe: Connection | None = None

    def play(self, scene: Callable[..., Any], *args: Any, timeout: float = 60.0) -> Any:
        """Run ``scene(fork, folder, *args)`` in the warm process and return what it returns.

        Raises:
            SceneError: the scene raised, or did not end in time.
        """
        pipe = self._start()
        pipe.send_bytes(pickle.dumps((list(sys.path), pickle.dumps((scene, args)))))
        if not pipe.poll(timeout):
            self.close()
            raise SceneError(f"the scene was not over after {timeout:g} s")
        well, value = pickle.loads(pipe.recv_bytes())
        if not well:
            raise SceneError(value)
        return value

    def _start(self) -> Connection:
        if self._process is None or self._process.poll() is not None or self._pipe is None:
            self._pipe, theirs = Pipe()
            self._process = start_warm(__file__, theirs.fileno())
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


class Child:
    """A process that a scene forked."""

    def __init__(self, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._pipe, theirs = Pipe()
        self._code: int | None = None
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            die_with(parent)
            raise _Begin(work, theirs, args)
        theirs.close()

    def hear(self, timeout: float = 30.0) -> Any:
        """Return the next thing that the child tells.

        Raises:
            EOFError: it ended. TimeoutError: it told nothing in time.
        """
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"process {self.pid} told nothing for {timeout:g} s")
        return pickle.loads(self._pipe.recv_bytes())

    def kill(self, number: int = signal.SIGKILL) -> float:
        """Send a signal, if it has not been waited for, and return when (CLOCK_MONOTONIC)."""
        at = time.monotonic()
        if self._code is None:
            os.kill(self.pid, number)
        return at

    def wait(self, timeout: float = 30.0) -> int:
        """Return the exit code, −n where signal n ended it; kill it after `timeout` and raise."""
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


class _Begin(BaseException):
    """In a child that was just forked: leave all that the parent was in the middle of."""


def _play(scene: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
    children: list[Child] = []

    def fork(work: Callable[..., Any], *args: Any) -> Child:
        children.append(Child(work, args))
        return children[-1]

    folder = tempfile.mkdtemp(prefix="paceline-nursery-")
    try:
        outcome = True, scene(fork, folder, *args)
    except Exception:  # noqa: BLE001 — the test shows it; in a child, _Begin passes
        outcome = False, traceback.format_exc()
    for child in children:
        child.kill()
        child.wait()
    shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _serve(pipe: Connection) -> None:
    import_what_ranks_need()
    pipe.send_bytes(b"ready")
    while True:
        sys.path[:], call = pickle.loads(pipe.recv_bytes())
        scene, args = pickle.loads(call)
        pipe.send_bytes(pickle.dumps(_play(scene, args)))


def main() -> None:
    """Play scenes until the other end of the pipe is closed; in a child, be a rank."""
    fd, parent = map(int, sys.argv[1:])
    die_with(parent)
    pipe = Connection(fd)
    try:
        _serve(pipe)
    except EOFError:
        return
    except _Begin as begin:
        work, own, args = begin.args
    pipe.close()

    def tell(what: Any) -> None:
        own.send_bytes(pickle.dumps(what))

    work(tell, *args)


if __name__ == "__main__":
    main()
