"""Program inside the namespaces of a lab's host; needs only Python's standard library.

    python namespace_main.py hold NAME OWNER_FD                     be a host
    python namespace_main.py enter PID FOLDER PROGRAM ARGUMENT …    run a program on the host that PID holds

*hold* creates namespaces (network, host name, processes, mounts, shared memory) and process number 1 in them. When
number 1 ends, the kernel ends all other processes there and removes everything unused: namespaces, network devices,
shared memory. Number 1 ends when its standard input is closed, and when the owner ends for any reason (OWNER_FD is a
pidfd of it), so nothing can be left behind.

It reads the text of /etc/hosts from standard input, up to a zero byte, and replies on standard output with
``ready PID``, or ``failed`` and the reason. Each further byte is the number of a signal to send to all processes of the
host at once, and the reply is the same byte.

*enter* consists of three processes: one outside, for which the owner waits; one inside, which adopts the program's
orphans, so that all its descendants can be found; and the program. All end as the program does, and each ends with its
parent. nsenter(1) is no alternative: it stops itself when the program is stopped, and loses orphans.
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
    """Be the host `name` until standard input is closed or the process of the pidfd `owner` has ended."""
    try:
        _call("unshare", _NEW_MOUNT | _NEW_UTS | _NEW_IPC | _NEW_PID | _NEW_NET)
    except OSError as error:
        _reply(f"failed {error}")
        os._exit(1)
    _end_as(_in_child(lambda: _run_init(name, owner)))


def enter(pid: str, folder: str, command: list[str]) -> NoReturn:
    """Run `command` in `folder` on the host whose process number 1 is `pid` outside, and end as it does."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # only the program receives them
    kinds = ("ipc", "uts", "net", "pid", "mnt")
    namespaces = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in kinds]
    for namespace in namespaces:
        _call("setns", namespace, 0)
    os.chdir(folder)
    _end_as(_in_child(lambda: _run_subreaper(command)))


def _run_init(name: str, owner: int) -> NoReturn:
    """Run as process number 1 of a host."""
    try:
        pid = os.readlink("/proc/self")  # as seen from outside: /proc is not mounted yet
        _set_up(name, _read_to_zero())
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies of orphans
    except OSError as error:
        _reply(f"failed {error}")
        os._exit(1)
    _reply(f"ready {pid}")
    waiting = select.poll()
    waiting.register(0, select.POLLIN)
    waiting.register(owner, select.POLLIN)
    while all(descriptor != owner for descriptor, _ in waiting.poll()):
        request = os.read(0, 1)
        if not request:
            break
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, request[0])  # all processes except this one
        os.write(1, request)
    os._exit(0)


def _set_up(name: str, hosts: bytes) -> None:
    """Set the host's name, process table, shared memory, /etc/hosts and TCP settings."""
    os.chdir("/")
    socket.sethostname(name)
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    for name, value in _TCP.items():
        Path("/proc/sys/net/ipv4", name).write_text(value)
    with contextlib.suppress(
        OSError
    ):  # refused in some containers; see [Note: packets in order] in lab_host.py
        _mount("sysfs", "/sys", "sysfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    _mount("tmpfs", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777")
    known = Path("/dev/shm/hosts")
    known.write_bytes(hosts)
    _mount(str(known), "/etc/hosts", None, _MS_BIND)
    known.unlink()  # the mount keeps it


def _run_subreaper(command: list[str]) -> NoReturn:
    """Run `command` until it ends, and adopt the orphans of its descendants."""
    _call("prctl", _SET_CHILD_SUBREAPER, 1)
    _end_as(_in_child(lambda: _exec(command)))


def _exec(command: list[str]) -> NoReturn:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # an ignored signal would stay ignored
    os.execvp(command[0], command)


def _in_child(work: Callable[[], NoReturn]) -> int:
    """Run `work` in a child that dies with this process, wait for it (and adopted orphans), and return its status."""
    parent, child = os.getpid(), os.fork()
    if child == 0:
        try:
            _call("prctl", _SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() in (parent, 0):  # 0: in another namespace; otherwise it ended before that call
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
    """End this process with a wait status: the same exit code, or by the same signal."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        _call("prctl", _SET_DUMPABLE, 0)  # the program has already written its core file
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


def _reply(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    _call("mount", *texts[:3], flags, texts[3], what=f"mount on {target}")


def _call(function: str, *arguments: object, what: str = "") -> None:
    """Call a function of the C library; raise OSError if it fails."""
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
