"""A command that runs on hosts of a lab: its output, its end, what went wrong.

torchrun on every host of a lab: the command line of each, and what it says when a rank fails (pure).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

import psutil

from paceline._core.process_exit import describe_exit
from paceline.errors import HostFailed, UsageError
from paceline.testing.netlab.lab_network import host_address, host_name
from paceline.testing.netlab.lab_requirements import is_python

__all__ = [
    "LabJob",
    "LabProgram",
    "LabResult",
    "is_torchrun_failure",
    "lab_torchrun_command",
    "strip_torchrun_report",
]

_LOOK_SECONDS = 0.05  # how often a job is looked at


_FOLLOW_SECONDS = 2.0  # how long others may take to fail of the same cause, to be told apart from the first


_END_SECONDS = 5.0  # between asking a program to end and killing it


_TAIL_LINES, _FOLLOWER_LINES = 40, 5  # a host has several ranks


@dataclass(frozen=True)
class LabResult:
    """What became of a command on one host.

    Attributes:
        host: number of the host.
        code: exit code; −n: ended by signal n.
        stdout, stderr: what it wrote.
        seconds: how long it ran.
    """

    host: int
    code: int
    stdout: str
    stderr: str
    seconds: float


class LabProgram:
    """A job's process on one host.

    Args:
        host: number of the host.
        process: what was started there.
        out, err: the files that it writes to; they are closed once it has ended and its result is taken.
    """

    def __init__(self, host: int, process: subprocess.Popen[bytes], out: IO[bytes], err: IO[bytes]) -> None:
        self.host, self.process = host, process
        self._file_of_name = {"stdout": out, "stderr": err}
        self._told = dict.fromkeys(self._file_of_name, 0)  # bytes that lines() has given
        self._started, self.ended = time.monotonic(), 0.0
        self._result: LabResult | None = None

    def code(self) -> int | None:
        """Return the exit code, None while it runs."""
        code = self.process.poll()
        if code is not None and not self.ended:
            self.ended = time.monotonic()
        return code

    def result(self) -> LabResult:
        """Return what became of it; call once it has ended."""
        code = self.code()
        assert code is not None
        if self._result is None:
            texts = {name: _read(file).decode(errors="replace") for name, file in self._file_of_name.items()}
            self._result = LabResult(self.host, code, seconds=self.ended - self._started, **texts)
            for file in self._file_of_name.values():
                file.close()
        return self._result

    def lines(self) -> Iterator[str]:
        """Yield the lines that were completed since the last call; all once it has ended, none after its result."""
        over = self.code() is not None
        for name, file in self._file_of_name.items():
            new = b"" if file.closed else _read(file, self._told[name])
            whole = new if over else new[: new.rfind(b"\n") + 1]
            self._told[name] += len(whole)
            yield from whole.decode(errors="replace").splitlines()

    def seen(self) -> bool:
        """Return whether somebody has followed the lines."""
        return any(self._told.values())

    def signal(self, *numbers: int) -> None:
        """Send signals to the program and all its descendants; one that has hardly started is killed."""
        if self.code() is not None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            descendants = psutil.Process(self.process.pid).children(recursive=True)
            if not descendants:
                self.process.kill()
            for one in reversed(descendants):
                with contextlib.suppress(psutil.NoSuchProcess):
                    for number in numbers:
                        one.send_signal(number)


class LabJob:
    """A command that was started on one or several hosts; :meth:`Lab.start` makes it."""

    def __init__(self, programs: Sequence[LabProgram]) -> None:
        self._programs = list(programs)

    def running(self) -> list[int]:
        """Return the hosts on which it has not ended."""
        return [one.host for one in self._programs if one.code() is None]

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield (host, line) for every line of output or error output that was completed since the last call."""
        for one in self._programs:
            for line in one.lines():
                yield one.host, line

    def wait(
        self, timeout: float | None = None, *, check: bool = True, on_poll: Callable[[], object] | None = None
    ) -> list[LabResult]:
        """Return the results, in the order of hosts, when the command has ended on all of them.

        Args:
            timeout: seconds from now until it counts as hung; it is ended then. None: no limit.
            check: if it fails on a host, end it on the others and raise. False: let every host end by itself.
            look: called about 20 times a second meanwhile, and once at the end.

        Raises:
            HostFailed: with `check`, it failed on a host; or time was up. The message ends with what it wrote last.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.running() and not (check and self._failed()):
            if deadline is not None and time.monotonic() > deadline:
                raise self._late(timeout or 0.0)
            if on_poll is not None:
                on_poll()
            time.sleep(_LOOK_SECONDS)
        if check and self._failed():
            raise self._failure(on_poll)
        if on_poll is not None:
            on_poll()
        return [one.result() for one in self._programs]

    def follow(self, tick: Callable[[], object], ticks: int | None = None) -> None:
        """Wait until it ends, and show meanwhile what it writes; however that goes, no program is left.

        Args:
            tick: called for each line ``tick``; all others go to standard error, behind their host's name.
            ticks: how many come. What is written after the last (torchrun complains where another host's ends first)
                is shown only if the job fails.

        Raises:
            HostFailed: it failed on a host.
        """
        seen, late = 0, list[str]()

        def on_poll() -> None:
            nonlocal seen
            for host, line in self.lines():
                if line == "tick":
                    seen += 1
                    tick()
                elif ticks is None or seen < ticks:
                    print(f"{host_name(host)} | {line}", file=sys.stderr)
                else:
                    late.append(f"{host_name(host)} | {line}\n")

        try:
            self.wait(on_poll=on_poll)
        except HostFailed:
            print(*late, sep="", end="", file=sys.stderr)
            raise
        finally:
            self.end()

    def settle(self) -> None:
        """Keep the results of a job that has ended on all hosts, and close its files."""
        for one in self._programs:
            one.result()

    def end(self) -> None:
        """End it where it still runs, with all its children: first asked, then killed."""
        for one in self._programs:
            one.signal(signal.SIGTERM, signal.SIGCONT)
        deadline = time.monotonic() + _END_SECONDS
        while self.running():
            if time.monotonic() > deadline:
                for one in self._programs:
                    one.signal(signal.SIGKILL)
            time.sleep(_LOOK_SECONDS)

    def _failed(self) -> list[LabProgram]:
        return [one for one in self._programs if one.code()]

    def _failure(self, on_poll: Callable[[], object] | None) -> HostFailed:
        """End the job and return the error for the host that failed first, with those that followed."""
        deadline = time.monotonic() + _FOLLOW_SECONDS
        while time.monotonic() < deadline and self.running():
            time.sleep(_LOOK_SECONDS)
        first, *after = sorted(self._failed(), key=lambda one: one.ended)
        self.end()
        if on_poll is not None:
            on_poll()
        names = ", ".join(f"{host_name(one.host)} ({_how(one)})" for one in after)
        return HostFailed(
            f"{host_name(first.host)} {_how(first)}{f'; after it {names}' if names else ''}"
            + "".join(_tail(one, _FOLLOWER_LINES) for one in after)
            + _tail(first),
            host=first.host,
            remedy="correct what its output says; on the other hosts it has been ended",
        )

    def _late(self, timeout: float) -> HostFailed:
        still = [one for one in self._programs if one.code() is None]
        self.end()
        return HostFailed(
            f"not finished within {timeout:g} s: still running on {', '.join(host_name(one.host) for one in still)}"
            + "".join(_tail(one) for one in still),
            host=still[0].host,
            remedy="raise the time limit, or find out what it waits for",
        )


def _how(one: LabProgram) -> str:
    return describe_exit(one.code() or 0)


def _tail(one: LabProgram, most: int = _TAIL_LINES) -> str:
    """Return the last lines that a program wrote, to be appended to a message, unless they were followed."""
    if one.seen():
        return ""
    result = one.result()
    lines = result.stdout.rstrip().splitlines()[-most // 4 :]
    lines += strip_torchrun_report(result.stderr).rstrip().splitlines()[-most:]
    return "".join(f"\n  {host_name(one.host)} | {line}" for line in lines or ["(it wrote nothing)"])


def _read(file: IO[bytes], start: int = 0) -> bytes:
    """Return what is in a file from byte `start`, without moving the place where the program writes."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size - start, start)


_WORKER_LOOK_SECONDS = (
    0.05  # how often torchrun looks whether a rank has failed: who failed first shall be seen first
)


_REPORT = re.compile(r"E\d{4} .*torch/distributed/elastic/.*\] failed \(exitcode: ")


def lab_torchrun_command(
    program: Sequence[str], *, node: int, nodes: int, ranks_per_host: int, master: int, port: int
) -> list[str]:
    """Return the command that runs `program` as the ranks of one host.

    Args:
        program: a Python script (its name ends with .py), ``-m`` and a module, or any command; then its arguments.
        node: number of this host among those that take part.
        nodes: how many take part.
        ranks_per_host: processes on each.
        master: the host of rank 0.
        port: a free one there.

    Raises:
        UsageError: fewer than one rank.
    """
    if ranks_per_host < 1:
        raise UsageError(
            f"ranks_per_host={ranks_per_host}: at least 1", remedy="give how many processes a host runs"
        )
    options = {
        "--nnodes": nodes,
        "--node-rank": node,
        "--nproc-per-node": ranks_per_host,
        "--master-addr": host_address(master),
        "--master-port": port,
        "--monitor-interval": _WORKER_LOOK_SECONDS,
    }
    told = [f"{name}={value}" for name, value in options.items()]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *told,
        *([] if is_python(program) else ["--no-python"]),
        *program,
    ]


def is_torchrun_failure(line: str) -> bool:
    """Return whether torchrun says with this line that a rank failed; forty lines of its own follow."""
    return _REPORT.match(line) is not None


def strip_torchrun_report(text: str) -> str:
    """Return what ranks wrote, without what torchrun adds when one fails but the line that says so."""
    lines = text.splitlines()
    end = next((number + 1 for number, line in enumerate(lines) if is_torchrun_failure(line)), len(lines))
    return "\n".join(lines[:end])
