"""Tiny programs in forked children, for tests that need several processes."""

from __future__ import annotations

import gc
import os
import signal
import time
import traceback
from collections.abc import Callable

import torch

__all__ = ["ended", "in_child", "start"]


def start(work: Callable[[], object]) -> int:
    """Run `work` in a forked child and return its process number; its exit code is 0 where `work` gives True."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            gc.disable()  # else descriptors that earlier tests left in cycles may be closed in the midst of it
            torch.set_num_threads(1)  # the parent's other threads are not here
            code = 0 if work() is True else 1
        except BaseException:  # noqa: BLE001 - the exit code shows that it failed, this shows why
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def ended(pid: int, seconds: float = 30.0) -> int:
    """Return the exit code of a child, −n if signal n ended it; one that hangs is killed."""
    deadline = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def in_child(work: Callable[[], object], seconds: float = 30.0) -> int:
    """Run `work` in a forked child to its end, and return the exit code."""
    return ended(start(work), seconds)
