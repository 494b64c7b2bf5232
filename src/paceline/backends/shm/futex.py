"""Linux futexes: sleeping on a word of shared memory until another process changes it.

A word is a 32-bit unsigned integer at a multiple of 4 bytes. The kernel adds to it atomically and with release order:
what a process wrote before :func:`add` is visible to every process that sees the sum (futex(2)).
"""

from __future__ import annotations

import ctypes
import errno
import platform
import sys
from collections.abc import Callable
from functools import partial

__all__ = ["SUPPORTED", "add", "fence", "subtract", "wait", "wake"]

_SYSCALL = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_NUMBER = _SYSCALL.get(platform.machine(), 0) if sys.maxsize > 2**32 else 0

SUPPORTED = sys.platform == "linux" and _NUMBER > 0
"""True if this platform supports the functions of this module."""

_WAIT, _WAKE, _WAKE_OP = 0, 1, 5
# Op ADD, argument 1 or, in 12 bits, −1; wakes a second word only if old == −1.
_ADD_ONE_NEVER_WAKE = (1 << 28) | (1 << 12) | 0xFFF
_SUBTRACT_ONE_NEVER_WAKE = (1 << 28) | (0xFFF << 12) | 0xFFF
_ALL = 2**31 - 1
_STRONG_ORDER = platform.machine() in ("x86_64", "AMD64")

_unused_word = ctypes.c_uint32(0)
_unused_address = ctypes.addressof(_unused_word)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _futex_call(library: type[ctypes.CDLL]) -> Callable[[int, int, int, int | None, int | None, int], int]:
    """Return the system call as made by a PyDLL, which keeps the interpreter's lock, or a CDLL, which releases it."""
    syscall = library(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    word, pointer = ctypes.c_uint32, ctypes.c_void_p
    syscall.argtypes = [ctypes.c_long, pointer, ctypes.c_int, word, pointer, pointer, word]
    return partial(syscall, _NUMBER)


_futex_keeping_gil, _futex_releasing_gil = _futex_call(ctypes.PyDLL), _futex_call(ctypes.CDLL)


def add(address: int) -> None:
    """Add 1 to the word at `address`, atomically over all processes that share it."""
    _futex_keeping_gil(_unused_address, _WAKE_OP, 0, None, address, _ADD_ONE_NEVER_WAKE)


def subtract(address: int) -> None:
    """Subtract 1 from the word at `address`, atomically over all processes that share it."""
    _futex_keeping_gil(_unused_address, _WAKE_OP, 0, None, address, _SUBTRACT_ONE_NEVER_WAKE)


def wake(address: int) -> None:
    """Wake all sleepers on the word at `address`."""
    _futex_keeping_gil(address, _WAKE, _ALL, None, None, 0)


def wait(address: int, seen: int, seconds: float) -> None:
    """Sleep until woken, unless the word at `address` differs from `seen`; at most `seconds`.

    May return early, so the caller checks the word again. Other threads run meanwhile.
    """
    whole = int(seconds)
    limit = _Timespec(whole, int((seconds - whole) * 1e9))
    if _futex_releasing_gil(address, _WAIT, seen, ctypes.addressof(limit), None, 0) < 0:
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(number, f"futex wait: {errno.errorcode.get(number, number)}")


def fence() -> None:
    """Order this process's earlier reads of shared memory before its later ones."""
    if not _STRONG_ORDER:
        wake(_unused_address)  # every futex call is a full barrier
