"""Pending calls: the work object that a collective returns, and the queue that runs collectives in order."""

from __future__ import annotations

import atexit
import os
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

from paceline.backends.call_steps import Job, Stage, run_job, run_steps
from paceline.errors import CollectiveTimeout

__all__ = ["CollectiveWork", "FinishedWork", "WorkQueue", "untraced"]

_Class = TypeVar("_Class", bound=type)
Callback = Callable[[], None]

_MOST_OPEN = 12
"""Calls that have begun and are not done."""

_AHEAD_NBYTES = 8 << 20
"""Bytes of calls that have begun and not sent everything, a long call counting as half of it: short ones need several
for a link that is never idle.
"""

_JOIN_SECONDS = 1.0
"""Wait for the thread of an aborted queue to return from its call."""

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


@untraced
class FinishedWork(dist.Work):
    """A call that was done when it returned.

    Args:
        tensors: value of its future.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return at once."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True."""
        return True

    def exception(self) -> None:
        """Return None: it has not failed."""

    def result(self) -> list[torch.Tensor]:
        """Return its tensors."""
        return self._tensors

    def get_future(self) -> torch.futures.Future:
        """Return a future that has its tensors."""
        future = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class _QueuedCall:
    """A call in a queue.

    Args:
        job: what it does.
        work: its work object.
        overlaps: its first step does not wait for other ranks, so the call before it may still be open.
    """

    def __init__(self, job: Job, work: CollectiveWork, overlaps: bool) -> None:
        self.work, self.overlaps = work, overlaps
        self.stage = Stage.BEGUN
        self.error: BaseException | None = None
        self._job, self._steps = job, iter(())
        self._begun = self._ended = False

    def step(self) -> bool:
        """Run the next step; return whether the call is still open."""
        if self._ended:
            return False
        try:
            with torch.inference_mode():  # may write into any tensor; builds no graph
                if not self._begun:
                    self._begun, self._steps = True, self._job() or self._steps
                self.stage = next(self._steps)
        except StopIteration:
            self._ended = True
        except BaseException as error:  # noqa: BLE001 — raised by the work's wait()
            self.error, self._ended = error, True
        return not self._ended


