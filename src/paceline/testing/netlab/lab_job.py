"""Job on hosts of a lab: one process per host, with its output, exit code and failure; torchrun's command lines."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

import psutil

from paceline._core.processes.process_exit import describe_exit
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

_POLL_SECONDS = 0.05
_TORCHRUN_POLL_SECONDS = 0.05  # interval at which torchrun checks its ranks; short, to find the first failure
_FOLLOW_SECONDS = 2.0  # for other hosts to fail of the same cause
_END_SECONDS = 5.0  # between SIGTERM and SIGKILL
_TAIL_LINES, _FOLLOWER_LINES = 40, 5  # a host has several ranks
_TORCHRUN_REPORT = re.compile(r"E\d{4} .*torch/distributed/elastic/.*\] failed \(exitcode: ")


@dataclass(frozen=True)
class LabResult:
    """Result of a command on one host.

    Attributes:
        host: number of the host.
        code: exit code; −n: ended by signal n.
        stdout: standard output.
        stderr: error output.
        seconds: running time.
    """

    host: int
    code: int
    stdout: str
    stderr: str
    seconds: float


class LabProgram:
    """Process of a job on one host.

    Args:
        host: number of the host.
        process: on that host.
        out: file with its standard output; closed when its result is taken.
        err: file with its error output; closed as well.
    """

    def __init__(self, host: int, process: subprocess.Popen[bytes], out: IO[bytes], err: IO[bytes]) -> None:
        self.host, self.process = host, process
        self._file_of_name = {"stdout": out, "stderr": err}
        self._yielded = dict.fromkeys(self._file_of_name, 0)  # bytes that lines() has yielded
        self._started, self.ended = time.monotonic(), 0.0
        self._result: LabResult | None = None
        self._descendants: list[psutil.Process] = []  # sent a signal

    def code(self) -> int | None:
        """Return the exit code; None while it runs."""
        code = self.process.poll()
        if code is not None and not self.ended:
            self.ended = time.monotonic()
        return code

    def result(self) -> LabResult:
        """Return the result; call once it has ended."""
        code = self.code()
        assert code is not None
        if self._result is None:
            texts = {name: _read(file).decode(errors="replace") for name, file in self._file_of_name.items()}
            self._result = LabResult(self.host, code, seconds=self.ended - self._started, **texts)
            for file in self._file_of_name.values():
                file.close()
        return self._result

    def lines(self) -> Iterator[str]:
        """Yield the lines completed since the last call; all after its end, none after its result was taken."""
        over = self.code() is not None
        for name, file in self._file_of_name.items():
            new = b"" if file.closed else _read(file, self._yielded[name])
            whole = new if over else new[: new.rfind(b"\n") + 1]
            self._yielded[name] += len(whole)
            yield from whole.decode(errors="replace").splitlines()

    def was_followed(self) -> bool:
        """Return whether any lines were taken from `lines`."""
        return any(self._yielded.values())

    def signal(self, *numbers: int) -> None:
        """Send signals that end or continue it to the program and its descendants; kill it before it has any."""
        if self.code() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(self.process.pid)
                # What is stopped can't start other processes, which would be missed here.
                _send([root], signal.SIGSTOP)
                while new := [one for one in root.children(recursive=True) if one not in self._descendants]:
                    _send(new, signal.SIGSTOP)
                    self._descendants += new
                _send([root], signal.SIGCONT if self._descendants else signal.SIGKILL)
        _send(reversed(self._descendants), *numbers)

    def is_gone(self) -> bool:
        """Return whether it has ended, and all descendants that were sent a signal."""
        return self.code() is not None and not any(_runs(one) for one in self._descendants)


def _send(processes: Iterable[psutil.Process], *numbers: int) -> None:
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for number in numbers:
                one.send_signal(number)


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


class LabJob:
    """Command on one or several hosts, started by :meth:`Lab.start`."""

    def __init__(self, programs: Sequence[LabProgram]) -> None:
        self._programs = list(programs)

    def running(self) -> list[int]:
        """Return the hosts on which it is running."""
        return [one.host for one in self._programs if one.code() is None]

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield (host, line) for every line of output or error output completed since the last call."""
        for one in self._programs:
            for line in one.lines():
                yield one.host, line

    def wait(
        self, timeout: float | None = None, *, check: bool = True, on_poll: Callable[[], object] | None = None
    ) -> list[LabResult]:
        """Wait until the command has ended on all hosts, and return the results, in the order of hosts.

        Args:
            timeout: seconds from now after which it is ended; None: no limit.
            check: if it fails on a host, end it on the others and raise. False: wait for all hosts.
            on_poll: called about 20 times a second meanwhile, and once at the end.

        Raises:
            HostFailed: with `check`, it failed on a host; or time was up. The message ends with its last output.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.running() and not (check and self._failed()):
            if deadline is not None and time.monotonic() > deadline:
                raise self._timeout_error(timeout or 0.0)
            if on_poll is not None:
                on_poll()
            time.sleep(_POLL_SECONDS)
        if check and self._failed():
            raise self._failure_error(on_poll)
        if on_poll is not None:
            on_poll()
        return [one.result() for one in self._programs]

    def follow(self, tick: Callable[[], object], ticks: int | None = None) -> None:
        """Wait until it ends, copying its output to standard error; end it on all hosts in any case.

        Args:
            tick: called for each line ``tick``; all others are copied, prefixed with their host's name.
            ticks: expected number of them. Output after the last (torchrun complains if another host's ends first) is
                only shown if the job fails.

        Raises:
            HostFailed: it failed on a host.
        """
        counted, late = 0, list[str]()

        def on_poll() -> None:
            nonlocal counted
            for host, line in self.lines():
                if line == "tick":
                    counted += 1
                    tick()
                elif ticks is None or counted < ticks:
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

    def close(self) -> None:
        """Keep the results of a job that has ended on all hosts, and close its files."""
        for one in self._programs:
            one.result()

    def end(self) -> None:
        """End it on all hosts, with all its children: SIGTERM, later SIGKILL."""
        for one in self._programs:
            one.signal(signal.SIGTERM, signal.SIGCONT)
        deadline = time.monotonic() + _END_SECONDS
        while not all(one.is_gone() for one in self._programs):
            if time.monotonic() > deadline:
                for one in self._programs:
                    one.signal(signal.SIGKILL)
            time.sleep(_POLL_SECONDS)

    def _failed(self) -> list[LabProgram]:
        return [one for one in self._programs if one.code()]

    def _failure_error(self, on_poll: Callable[[], object] | None) -> HostFailed:
        """End the job, and return the error for the host that failed first, with those that followed."""
        deadline = time.monotonic() + _FOLLOW_SECONDS
        while time.monotonic() < deadline and self.running():
            time.sleep(_POLL_SECONDS)
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
            remedy="fix the cause in its output; it was ended on the other hosts",
        )

    def _timeout_error(self, timeout: float) -> HostFailed:
        alive = [one for one in self._programs if one.code() is None]
        self.end()
        return HostFailed(
            f"not finished within {timeout:g} s: still running on {', '.join(host_name(one.host) for one in alive)}"
            + "".join(_tail(one) for one in alive),
            host=alive[0].host,
            remedy="raise the time limit, or find out what it is waiting for",
        )


def _how(one: LabProgram) -> str:
    return describe_exit(one.code() or 0)


def _tail(one: LabProgram, most: int = _TAIL_LINES) -> str:
    """Return the last lines of output, to be appended to a message, unless they were followed."""
    if one.was_followed():
        return ""
    result = one.result()
    lines = result.stdout.rstrip().splitlines()[-most // 4 :]
    lines += strip_torchrun_report(result.stderr).rstrip().splitlines()[-most:]
    return "".join(f"\n  {host_name(one.host)} | {line}" for line in lines or ["(no output)"])


def _read(file: IO[bytes], start: int = 0) -> bytes:
    """Return the content of a file from byte `start`, without moving the position at which the program writes."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size - start, start)


def lab_torchrun_command(
    program: Sequence[str], *, node: int, nodes: int, ranks_per_host: int, master: int, port: int
) -> list[str]:
    """Return the command that runs `program` as the ranks of one host.

    Args:
        program: a Python script (its name ends with .py), ``-m`` and a module, or any command; then its arguments.
        node: number of this host among the participating ones.
        nodes: number of participating hosts.
        ranks_per_host: processes per host.
        master: host of rank 0.
        port: a free port of that host.

    Raises:
        UsageError: fewer than one rank.
    """
    if ranks_per_host < 1:
        raise UsageError(
            f"ranks_per_host={ranks_per_host}: at least 1", remedy="give the number of processes per host"
        )
    options = {
        "--nnodes": nodes,
        "--node-rank": node,
        "--nproc-per-node": ranks_per_host,
        "--master-addr": host_address(master),
        "--master-port": port,
        "--monitor-interval": _TORCHRUN_POLL_SECONDS,
    }
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *(f"{name}={value}" for name, value in options.items()),
        *([] if is_python(program) else ["--no-python"]),
        *program,
    ]


def is_torchrun_failure(line: str) -> bool:
    """Return whether torchrun reports with this line that a rank failed; forty more lines follow."""
    return _TORCHRUN_REPORT.match(line) is not None


def strip_torchrun_report(text: str) -> str:
    """Return the output of ranks, without torchrun's report of a failure except for its first line."""
    lines = text.splitlines()
    end = next((number + 1 for number, line in enumerate(lines) if is_torchrun_failure(line)), len(lines))
    return "\n".join(lines[:end])
