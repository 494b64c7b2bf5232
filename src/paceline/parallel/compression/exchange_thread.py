"""Thread that runs the second half of two-stage exchanges: waits for what peers sent, reduces, and sends the sum on.

While the first stage is on the wire the training thread computes, and gloo can't be polled for messages: it can only be
waited for. So each engine has one thread that runs jobs in submission order; all ranks submit in the same order. Torch
releases the interpreter lock while it computes or waits. The thread is a daemon, which those of an executor are not: a
job may wait for a rank that never answers, and the process must be able to end.

Where collectives are ordered on a stream (NCCL), waiting costs the host nothing: jobs are queued on a stream instead. A
job waits first for the collective that it continues, which the device runs after all that was queued before it; the
stream needs no other order. Memory that jobs use is allocated on other streams, and `keep` says so to the allocator: if
a round is given up, its memory is not handed out again before its jobs are done.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from paceline.world.accelerator import current_stream, has_streams, make_stream, on_stream

__all__ = ["ExchangeThread", "PendingExchange"]


class PendingExchange(Future[Any]):
    """A submitted job; its result is the event of the stream that marks its end, or None."""

    def wait(self) -> None:
        """Block until the job is done (on an accelerator: order the current stream behind it); raise what it raised."""
        event = self.result()
        if event is not None:
            event.wait()

    def run(self, job: Callable[[], Any]) -> None:
        try:
            self.set_result(job())
        except BaseException as error:  # noqa: BLE001 — raised by wait()
            self.set_exception(error)


class ExchangeThread:
    """Runs jobs one after another, concurrently with the thread that submits them.

    Args:
        device: of the data.
        on_stream: use a stream of the device, if it has any, instead of a thread.
    """

    def __init__(self, device: torch.device, *, on_stream: bool = False) -> None:
        self._device = device
        self._stream = make_stream(device) if on_stream and has_streams(device) else None
        self._jobs: queue.SimpleQueue[tuple[PendingExchange, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def keep(self, *memory: Tensor) -> None:
        """Hand out no tensor's memory again, once it is freed, before the jobs queued until then are done."""
        if self._stream is not None:
            for tensor in memory:
                if tensor.numel():
                    tensor.record_stream(self._stream)

    def submit(self, job: Callable[[], Any]) -> PendingExchange:
        """Run `job` after those submitted before; returns at once.

        A job begins by waiting for a collective that was launched before; in a thread it uses the caller's stream.
        """
        pending = PendingExchange()
        if self._stream is not None:
            pending.run(_on(self._stream, job))
            return pending
        if has_streams(self._device):
            job = _on(current_stream(self._device), job)
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run_jobs, args=(self._jobs,), name="paceline exchange", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        self._jobs.put((pending, job))
        return pending


def _on(stream: Any, job: Callable[[], None]) -> Callable[[], Any]:
    """Return the job on a stream; it returns the event of its end."""

    def run() -> Any:
        with on_stream(stream):
            job()
            return stream.record_event()

    return run


def _run_jobs(jobs: queue.SimpleQueue[tuple[PendingExchange, Callable[[], Any]] | None]) -> None:
    """Run jobs until None comes; keeps no reference to the last one while waiting for the next."""
    torch.set_grad_enabled(False)
    while (submitted := jobs.get()) is not None:
        pending, job = submitted
        pending.run(job)
        del submitted, pending, job