class _QueueState:
    """State that a queue shares with its thread, which outlives the queue until it notices that it was closed."""

    def __init__(self) -> None:
        self.pending: deque[_QueuedCall] = deque()
        self.open: deque[_QueuedCall] = deque()  # begun by the thread; the first one is completed first
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.unfinished = 0
        self.inline = False
        self.closed = False

    def close(self) -> None:
        """End the thread once nothing is pending."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def fail_pending(self, error: BaseException) -> None:
        with self.changed:
            failed = [call.work for call in self.pending]
            self.pending.clear()
            self.unfinished -= len(failed)
        for work in failed:
            work.finish(error)

    def fail_open(self, error: BaseException) -> None:
        with self.changed:
            works = [call.work for call in self.open]
        for work in works:
            work.finish(error)

    def run(self) -> None:
        """Run calls in order until closed.

        [Note: callbacks] The callbacks of a call's future run here, before the next call is completed. A call made by
        a callback runs at once, so that the callback can wait for it, and runs on all ranks at the same place among
        the calls that callbacks make; calls that are open stay as they are meanwhile, and may be fewer on other ranks.
        Until the callbacks have returned, the call counts as unfinished: no other thread runs one inline meanwhile.
        """
        while True:
            with self.changed:
                while not self.open and (self.inline or not self.pending):
                    if self.closed and not self.pending:
                        return
                    self.changed.wait()
            self._begin_next()
            self._complete_first()

    def _complete_first(self) -> None:
        """Complete the first open call, beginning others meanwhile, and run its callbacks."""
        if not self.open:  # the pending calls were failed a moment ago
            return
        call = self.open[0]
        while call.step():
            self._begin_next()
            self._advance_behind()
        with self.changed:
            self.open.popleft()
            run_callbacks = call.work.mark_done(call.error)
            self.unfinished -= run_callbacks is None
        if run_callbacks is not None:
            run_callbacks()
            with self.changed:
                self.unfinished -= 1

    def _advance_behind(self) -> None:
        """Run a step of the first open call that other ranks wait for, if no call before it has a future.

        Its callbacks may make calls, which have to be complete before other ranks go on with later calls.
        """
        for call in self.open:
            if call.stage < Stage.SENT:
                if call is not self.open[0]:
                    call.step()
                return
            if call.work.has_future:
                return

    def _begin_next(self) -> None:
        """Run the first step of the pending calls that may begin."""
        while True:
            with self.changed:
                if not self.pending or not self._may_begin(self.pending[0]):
                    return
                call = self.pending.popleft()
                self.open.append(call)
            call.step()

    def _may_begin(self, call: _QueuedCall) -> bool:
        if not self.open:
            return True
        if not call.overlaps or self.open[-1].stage < Stage.POSTED or len(self.open) >= _MOST_OPEN:
            return False
        unsent = (each.work.nbytes for each in self.open if each.stage < Stage.SENT)
        return sum(min(nbytes, _AHEAD_NBYTES // 2) for nbytes in unsent) < _AHEAD_NBYTES


class WorkQueue:
    """Completes calls one after the other: in the caller's thread if it waits anyway and nothing is before it.

    The first steps of a call run before the one before is done, where both allow that: so the messages of a call
    follow those of the one before without a pause.

    Args:
        name: of the thread, which starts with the first asynchronous call.
    """

    def __init__(self, name: str) -> None:
        self._name, self._state = name, _QueueState()
        self._aborted = False
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._state.close)  # for queues that nobody closes

    def submit(
        self, job: Job, tensors: list[torch.Tensor], name: str, *, asynchronous: bool, overlaps: bool = False
    ) -> CollectiveWork:
        """Run `job` in its turn; unless `asynchronous`, it is done on return.

        Args:
            job: runs the call, or returns its steps.
            tensors: value of its future.
            name: of the call, for messages.
            asynchronous: return at once.
            overlaps: its first step does not wait for other ranks, so the call before it may still be open.
        """
        work = CollectiveWork(tensors, name)
        state = self._state
        if threading.current_thread() is self._thread:  # [Note: callbacks]
            work.finish(run_job(job))
            if not asynchronous:
                work.wait()
            return work
        with state.changed:
            inline = not asynchronous and state.unfinished == 0
            state.unfinished += 1
            state.inline = inline or state.inline
            if not inline:
                state.pending.append(_QueuedCall(job, work, overlaps))
                state.changed.notify_all()
        if inline:
            self._run_inline(job, work)
            return work
        if self._thread is None:
            self._thread = threading.Thread(target=state.run, name=self._name, daemon=True)
            self._thread.start()
        if not asynchronous:
            work.wait()
        return work

    def _run_inline(self, job: Job, work: CollectiveWork) -> None:
        try:
            run_steps(job)
        finally:
            self.leave()
        work.finish()

    def enter(self) -> bool:
        """Return whether the caller may run a call itself: nothing is before it. Then `leave` must follow."""
        state = self._state
        with state.lock:
            if state.unfinished:
                return False
            state.unfinished, state.inline = 1, True
        return True

    def leave(self) -> None:
        """End a call that the caller ran itself."""
        state = self._state
        with state.lock:
            state.unfinished -= 1
            state.inline = False
            if state.pending or state.closed:
                state.changed.notify_all()

    def abort(self, error: BaseException) -> None:
        """Fail the pending calls, and those that run in the thread, which may never return."""
        self._aborted = True
        self._state.fail_pending(error)
        self._state.fail_open(error)

    def close(self, error: BaseException | None = None) -> None:
        """End the thread, once every pending call is done or, given an error, has failed with it."""
        if error is not None:
            self._state.fail_pending(error)
        self._state.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS if self._aborted else None)
