"""The inside of a lab's hosts, as a script that needs nothing but Python's own library.

    python inside.py hold NAME OWNER_FD      be a host
    python inside.py enter PID FOLDER PROGRAM ARGUMENT …      run a program on the host that PID holds

*hold* makes namespaces of its own (network, host name, processes, mounts, shared memory) and a process in them that is
number 1 there. When number 1 ends, the kernel ends every other process there and removes what nobody uses any more:
namespaces, network devices, shared memory. Number 1 ends when its standard input is closed, and when the owner has
ended (OWNER_FD is a pidfd of it), however that came about: so nothing can be left behind.

It reads the text of /etc/hosts from standard input, up to a zero byte, and answers ``ready PID`` on standard output, or
``failed`` and why. From then on every byte it reads is the number of a signal for all processes of the host at once,
and is answered by the same byte.

*enter* is three processes: one outside, which the owner waits for; one inside, to which the program's orphans are
given, so that all its descendants can be found; and the program. All end as the program does, and each with the
one before it. nsenter(1) would not do: it stops itself when the program is stopped, and loses orphans.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

__all__ = ["enter", "hold"]

# <sched.h>, <sys/mount.h>, <sys/prctl.h>
_NEW_MOUNT, _NEW_UTS, _NEW_IPC, _NEW_PID, _NEW_NET = 1 << 17, 1 << 26, 1 << 27, 1 << 29, 1 << 30
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_CHILD_SUBREAPER = 1, 4, 36

_TCP = {  # see docs/lab.md
    "tcp_congestion_control": "reno",
    "tcp_slow_start_after_idle": "0",
    "tcp_no_metrics_save": "1",
}

_libc = ctypes.CDLL(None, use_errno=True)


def hold(name: str, owner: int) -> NoReturn:
    """Be the host `name` until told to end, or until the process behind the pidfd `owner` has ended."""
    try:
        _call("unshare", _NEW_MOUNT | _NEW_UTS | _NEW_IPC | _NEW_PID | _NEW_NET)
    except OSError as error:
        _answer(f"failed {error}")
        os._exit(1)
    _end_as(_in_child(lambda: _be_first(name, owner)))


def enter(pid: str, folder: str, command: list[str]) -> NoReturn:
    """Run `command` in `folder` on the host whose process number 1 is known here as `pid`, and end as it does."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # they are for the program
    kinds = ("ipc", "uts", "net", "pid", "mnt")
    spaces = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in kinds]
    for space in spaces:
        _call("setns", space, 0)
    os.chdir(folder)
    _end_as(_in_child(lambda: _watch_over(command)))


def _be_first(name: str, owner: int) -> NoReturn:
    """Be process number 1 of a host."""
    try:
        pid = os.readlink("/proc/self")  # as it is known outside: /proc is not yet our own
        _furnish(name, _read_to_zero())
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans that end leave no trace
    except OSError as error:
        _answer(f"failed {error}")
        os._exit(1)
    _answer(f"ready {pid}")
    waiting = select.poll()
    waiting.register(0, select.POLLIN)
    waiting.register(owner, select.POLLIN)
    while all(descriptor != owner for descriptor, _ in waiting.poll()):
        request = os.read(0, 1)
        if not request:
            break
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, request[0])  # everyone here but number 1
        os.write(1, request)
    os._exit(0)


def _furnish(name: str, hosts: bytes) -> None:
    """Give the host its name, its own process table, shared memory, list of hosts and way of TCP."""
    os.chdir("/")
    socket.sethostname(name)
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    for name, value in _TCP.items():
        Path("/proc/sys/net/ipv4", name).write_text(value)
    with contextlib.suppress(
        OSError
    ):  # some containers don't let it; then see [Note: packets in order] in place.py
        _mount("sysfs", "/sys", "sysfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    _mount("tmpfs", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777")
    known = Path("/dev/shm/hosts")
    known.write_bytes(hosts)
    _mount(str(known), "/etc/hosts", None, _MS_BIND)
    known.unlink()  # what is mounted stays


def _watch_over(command: list[str]) -> NoReturn:
    """Run `command` and adopt what its descendants leave behind, until it ends."""
    _call("prctl", _SET_CHILD_SUBREAPER, 1)
    _end_as(_in_child(lambda: _become(command)))


def _become(command: list[str]) -> NoReturn:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # an ignored signal would stay ignored
    os.execvp(command[0], command)


def _in_child(work: Callable[[], NoReturn]) -> int:
    """Do `work` in a child that dies with this process, wait for it (and for adopted ones), return its status."""
    child = os.fork()
    if child == 0:
        try:
            _call("prctl", _SET_PDEATHSIG, signal.SIGKILL)
            work()
        except OSError as error:
            os.write(2, f"{error}\n".encode())
        finally:
            os._exit(127)
    while True:
        ended, status = os.wait()
        if ended == child:
            return status


def _end_as(status: int) -> NoReturn:
    """End this process as another one did: with the same exit code, or by the same signal."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        _call("prctl", _SET_DUMPABLE, 0)  # the program has left its core file already
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _read_to_zero() -> bytes:
    text = b""
    while not text.endswith(b"\0"):
        piece = os.read(0, 4096)
        if not piece:
            raise OSError("the owner ended")
        text += piece
    return text[:-1]


def _answer(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    _call("mount", *texts[:3], flags, texts[3], what=f"mount on {target}")


def _call(function: str, *arguments: object, what: str = "") -> None:
    """Call a function of the C library; what it reports becomes an OSError."""
    if getattr(_libc, function)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what or function}: {os.strerror(number)}")


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        hold(sys.argv[2], int(sys.argv[3]))
    try:
        enter(sys.argv[2], sys.argv[3], sys.argv[4:])
    except OSError as failure:
        sys.exit(f"this host can't be entered: {failure}")
