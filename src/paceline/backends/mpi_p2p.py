"""Point-to-point messages over MPI: Isend and Irecv, tested whenever their work is queried."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from paceline._core.poll_backoff import Backoff
from paceline.backends.collective_work import CollectiveWork, untraced
from paceline.backends.op_arguments import Contiguous, as_bytes, check_peer
from paceline.errors import CollectiveError, CollectiveTimeout, UsageError

__all__ = ["MpiPointToPoint"]

_CLOSE_SECONDS = 1.0
"""Wait for sent messages to be received when a rank leaves."""


@untraced
class MpiMessageWork(CollectiveWork):
    """A message that is being sent or received.

    Args:
        p2p: the messages of this rank, for MPI and the time-out.
        request: of MPI.
        tensor: the caller's tensor.
        buffer: what MPI reads or writes; copied back at the end.
        name: for messages.
        receives: it is a receive, which must fill the tensor.
    """

    def __init__(
        self,
        p2p: MpiPointToPoint,
        request: Any,
        tensor: Tensor,
        *,
        buffer: Contiguous,
        name: str,
        receives: bool,
    ) -> None:
        super().__init__([tensor], name)
        self._p2p, self._request, self._buffer = p2p, request, buffer
        self._receives, self._source = receives, -1
        self._testing = threading.Lock()

    def test(self) -> bool:
        """Return whether it is done or has failed, as MPI reports now."""
        error: Exception | None = None
        with self._testing:
            if self._done.is_set():
                return True
            status = self._p2p.mpi.Status()
            try:
                if not self._request.Test(status):
                    return False
                if self._receives:
                    self._complete_receive(status)
            except (self._p2p.mpi.Exception, UsageError) as raised:
                error = raised
            run_callbacks = self.mark_done(error)
        if run_callbacks is not None:
            run_callbacks()  # may call test()
        return True

    def _complete_receive(self, status: Any) -> None:
        self._source = status.Get_source()
        nbytes, expected = status.Get_count(self._p2p.mpi.BYTE), self._buffer.tensor.nbytes
        if nbytes != expected:
            raise UsageError(
                f"{self._name}: the message from rank {self._source} has {nbytes} bytes, the tensor {expected}",
                remedy="receive into a tensor of the size and dtype that was sent",
            )
        with torch.inference_mode():
            self._buffer.__exit__(None, None, None)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until it has ended; parameters and errors as for `CollectiveWork.wait`."""
        seconds = timeout.total_seconds() or self._p2p.timeout
        backoff, deadline = Backoff(), time.monotonic() + seconds
        while not self.test():
            if time.monotonic() > deadline:
                raise CollectiveTimeout(f"{self._name} was not done within {seconds:g} s")
            backoff.wait()
        return super().wait()

    def is_completed(self) -> bool:
        return self.test()

    def is_success(self) -> bool:
        return self.test() and super().is_success()

    def source_rank(self) -> int:
        """Return the rank, in the group, that sent the message."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """Return a future of its tensor; a thread waits for the message."""
        future = super().get_future()
        if not self._done.is_set():
            threading.Thread(target=self._wait_in_thread, name="mpi4py message", daemon=True).start()
        return future

    def _wait_in_thread(self) -> None:
        try:
            self.wait()
        except CollectiveTimeout as error:
            self.finish(error)
        except Exception:  # noqa: BLE001 — the future raises it
            return

    def cancel(self) -> bool:
        """Cancel a receive, and return whether the message has ended."""
        run_callbacks = None
        if not self.test() and self._receives:
            with self._testing:
                if not self._done.is_set():
                    self._request.Cancel()
                    self._request.Wait()
                    error = CollectiveError(f"{self._name}: this rank left the group with it pending")
                    run_callbacks = self.mark_done(error)
        if run_callbacks is not None:
            run_callbacks()
        return self._done.is_set()


class MpiPointToPoint:
    """The messages of this rank.

    Args:
        mpi: the module ``mpi4py.MPI``.
        comm: a communicator of this group that nothing else uses.
        timeout: seconds to wait for a message.

    Attributes:
        stuck: a sent message was never received, so MPI can't be finalised.
    """

    def __init__(self, mpi: Any, comm: Any, timeout: float) -> None:
        self.mpi, self._comm, self.timeout = mpi, comm, timeout
        self._largest_tag = comm.Get_attr(mpi.TAG_UB)
        self._pending: list[MpiMessageWork] = []
        self._lock = threading.Lock()
        self.stuck = False

    def send(self, tensor: Tensor, target: int, tag: int) -> MpiMessageWork:
        """Start sending a tensor; done once it may be changed."""
        check_peer("send", target, self._comm.rank, self._comm.size)
        buffer = Contiguous(tensor, write=False)
        request = self._comm.Isend(self._bytes(buffer.tensor), target, self._checked(tag))
        name = f"send to rank {target}"
        return self._track(MpiMessageWork(self, request, tensor, buffer=buffer, name=name, receives=False))

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> MpiMessageWork:
        """Start receiving into a tensor, from `source` or, if None, from any rank."""
        if source is not None:
            check_peer("recv", source, self._comm.rank, self._comm.size)
        buffer = Contiguous(tensor, read=False)
        peer = self.mpi.ANY_SOURCE if source is None else source
        request = self._comm.Irecv(self._bytes(buffer.tensor), peer, self._checked(tag))
        name = f"recv from {'any rank' if source is None else f'rank {source}'}"
        return self._track(MpiMessageWork(self, request, tensor, buffer=buffer, name=name, receives=True))

    def _track(self, work: MpiMessageWork) -> MpiMessageWork:
        """Keep a work, and with it the memory that MPI uses, until it has ended."""
        with self._lock:
            earlier = self._pending.copy()
            self._pending.append(work)
        ended = {id(each) for each in earlier if each.test()}  # without the lock: callbacks may send
        with self._lock:
            self._pending = [each for each in self._pending if id(each) not in ended]
        return work

    def _checked(self, tag: int) -> int:
        if not 0 <= tag <= self._largest_tag:
            raise UsageError(f"tag {tag}: MPI has tags from 0 to {self._largest_tag}")
        return tag

    def _bytes(self, tensor: Tensor) -> list[Any]:
        return [as_bytes(tensor).numpy(), tensor.nbytes, self.mpi.BYTE]

    def close(self) -> None:
        """Stop: receives are cancelled, sends have a moment left to be received."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        backoff = Backoff()
        with self._lock:
            pending = list(self._pending)
        with contextlib.suppress(self.mpi.Exception):
            while not all([each.cancel() for each in pending]):
                if time.monotonic() > deadline:
                    self.stuck = True
                    return
                backoff.wait()
            self._pending.clear()
            self._comm.Free()
