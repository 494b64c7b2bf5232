"""Messages from one rank to another over MPI: Isend and Irecv, looked at whenever somebody asks."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from typing import Any

import torch

from paceline._core.backoff import Backoff
from paceline.backends.async_work import CollectiveWork, untraced
from paceline.backends.op_arguments import Dense, bytes_of, check_peer
from paceline.errors import CollectiveError, CollectiveTimeout, UsageError

__all__ = ["MpiPointToPoint"]

_LAST_SECONDS = 1.0
"""How long a rank that leaves waits for its messages to be taken."""


@untraced
class MessageWork(CollectiveWork):
    """A message under way.

    Args:
        mpi: the module ``mpi4py.MPI``.
        request: MPI's own.
        tensor: what the caller gave. dense: what MPI reads or writes, copied back in the end.
        name: for messages.
        mail: knows how long to wait.
        receives: whether it is a receive, which has to fill the tensor.
    """

    def __init__(
        self,
        mpi: Any,
        request: Any,
        tensor: torch.Tensor,
        dense: Dense,
        name: str,
        mail: MpiPointToPoint,
        receives: bool,
    ) -> None:
        super().__init__([tensor], name)
        self._mpi, self._request, self._dense, self._mail = mpi, request, dense, mail
        self._receives, self._source = receives, -1
        self._looking = threading.Lock()

    def look(self) -> bool:
        """Return whether it has ended, after asking MPI."""
        error: Exception | None = None
        with self._looking:
            if self._done.is_set():
                return True
            status = self._mpi.Status()
            try:
                if not self._request.Test(status):
                    return False
                self._end(status)
            except (self._mpi.Exception, UsageError) as raised:
                error = raised
            call_back = self.settle(error)
        if call_back is not None:
            call_back()  # it may look itself
        return True

    def _end(self, status: Any) -> None:
        if not self._receives:
            return
        self._source = status.Get_source()
        nbytes = status.Get_count(self._mpi.BYTE)
        if nbytes != self._dense.dense.nbytes:
            raise UsageError(
                f"{self._name}: the message from rank {self._source} has {nbytes} bytes, "
                f"the tensor {self._dense.dense.nbytes}",
                remedy="receive into a tensor of the size and dtype that was sent",
            )
        with torch.inference_mode():
            self._dense.__exit__(None, None, None)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until it has ended.

        Args:
            timeout: how long at most; 0: as long as the group waits for its ranks.

        Raises:
            CollectiveTimeout: it had not ended by then; it goes on, and can be waited for again.
            Exception: what kept it from ending well.
        """
        seconds = timeout.total_seconds() or self._mail.timeout
        idle, deadline = Backoff(), time.monotonic() + seconds
        while not self.look():
            if time.monotonic() > deadline:
                raise CollectiveTimeout(f"{self._name} was not done within {seconds:g} s")
            idle.wait()
        return super().wait()

    def is_completed(self) -> bool:
        """Return whether it has ended, well or not."""
        return self.look()

    def is_success(self) -> bool:
        """Return whether it has ended well."""
        return self.look() and super().is_success()

    def source_rank(self) -> int:
        """Return the rank, in the group, that the message came from."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """Return a future of its tensor; a thread waits for it."""
        future = super().get_future()
        if not self._done.is_set():
            threading.Thread(target=self._wait_quietly, name="mpi4py message", daemon=True).start()
        return future

    def _wait_quietly(self) -> None:
        try:
            self.wait()
        except CollectiveTimeout as error:
            self.finish(error)
        except Exception:  # noqa: BLE001 — the future tells it
            return

    def cancel(self) -> bool:
        """Give up a receive, and return whether nothing is under way any more."""
        call_back = None
        if not self.look() and self._receives:
            with self._looking:
                if not self._done.is_set():
                    self._request.Cancel()
                    self._request.Wait()
                    left = CollectiveError(f"{self._name}: the group was left with it under way")
                    call_back = self.settle(left)
        if call_back is not None:
            call_back()
        return self._done.is_set()


class MpiPointToPoint:
    """The messages of this rank.

    Args:
        mpi: the module ``mpi4py.MPI``.
        comm: a communicator of this group alone, of which nobody else makes use.
        timeout: seconds to wait for a message.

    Attributes:
        stuck: something that was sent was never taken, so that MPI can't be left in order.
    """

    def __init__(self, mpi: Any, comm: Any, timeout: float) -> None:
        self._mpi, self._comm, self.timeout = mpi, comm, timeout
        self._most_tag = comm.Get_attr(mpi.TAG_UB)
        self._under_way: list[MessageWork] = []
        self._lock = threading.Lock()
        self.stuck = False

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> MessageWork:
        """Start sending a tensor; done once it may be changed."""
        check_peer("send", target, self._comm.rank, self._comm.size)
        dense = Dense(tensor, write=False)
        request = self._comm.Isend(self._bytes(dense.dense), target, self._checked(tag))
        return self._noted(request, tensor, dense, f"send to rank {target}", receives=False)

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> MessageWork:
        """Start receiving into a tensor, from `source` or, if None, from anybody."""
        if source is not None:
            check_peer("recv", source, self._comm.rank, self._comm.size)
        dense = Dense(tensor, read=False)
        whom = self._mpi.ANY_SOURCE if source is None else source
        request = self._comm.Irecv(self._bytes(dense.dense), whom, self._checked(tag))
        name = f"recv from {'anybody' if source is None else f'rank {source}'}"
        return self._noted(request, tensor, dense, name, receives=True)

    def _noted(
        self, request: Any, tensor: torch.Tensor, dense: Dense, name: str, *, receives: bool
    ) -> MessageWork:
        """Return the work of a request, and keep it: its memory must stay until MPI is through with it."""
        work = MessageWork(self._mpi, request, tensor, dense, name, self, receives)
        with self._lock:
            self._under_way.append(work)
            earlier = self._under_way[:-1]
        ended = {id(each) for each in earlier if each.look()}  # without the lock: who is called back may send
        with self._lock:
            self._under_way = [each for each in self._under_way if id(each) not in ended]
        return work

    def _checked(self, tag: int) -> int:
        if not 0 <= tag <= self._most_tag:
            raise UsageError(f"tag {tag}: MPI has tags from 0 to {self._most_tag}")
        return tag

    def _bytes(self, tensor: torch.Tensor) -> list[Any]:
        return [bytes_of(tensor).numpy(), tensor.nbytes, self._mpi.BYTE]

    def close(self) -> None:
        """Stop: what is to be received is given up, what is sent has a moment more to be taken."""
        deadline = time.monotonic() + _LAST_SECONDS
        idle = Backoff()
        with self._lock:
            left = list(self._under_way)
        with contextlib.suppress(self._mpi.Exception):
            while not all([each.cancel() for each in left]):
                if time.monotonic() > deadline:
                    self.stuck = True
                    return
                idle.wait()
            self._under_way.clear()
            self._comm.Free()
