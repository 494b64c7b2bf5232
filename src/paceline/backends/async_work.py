"""Keeping torch.compile out of the backend.

Inside a compiled model, as DistributedDataParallel's may be, torch traces every Python function that is called
but its own and the standard library's. A collective has nothing to trace, and a process group is an object
that the tracer refuses to look into. So the methods that torch calls are marked to run as they are.

Calls under way: what a collective returns, and the thread that makes collectives in order.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from inspect import isfunction
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._dynamo import eval_frame

from paceline.errors import CollectiveTimeout

__all__ = ["CollectiveWork", "WorkQueue", "untraced"]

_Kind = TypeVar("_Kind", bound=type)


def untraced(kind: _Kind) -> _Kind:
    """Have torch.compile run the methods of a class, and all that they call, as they are."""
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for value in vars(kind).values():
        if isfunction(value):
            eval_frame.set_code_exec_strategy(value.__code__, skip)
    return kind


_LAST_SECONDS = 1.0
"""For the thread of a line that was abandoned to come back from its call."""


@untraced
class CollectiveWork(dist.Work):
    """A collective that is done, or will be.

    Args:
        tensors: what its future gives once it is done.
        name: for messages.
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
        """When it was done, or failed, in seconds of ``time.perf_counter()``."""

    def finish(self, error: BaseException | None = None) -> None:
        """Mark it done, or failed, and make the callbacks of its future."""
        call_back = self.settle(error)
        if call_back is not None:
            call_back()

    def settle(self, error: BaseException | None) -> Callable[[], None] | None:
        """Mark it done, or failed; return what makes the callbacks of its future, if anybody asked for one.

        What it was told first stands: a call that was given up may come to its end all the same.
        """
        with self._lock:
            if self._done.is_set():
                return None
            self._error = error
            self.ended = time.perf_counter()
            self._done.set()
            return None if self._trigger is None else partial(self._trigger.set_result, None)

    def _outcome(self, _: object) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until it is done.

        Args:
            timeout: how long at most; 0: as long as the group waits for its ranks.

        Raises:
            CollectiveTimeout: it was not done by then; it goes on, and can be waited for again.
            Exception: what kept it from being done.
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
        """Return what made it fail."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return its tensors."""
        return self._tensors

    def get_future(self) -> torch.futures.Future:
        """Return a future of its tensors.

        An error is told as a RuntimeError with its text: C++ (DistributedDataParallel waits there) takes what
        a callback raises for a failure, and what ``set_exception`` sets for a value.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            self._trigger = trigger = torch.futures.Future()
            self._future = trigger.then(self._outcome)
            done = self._done.is_set()
        if done:
            trigger.set_result(None)
        return self._future


class _Jobs:
    """What waits in a line; it outlives the line only as long as its thread takes to notice."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Callable[[], None], CollectiveWork]] = deque()
        self.changed = threading.Condition()
        self.unfinished = 0
        self.inline = False
        self.closed = False
        self.under_way: CollectiveWork | None = None

    def close(self) -> None:
        """Have the thread end once nothing waits."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def drop(self, error: BaseException) -> None:
        """Fail everything that waits."""
        with self.changed:
            dropped = [work for _, work in self.waiting]
            self.waiting.clear()
            self.unfinished -= len(dropped)
        for work in dropped:
            work.finish(error)

    def serve(self) -> None:
        """Make the calls in order, until closed.

        [Note: callbacks] The callbacks of a call's future run here, before the next call. What a callback
        calls is made at once, so it can wait for that, and all ranks make it at the same place in the order.
        Until they are through, the call counts as unfinished: no other thread makes one of its own meanwhile.
        """
        while True:
            with self.changed:
                while self.inline or not self.waiting:
                    if self.closed and not self.waiting:
                        return
                    self.changed.wait()
                job, work = self.waiting.popleft()
                self.under_way = work
            error = _made(job)
            del job
            with self.changed:
                self.under_way = None
                call_back = work.settle(error)
                self.unfinished -= call_back is None
            if call_back is not None:
                call_back()
                with self.changed:
                    self.unfinished -= 1
            del work, error, call_back


class WorkQueue:
    """Makes calls one after the other: in the caller's thread if it waits anyway and nothing is before it.

    Args:
        name: of the thread, which starts with the first call that nobody waits for.
    """

    def __init__(self, name: str) -> None:
        self._name, self._jobs = name, _Jobs()
        self._abandoned = False
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._jobs.close)  # where nobody closes it

    def make(
        self, job: Callable[[], None], tensors: list[torch.Tensor], name: str, *, asynchronous: bool
    ) -> CollectiveWork:
        """Have `job` done in its turn; unless `asynchronous`, it is done on return."""
        work = CollectiveWork(tensors, name)
        jobs = self._jobs
        if threading.current_thread() is self._thread:  # [Note: callbacks]
            work.finish(_made(job))
            if not asynchronous:
                work.wait()
            return work
        with jobs.changed:
            inline = not asynchronous and jobs.unfinished == 0
            jobs.unfinished += 1
            jobs.inline = inline or jobs.inline
            if not inline:
                jobs.waiting.append((job, work))
                jobs.changed.notify_all()
        if inline:
            self._make_now(job, work)
        else:
            self._start()
            if not asynchronous:
                work.wait()
        return work

    def _make_now(self, job: Callable[[], None], work: CollectiveWork) -> None:
        jobs = self._jobs
        try:
            with torch.inference_mode():
                job()
        finally:
            with jobs.changed:
                jobs.unfinished -= 1
                jobs.inline = False
                jobs.changed.notify_all()
        work.finish()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._jobs.serve, name=self._name, daemon=True)
            self._thread.start()

    def abandon(self, error: BaseException) -> None:
        """Fail what is in line, and what is under way in the thread, which may never come back from it."""
        self._abandoned = True
        under_way = self._jobs.under_way
        self._jobs.drop(error)
        if under_way is not None:
            under_way.finish(error)

    def close(self, error: BaseException | None = None) -> None:
        """End the thread: once everything in line is done, or, given an error, with everything failed."""
        if error is not None:
            self._jobs.drop(error)
        self._jobs.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_LAST_SECONDS if self._abandoned else None)


def _made(job: Callable[[], None]) -> BaseException | None:
    """Make a call and return what it raised."""
    try:
        with torch.inference_mode():  # writes into any tensor; builds no graph
            job()
    except BaseException as raised:  # noqa: BLE001 — told to whoever waits for it
        return raised
    return None
