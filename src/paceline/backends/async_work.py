"""The queue that runs the collectives of a group in order."""

from __future__ import annotations

import threading
import weakref
from collections import deque

import torch

from paceline.backends.call_steps import Job, Stage, run_steps
from paceline.backends.collective_work import CollectiveWork

__all__ = ["WorkQueue"]

_MOST_OPEN = 12
"""Calls that have begun and are not done."""

_AHEAD_NBYTES = 8 << 20
"""Bytes of calls that have begun and not sent everything, a long call counting as half of it: short ones need several
for a link that is never idle.
"""

_JOIN_SECONDS = 1.0
"""Wait for the thread of an aborted queue to return from its call."""


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

        [Note: callbacks] The callbacks of a call's future run here, or in the thread that adds one once the call is
        done. A call made by a callback runs at once, so that the callback can wait for it. On all ranks it is to run
        after the call whose future has the callback, and before the next one: so no call begins while an open one has
        a future, and until its callbacks have returned a call counts as unfinished, so that no other thread runs one
        inline meanwhile.
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
        """Run a step of the first open call that other ranks wait for, unless it is the first of all."""
        for call in self.open:
            if call.stage < Stage.SENT:
                if call is not self.open[0]:
                    call.step()
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
        if any(each.work.has_future for each in self.open):  # [Note: callbacks]
            return False
        unsent = (each.work.nbytes for each in self.open if each.stage < Stage.SENT)
        return sum(min(nbytes, _AHEAD_NBYTES // 2) for nbytes in unsent) < _AHEAD_NBYTES


def _outcome(job: Job) -> BaseException | None:
    """Run a whole call, and return the error that it raised."""
    try:
        run_steps(job)
    except BaseException as error:  # noqa: BLE001 — raised by the work's wait()
        return error
    return None


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
            work.finish(_outcome(job))
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
