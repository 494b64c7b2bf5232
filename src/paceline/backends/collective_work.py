"""Work objects: what a collective returns, and the future of its tensors."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from inspect import isfunction
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._dynamo import eval_frame

from paceline.errors import CollectiveTimeout

__all__ = ["Callback", "CollectiveWork", "untraced"]

_Class = TypeVar("_Class", bound=type)
Callback = Callable[[], None]

_EXIT_SECONDS = 5.0
"""Wait for callbacks when the interpreter ends."""


def untraced(cls: _Class) -> _Class:
    """Exclude the methods of a class, and everything that they call, from torch.compile.

    Inside a compiled model, as DistributedDataParallel's may be, torch traces every Python function except its own
    and the standard library's. A collective has nothing to trace, and the tracer refuses process group objects.
    """
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for value in vars(cls).values():
        if isfunction(value):
            eval_frame.set_code_exec_strategy(value.__code__, skip)
    return cls


class _Callbacks:
    """Runs the callbacks of futures, until the interpreter ends.

    They are called from C++. A daemon thread that still runs one then would be stopped there, which aborts the process.
    """

    def __init__(self) -> None:
        self._reset()
        atexit.register(self._close)
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._changed, self._running, self._closed = threading.Condition(), 0, False

    def run(self, trigger: torch.futures.Future) -> None:
        """Complete a future, unless the interpreter ends."""
        with self._changed:
            if self._closed:
                return
            self._running += 1
        try:
            trigger.set_result(None)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._running == 0, _EXIT_SECONDS)


_callbacks = _Callbacks()


@untraced
class CollectiveWork(dist.Work):
    """A call that is pending, done or failed.

    Args:
        tensors: value of its future.
        name: of the call, for messages.

    Attributes:
        ended: when it was done or failed, in seconds of ``time.perf_counter()``; None: pending.
    """

    def __init__(self, tensors: list[torch.Tensor], name: str = "") -> None:
        super().__init__()
        self._tensors, self._name = tensors, name
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._trigger: torch.futures.Future | None = None
        self._future: torch.futures.Future | None = None
        self.ended: float | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """Mark it done, or failed with `error`, and run the callbacks of its future."""
        run_callbacks = self.mark_done(error)
        if run_callbacks is not None:
            run_callbacks()

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self._tensors)

    @property
    def has_future(self) -> bool:
        """Whether its future was requested, which may have callbacks."""
        return self._future is not None

    def mark_done(self, error: BaseException | None) -> Callback | None:
        """Mark it done or failed; return a function that runs the callbacks of its future, or None without any.

        The first outcome stands: an aborted call may still complete.
        """
        with self._lock:
            if self._done.is_set():
                return None
            self._error = error
            self.ended = time.perf_counter()
            self._done.set()
            return None if self._trigger is None else partial(_callbacks.run, self._trigger)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until it is done.

        Args:
            timeout: longest wait; 0: as long as the group waits for its ranks.

        Raises:
            CollectiveTimeout: it is still pending after `timeout`, and can be waited for again.
            Exception: the error with which it failed.
        """
        if not self._done.wait(timeout.total_seconds() or None):
            raise CollectiveTimeout(f"{self._name} was not done within {timeout.total_seconds():g} s")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Block until it is done."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether it is done or has failed."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Return whether it is done and has not failed."""
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error with which it failed."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return its tensors."""
        return self._tensors

    def get_future(self) -> torch.futures.Future:
        """Return a future of its tensors.

        An error surfaces as RuntimeError with its text: C++ (DistributedDataParallel waits there) treats an error
        that a callback raises as a failure, and one passed to ``set_exception`` as a value.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            self._trigger = trigger = torch.futures.Future()
            self._future = trigger.then(self._outcome)
            done = self._done.is_set()
        if done:
            _callbacks.run(trigger)
        return self._future

    def _outcome(self, _: object) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors
