"""Steps of a collective: what a process group's call returns to the queue that runs it."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator

import torch

__all__ = ["Job", "Stage", "Steps", "in_callback", "run_job", "run_steps"]


class Stage(enum.IntEnum):
    """How far a call is on this rank: POSTED, the next one may begin; SENT, the others wait for nothing more of it."""

    BEGUN = 0
    POSTED = 1
    SENT = 2


Steps = Iterator[Stage]
"""A call under way: `next` runs its next step, and returns its stage."""

Job = Callable[[], "Steps | None"]
"""Runs a call, or returns its steps."""

_thread = threading.local()


def in_callback() -> bool:
    """Return whether this thread is in a call that a callback has made, see [Note: callbacks] in `async_work`."""
    return getattr(_thread, "in_callback", False)


def run_steps(job: Job) -> None:
    """Run a whole call."""
    with torch.inference_mode():  # may write into any tensor; builds no graph
        for _ in job() or ():
            pass


def run_job(job: Job) -> BaseException | None:
    """Run a whole call that a callback has made, and return the error that it raised."""
    outer, _thread.in_callback = in_callback(), True
    try:
        run_steps(job)
    except BaseException as error:  # noqa: BLE001 — raised by the work's wait()
        return error
    finally:
        _thread.in_callback = outer
    return None
