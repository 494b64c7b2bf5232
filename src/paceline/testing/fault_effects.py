"""Effects of injected faults; `fault_injection` decides when and on which rank they happen."""

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
"""Exit code of a rank that an injected fault ends."""

_MEMORY_NBYTES = 256 << 20
"""Memory a rank can still allocate before it runs out."""


def _raise(call: str) -> NoReturn:
    raise RuntimeError(f"injected fault: {call}")


def _exit(_call: str) -> NoReturn:
    os._exit(FAULT_EXIT_CODE)


def _kill(_call: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _run_out_of_memory(_call: str) -> NoReturn:
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
    if seconds is not None:  # a stopped process cannot wake itself
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def _hold_the_lock(seconds: float | None) -> None:
    library = ctypes.PyDLL(None)  # unlike CDLL's, its calls keep the GIL
    if seconds is None:
        library.sleep(2**31 - 1)
    else:
        library.sleep(int(seconds))
        library.usleep(int(seconds % 1 * 1e6))


STALLS: dict[str, Callable[[float | None], None]] = {"sleep": _sleep, "stop": _stop, "gil": _hold_the_lock}


class StepDelay:
    """Slows every step by one sleep.

    Args:
        seconds: duration of the sleep; None: derived from `factor`.
        factor: duration of a step relative to its own time, which excludes waiting for other ranks.
    """

    def __init__(self, seconds: float | None, factor: float | None) -> None:
        self._seconds, self._factor = seconds, factor
        self._step, self._slept = -1, 0.0

    def apply(self, _: object) -> None:
        """Sleep, on the first call of each step."""
        if step_state.step == self._step:
            return
        self._step = step_state.step
        if self._seconds is not None:
            self._slept = self._seconds
        elif self._factor is not None:
            self._slept = (self._factor - 1) * max(0.0, step_state.latest_busy_seconds - self._slept)
        time.sleep(self._slept)


class LimitedDisk:
    """Disk with `nbytes` of free space."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes

    def write(self, nbytes: int) -> None:
        """Use some of the space; raise OSError (ENOSPC) if it does not suffice."""
        if nbytes > self._left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._left -= nbytes


def flip_sign(named_parameters: Iterable[tuple[str, Any]], parameter: str | int, call: str) -> None:
    """Flip the sign bit of the largest element of a parameter; for FSDP2, of this rank's shard."""
    named = list(named_parameters)
    names = [name for name, _ in named]
    if isinstance(parameter, str) and parameter not in names:
        raise unknown(f"parameter in {call}:", parameter, names)
    if isinstance(parameter, int) and not 0 <= parameter < len(named):
        raise UsageError(f"{call}: the model has {len(named)} parameters", remedy="their numbers start at 0")
    tensor = named[names.index(parameter) if isinstance(parameter, str) else parameter][1].detach()
    flat = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).view(-1)
    if flat.numel():
        flat[flat.abs().argmax()].neg_()
