"""A thread that does the second half of an exchange: waits for what was sent, and answers.

An exchange in two stages needs somebody in the middle who sums what came in and sends the sum on. While the first
stage is on the wire the training thread computes, and gloo can't be asked whether a message has come: it can only
be waited for. So a courier waits: one thread for each engine, which does what it is given in the order in which it
was given. All ranks give in the same order. Torch lets go of the interpreter's lock while it computes or waits.

Where calls order themselves on a stream (NCCL), waiting costs the host nothing: the courier is a stream of its own.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["ExchangeThread", "PendingExchange"]

_Job = tuple[Callable[[], None], "PendingExchange"]


class PendingExchange:
    """Stands for a job that was given to a courier."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._event: Any = None  # torch has two classes of CUDA events

    def wait(self) -> None:
        """Block until the job is done, and raise what it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        if self._event is not None:
            self._event.wait()

    def run(self, job: Callable[[], None]) -> None:
        """Do the job in this thread; errors are for whoever waits."""
        try:
            job()
        except BaseException as error:  # noqa: BLE001 — raised by wait()
            self._error = error
        self._done.set()

    def run_on(self, stream: torch.cuda.Stream, job: Callable[[], None]) -> None:
        """Queue the job on `stream`, behind what the current stream has been given so far."""
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self.run(job)
            self._event = stream.record_event()


class ExchangeThread:
    """Does jobs one after another, beside the thread that gives them.

    Args:
        device: where the data are. on_stream: use a CUDA stream instead of a thread.
    """

    def __init__(self, device: torch.device, *, on_stream: bool = False) -> None:
        self._stream = torch.cuda.Stream(device) if on_stream else None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def give(self, job: Callable[[], None]) -> PendingExchange:
        """Have `job` done after those that were given before; returns at once."""
        ticket = PendingExchange()
        if self._stream is not None:
            ticket.run_on(self._stream, job)
            return ticket
        if self._thread is None:
            # A daemon: a job may wait for a rank that never answers, and the process must be able to end.
            self._thread = threading.Thread(
                target=_serve, args=(self._jobs,), name="paceline courier", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        self._jobs.put((job, ticket))
        return ticket


def _serve(jobs: queue.SimpleQueue[_Job | None]) -> None:
    """Do jobs until there is a None; holds nothing of the last one while it waits for the next."""
    torch.set_grad_enabled(False)
    while (given := jobs.get()) is not None:
        job, ticket = given
        ticket.run(job)
        del given, job, ticket
