"""Ranks that are forked for one run and may die in it: cheap, because torch is imported once.

    with Brood() as brood:
        report = brood.run(scenario, 3, "SIGKILL", 1)      # scenario(rank, size, folder, *args) at the top level

A rank's report is what its function returned, or how its process ended. Each run has a folder and a world of its own.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Brood", "Report"]


@dataclass(frozen=True)
class Report:
    """What became of a rank: `value` that it returned, or None; `code` of its process, −n for signal n."""

    value: Any
    code: int
    text: str


class Brood:
    """A process that has imported torch and forks ranks; it keeps no threads, so that forking is safe."""

    def __enter__(self) -> Brood:
        env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def run(self, function: Callable[..., Any], size: int, *args: Any, timeout: float = 40.0) -> list[Report]:
        """Run ``function(rank, size, folder, *args)`` in `size` new processes; return what became of each."""
        job = pickle.dumps((list(sys.path), pickle.dumps((function, args)), size, timeout))
        self._process.stdin.write(len(job).to_bytes(8, "little") + job)
        self._process.stdin.flush()
        length = int.from_bytes(self._process.stdout.read(8), "little")
        return [Report(*fields) for fields in pickle.loads(self._process.stdout.read(length))]


# In the process itself.


def _serve() -> None:
    import torch  # noqa: F401 — this is what the ranks shall not have to do

    import paceline.backends.create  # noqa: F401

    answer = os.dup(1)
    os.dup2(2, 1)
    while length := sys.stdin.buffer.read(8):
        path, call, size, timeout = pickle.loads(sys.stdin.buffer.read(int.from_bytes(length, "little")))
        sys.path[:] = path
        with tempfile.TemporaryDirectory(prefix="paceline-brood-") as folder:
            ranks = [_fork(call, rank, size, folder) for rank in range(size)]
            codes = _collect(ranks, time.monotonic() + timeout)
            data = pickle.dumps([_report(rank, folder, code) for rank, code in enumerate(codes)])
        os.write(answer, len(data).to_bytes(8, "little"))
        with os.fdopen(os.dup(answer), "wb") as out:
            out.write(data)


def _fork(call: bytes, rank: int, size: int, folder: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    with contextlib.suppress(BaseException):
        try:
            function, args = pickle.loads(call)
            value = function(rank, size, folder, *args)
            (Path(folder) / f"report-{rank}").write_bytes(pickle.dumps(value))
            code = 0
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else 1
        except BaseException:  # noqa: BLE001 — the test must see it
            (Path(folder) / f"error-{rank}").write_text(traceback.format_exc())
    os._exit(code)


def _collect(pids: list[int], deadline: float) -> list[int]:
    """Wait for all processes, kill those that hang, and return how each ended."""
    codes = {}
    fds = {os.pidfd_open(pid): pid for pid in pids}
    while fds:
        ended = select.select(list(fds), [], [], max(0.0, deadline - time.monotonic()))[0]
        for fd in ended or list(fds):
            if not ended:
                os.kill(fds[fd], signal.SIGKILL)
            pid = fds.pop(fd)
            codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.close(fd)
    return [codes[pid] for pid in pids]


def _report(rank: int, folder: str, code: int) -> tuple[Any, int, str]:
    report, error = Path(folder) / f"report-{rank}", Path(folder) / f"error-{rank}"
    value = pickle.loads(report.read_bytes()) if report.exists() else None
    return value, code, error.read_text() if error.exists() else ""


if __name__ == "__main__":
    _serve()
