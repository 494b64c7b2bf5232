"""Fork server: a process that has imported torch and started no thread forks ranks in milliseconds, not seconds.

    server = ForkServer()
    pid = server.fork(connection, stacks)      # a process that serves cases at the other end (rank_pool.py)
    server.code(pid)                           # its exit code, None while it runs

Forked processes end with the server, and the server ends with the process that started it.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from warm_start import die_with, preload_modules, start_warm_process

__all__ = ["ForkServer"]

_MESSAGE_NBYTES = 4096


class ForkServer:
    """Client of the fork server, which starts when it is first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def fork(self, served: Connection, stacks: Path) -> int:
        """Return the process id of a new process that serves cases at `served`, and writes its stacks on SIGUSR1."""
        return self._ask(("fork", str(stacks)), served.fileno())

    def code(self, pid: int, *, wait: bool = False) -> int | None:
        """Return the exit code of a process, −n where signal n ended it; None while it runs, unless `wait`."""
        return self._ask(("code", pid, wait))

    def close(self) -> None:
        """End the server, and with it all forked processes."""
        if self._process is not None and self._socket is not None:
            self._process.kill()
            self._process.wait()
            self._socket.close()
        self._process = self._socket = None

    def _ask(self, request: tuple[Any, ...], *descriptors: int) -> Any:
        if self._socket is None:
            self._start()
        assert self._socket is not None
        socket.send_fds(self._socket, [pickle.dumps(request)], descriptors)
        return pickle.loads(self._socket.recv(_MESSAGE_NBYTES))

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = start_warm_process(__file__, theirs.fileno())
        atexit.register(self.close)
        theirs.close()


# In the server.


def _serve(requests: socket.socket) -> None:
    """Answer requests until the other end is closed; in a child, return never."""
    codes: dict[int, int] = {}
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, _MESSAGE_NBYTES, 1)
        if not data:
            return
        kind, *arguments = pickle.loads(data)
        if kind == "fork":
            answer = _fork(requests, descriptors[0], *arguments)
        else:
            answer = _code(codes, *arguments)
        requests.send(pickle.dumps(answer))


def _fork(requests: socket.socket, descriptor: int, stacks: str) -> int:
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        requests.close()
        _become_rank(parent, descriptor, stacks)
    os.close(descriptor)
    return child


def _become_rank(parent: int, descriptor: int, stacks: str) -> None:
    from rank_pool import serve

    code = 1
    try:
        die_with(parent)
        with open(stacks, "w") as file:
            faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
            serve(Connection(descriptor))
        code = 0
    except BaseException:  # noqa: BLE001 — a forked child must not continue as the server
        traceback.print_exc()
    os._exit(code)


def _code(codes: dict[int, int], pid: int, wait: bool) -> int | None:
    if pid not in codes:
        ended, status = os.waitpid(pid, 0 if wait else os.WNOHANG)
        if ended:
            codes[pid] = os.waitstatus_to_exitcode(status)
    return codes.get(pid)


def main() -> None:
    """Import what ranks need, then fork them."""
    descriptor, parent = map(int, sys.argv[1:])
    die_with(parent)
    preload_modules()
    _serve(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    main()
