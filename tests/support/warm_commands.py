"""Commands ``paceline …`` that tests may signal and kill, without the seconds of importing torch in each process.

    command = start_command(["run", "--nproc-per-node", "2", "program.py"], env=os.environ, output=file)
    command.send_signal(signal.SIGTERM)
    assert command.wait(60) == 75

A server that has imported torch and started no thread forks the launcher, and the launcher's ranks are forked by a
helper that the launcher forks first. Everything else is as in `subprocess.Popen`: each rank is a child of the launcher
in a process group of its own, has the environment and files that the launcher gives it, is killed when the
launcher ends, and ends as a program ends. Only `start_rank`'s call of Python is replaced, which other tests of
launchers cover.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import IO, Any

from warm_start import die_with, end_as_a_program, preload_modules, start_warm_process

__all__ = ["WarmCommand", "start_command"]

_MESSAGE_NBYTES = 1 << 20
_PR_SET_CHILD_SUBREAPER = 36  # <sys/prctl.h>
_JOINER_SECONDS = 1.5  # that starting Python would take: until then the other ranks train without the new one


class _Process:
    """A process, with the interface of `subprocess.Popen` that launchers and tests use."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None
        self._ended = os.pidfd_open(pid)

    def __del__(self) -> None:
        os.close(self._ended)

    def poll(self) -> int | None:
        """Return the exit code, −n for signal n; None while it runs."""
        if self.returncode is None and _readable(self._ended, 0):
            self.returncode = self._code()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code."""
        if self.returncode is None and not _readable(self._ended, timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def _code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class WarmCommand(_Process):
    """A launcher; it leads a process group."""

    def _code(self) -> int:
        return _server.ask(("code", self.pid))


def start_command(words: Sequence[str], *, env: Mapping[str, str], output: IO[Any]) -> WarmCommand:
    """Start ``paceline WORDS``, whose output goes to a file."""
    return WarmCommand(_server.ask(("start", list(words), dict(env), os.getcwd()), output.fileno()))


def _readable(descriptor: int, seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if seconds is None else seconds * 1000))


class _Server:
    """Client of the server, which starts when it is first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def ask(self, request: tuple[Any, ...], *descriptors: int) -> int:
        """Send a request, and return the answer."""
        if self._socket is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._process = start_warm_process(__file__, theirs.fileno())
            atexit.register(self.close)
            theirs.close()
        return _ask(self._socket, request, *descriptors)

    def close(self) -> None:
        """End the server, and with it all that it forked."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


_server = _Server()


def _ask(connection: socket.socket, request: tuple[Any, ...], *descriptors: int) -> int:
    socket.send_fds(connection, [pickle.dumps(request)], descriptors)
    return pickle.loads(connection.recv(_MESSAGE_NBYTES))


# ------------------------------------------------------------------ in the server and what it forks


class _BecomeProgram(BaseException):
    """Unwinds the stack of a process in a child that was just forked."""


def _serve(requests: socket.socket) -> None:
    """Answer requests until the other end is closed."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, _MESSAGE_NBYTES, 2)
        if not data:
            return
        kind, *arguments = pickle.loads(data)
        if kind == "code":
            answer = os.waitstatus_to_exitcode(os.waitpid(arguments[0], 0)[1])
        elif kind == "start":
            words, env, folder = arguments
            answer = _fork_launcher(requests, words, env, folder, descriptors[0])
        else:
            launcher, argv, env = arguments
            answer = _fork_rank(requests, launcher, argv, env, descriptors)
        for each in descriptors:
            os.close(each)
        requests.send(pickle.dumps(answer))


def _fork_launcher(
    requests: socket.socket, words: list[str], env: dict[str, str], folder: str, output: int
) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.setpgid(pid, pid)
        return pid
    requests.close()
    os.setpgid(0, 0)
    die_with(parent)
    os.chdir(folder)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    # ranks whose parent has ended are this process's children
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    launcher = os.getpid()
    mine, helper = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        mine.close()
        die_with(launcher)
        _serve(helper)
        os._exit(0)
    helper.close()
    raise _BecomeProgram(lambda: _launch(mine, words, env))


def _launch(helper: socket.socket, words: list[str], env: dict[str, str]) -> None:
    """Be the launcher, whose ranks the helper forks."""
    from paceline.launch.process import rank_process

    lock = threading.Lock()

    def popen(command: list[str], *, env: dict[str, str], stdout: Any, stderr: Any, **_: Any) -> _Process:
        out = 1 if stdout is None else stdout if isinstance(stdout, int) else stdout.fileno()
        error = out if stderr == subprocess.STDOUT else 2 if stderr is None else stderr
        with lock:
            return _Process(_ask(helper, ("rank", os.getpid(), command[1:], env), out, error))

    rank_process.with_pdeathsig = list
    rank_process.subprocess = SimpleNamespace(
        Popen=popen, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT
    )
    _run_program(["-m", "paceline", *words], env)


def _fork_rank(
    requests: socket.socket, launcher: int, argv: list[str], env: dict[str, str], files: list[int]
) -> int:
    """Fork a rank through a process that ends at once, so that it is a child of the launcher."""
    read, write = os.pipe()
    between = os.fork()
    if between:
        os.close(write)
        pid = int(os.read(read, 20))
        os.close(read)
        os.waitpid(between, 0)
        return pid
    pid = os.fork()
    if pid:
        os.setpgid(pid, pid)
        os.write(write, str(pid).encode())
        os._exit(0)
    requests.close()
    for each, number in zip(files, (1, 2), strict=True):
        os.dup2(each, number)
    for each in (*files, read, write):
        os.close(each)
    while os.getppid() != launcher:
        if not os.path.exists(f"/proc/{launcher}"):
            os._exit(1)
        time.sleep(0.0005)
    die_with(launcher)
    if env.get("PACELINE_JOINER"):
        time.sleep(_JOINER_SECONDS)
    raise _BecomeProgram(lambda: _run_program(argv, env))


def _run_program(argv: list[str], env: dict[str, str]) -> None:
    """Run ``python *argv`` here, as if this process had just been started."""
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    standard = [path for path in sys.path[1:] if path not in inherited]
    os.environ.clear()
    os.environ.update(env)
    if env.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    module = argv[0] == "-m"
    program, *rest = argv[1:] if module else argv
    first = os.getcwd() if module else os.path.dirname(os.path.realpath(program))
    own = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.argv, sys.path[:] = [program, *rest], [first, *own, *standard]
    main = sys.modules["__main__"] = ModuleType("__main__")
    if module:
        runpy._run_module_as_main(program)  # type: ignore[attr-defined]
    else:
        main.__file__ = program
        with open(program, "rb") as source:
            exec(compile(source.read(), program, "exec"), main.__dict__)


def main() -> None:
    """Fork launchers until the other end is closed; in a child, be a launcher or a rank."""
    descriptor, parent = map(int, sys.argv[1:])
    die_with(parent)
    try:
        preload_modules()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _serve(socket.socket(fileno=descriptor))
        return
    except _BecomeProgram as begin:
        program = begin.args[0]
    end_as_a_program(program)


if __name__ == "__main__":
    main()
