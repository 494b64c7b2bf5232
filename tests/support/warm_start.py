"""Starts warm processes that fork others, and ends them with their parent, or as programs end."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["die_with", "end_as_a_program", "preload_modules", "start_warm_process"]

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def start_warm_process(script: str, descriptor: int) -> subprocess.Popen[bytes]:
    """Start a script that serves at `descriptor` with one compute thread; arguments: `descriptor` and our pid."""
    return subprocess.Popen(
        [sys.executable, script, str(descriptor), str(os.getpid())],
        pass_fds=[descriptor],
        env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
    )


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def end_as_a_program(work: Callable[..., Any], *args: Any) -> NoReturn:
    """Work, and end with what the end of a program does: threads are waited for, functions at exit are called.

    Only the modules are not taken apart, which would copy all of the warm process's memory: 0.3 s.
    """
    code: object = None
    try:
        work(*args)
    except SystemExit as end:
        code = end.code
    except BaseException as error:  # noqa: BLE001 — shown, as at the end of a program
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)


def preload_modules() -> None:
    """Import torch, what its optimizers and FSDP2 import when first used, Paceline and pytest; start no thread."""
    import pytest  # noqa: F401 — as modules of tests do
    import torch
    import torch._dynamo  # takes a second, which no child then needs for an optimizer
    import torch.distributed.fsdp

    import paceline.backends.group_factory
    import paceline.data.loader
    import paceline.tools.bench.step.strategy_trainers
    import paceline.tools.train.training_job  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # no collection in a child looks at, and so copies, the half a million objects of these modules
    assert len(os.listdir("/proc/self/task")) == 1, "a forked child would lack these threads"
