"""Exit codes and signals as text, and the exit status of processes that are not children."""

from __future__ import annotations

import fcntl
import select
import signal
import struct
import time
from dataclasses import dataclass

__all__ = ["ExitStatus", "describe_exit", "exit_status_of", "has_ended", "signal_name"]


def signal_name(number: int) -> str:
    """Return the name of a signal; real-time signals have none.

    Example:
        >>> signal_name(9), signal_name(40)
        ('SIGKILL', 'signal 40')
    """
    known = number in signal.Signals.__members__.values()
    return signal.Signals(number).name if known else f"signal {number}"


def describe_exit(code: int) -> str:
    """Return an exit code as text; −n: ended by signal n.

    Example:
        >>> describe_exit(3), describe_exit(-9)
        ('ended with exit code 3', 'was ended by SIGKILL')
    """
    return f"ended with exit code {code}" if code >= 0 else f"was ended by {signal_name(-code)}"


_PIDFD_INFO = struct.Struct("<QQ11Ii")  # mask, cgroup, 11 ids, exit code (linux/pidfd.h, struct pidfd_info)
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11
_INFO_EXIT = 1 << 3
_EXIT_CODE_FIELD = 49  # of /proc/<pid>/stat, counted from the state (proc(5): field 52)
_WAIT_SECONDS = 1.0


@dataclass(frozen=True)
class ExitStatus:
    """Exit status of a process.

    Attributes:
        code: its exit code, −n if signal n ended it, None if unknown.
    """

    code: int | None

    def __str__(self) -> str:
        if self.code is None:
            return "exit code unknown"
        return f"exit code {self.code}" if self.code >= 0 else f"ended by {signal_name(-self.code)}"


def has_ended(pidfd: int, seconds: float = 0.0) -> bool:
    """Return whether the process has ended, after waiting at most `seconds`; False without a descriptor (−1)."""
    if pidfd < 0:
        return False
    poll = select.poll()  # takes descriptors above 1023, unlike select()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1e3))


def exit_status_of(pidfd: int, pid: int) -> ExitStatus:
    """Return the exit status of a process that is ending, after waiting up to a second for its end.

    Linux reports it by pidfd (since 6.15), or in /proc until its parent has reaped it.

    Args:
        pidfd: a descriptor of the process, −1 if there is none.
        pid: its process id.
    """
    deadline = time.monotonic() + _WAIT_SECONDS
    has_ended(pidfd, _WAIT_SECONDS)
    while True:
        status = _status_by_pidfd(pidfd)
        if status is None:
            status = _status_by_proc(pid)
        if status is not None:
            return ExitStatus(status >> 8 if status & 0x7F == 0 else -(status & 0x7F))
        if time.monotonic() > deadline:
            return ExitStatus(None)
        time.sleep(0.01)


def _status_by_pidfd(pidfd: int) -> int | None:
    if pidfd < 0:
        return None
    info = bytearray(_PIDFD_INFO.pack(_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    mask, *_, status = _PIDFD_INFO.unpack(info)
    return status if mask & _INFO_EXIT else None


def _status_by_proc(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if len(fields) <= _EXIT_CODE_FIELD or fields[0] not in (b"Z", b"X"):
        return None
    return int(fields[_EXIT_CODE_FIELD])
