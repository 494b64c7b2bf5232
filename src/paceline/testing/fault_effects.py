"""What goes wrong when a fault comes true; `faults` says when and where."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from paceline._core.step_state import step_state
from paceline.errors import UsageError, unknown

__all__ = ["FAILURES", "FAULT_EXIT_CODE", "STALLS", "LimitedDisk", "StepDelay", "flip_sign"]

FAULT_EXIT_CODE = 3
"""Of a rank that exits on purpose."""

_MEMORY_NBYTES = 256 << 20
"""What a rank is left before it runs out."""


def _raise(told: str) -> NoReturn:
    raise RuntimeError(f"a fault on purpose: {told}")


def _exit(_told: str) -> NoReturn:
    os._exit(FAULT_EXIT_CODE)


def _kill(_told: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _run_out_of_memory(_told: str) -> NoReturn:
    with open("/proc/self/statm") as file:
        present = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (present + _MEMORY_NBYTES, before[1]))
    held = []
    try:
        while True:
            held.append(bytearray(16 << 20))
    finally:
        held.clear()
        resource.setrlimit(resource.RLIMIT_AS, before)


FAILURES: dict[str, Callable[[str], None]] = {
    "raise": _raise,
    "exit": _exit,
    "kill": _kill,
    "memory": _run_out_of_memory,
}


def _sleep(seconds: float | None) -> None:
    while seconds is None:
        time.sleep(3600)
    time.sleep(seconds)


def _stop(seconds: float | None) -> None:
    if seconds is not None:  # somebody else has to wake this process
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def _hold_the_lock(seconds: float | None) -> None:
    library = ctypes.PyDLL(None)  # unlike CDLL's, its calls keep Python's lock
    if seconds is None:
        library.sleep(2**31 - 1)
    else:
        library.sleep(int(seconds))
        library.usleep(int(seconds % 1 * 1e6))


STALLS: dict[str, Callable[[float | None], None]] = {"sleep": _sleep, "stop": _stop, "gil": _hold_the_lock}


class StepDelay:
    """Sleeps for a part of every step, once in each.

    Args:
        seconds: how long; None: by `factor`.
        factor: how long a step shall take, without waiting for others, measured by what it takes by itself.
    """

    def __init__(self, seconds: float | None, factor: float | None) -> None:
        self._seconds, self._factor = seconds, factor
        self._step, self._slept = -1, 0.0

    def press(self, _: object) -> None:
        """Sleep, unless that was done in this step."""
        if step_state.step == self._step:
            return
        self._step = step_state.step
        if self._seconds is not None:
            self._slept = self._seconds
        elif self._factor is not None:
            self._slept = (self._factor - 1) * max(0.0, step_state.latest_busy_seconds - self._slept)
        time.sleep(self._slept)


class LimitedDisk:
    """Has room for `nbytes`."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes

    def take(self, nbytes: int) -> None:
        """Use some of it; raise OSError where it does not suffice."""
        if nbytes > self._left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._left -= nbytes


def flip_sign(named_parameters: Iterable[tuple[str, Any]], parameter: str | int, told: str) -> None:
    """Change the sign, one bit, of the largest element of a parameter; of FSDP2's, in this rank's shard."""
    named = list(named_parameters)
    names = [name for name, _ in named]
    if isinstance(parameter, str) and parameter not in names:
        raise unknown(f"parameter in {told}:", parameter, names)
    if isinstance(parameter, int) and not 0 <= parameter < len(named):
        raise UsageError(f"{told}: the model has {len(named)} parameters", remedy="they are counted from 0")
    tensor = named[names.index(parameter) if isinstance(parameter, str) else parameter][1].detach()
    flat = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).view(-1)
    if flat.numel():
        flat[flat.abs().argmax()].neg_()
