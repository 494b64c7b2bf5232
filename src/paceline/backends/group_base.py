"""A rank's part in a group: what it is called, the memory it gives, leaving it, and how its calls are made."""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function

from paceline.backends.async_work import WorkQueue, untraced
from paceline.backends.block_reduction import Reduction
from paceline.backends.op_arguments import are_plain, seconds_of
from paceline.backends.op_signature import AllCollectiveOps, CollectiveOps, OpSignature, PointToPointOps
from paceline.backends.shm.shared_arena import arena
from paceline.errors import CollectiveError, UsageError

__all__ = ["GroupBase"]

_open_groups: weakref.WeakSet[GroupBase] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    """End the threads of groups that nobody destroyed: they must not run while Python goes down."""
    for group in list(_open_groups):
        group.abort()


@untraced
class GroupBase(dist.ProcessGroup):
    """A ``torch.distributed`` process group without its collectives: process_group.py has those.

    Args:
        rank, size: place in the group.
        route: what makes the calls, over one host or several; None: everything falls through to the group inside.
        mailbox: carries point-to-point messages; None: they fall through.
        name: what the backend is registered as.

    Attributes:
        calls: collectives made so far by this rank, but for barriers; a coalesced call counts once.
        payload_nbytes: bytes of their tensors: of the larger side where a call takes and gives.
        spans: set to a list, it gets launch and completion of each collective, in seconds of
            ``time.perf_counter()``.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        route: CollectiveOps | None,
        mailbox: PointToPointOps | None,
        name: str = "paceline",
    ) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue] — the stubs have only the form with a store
        self._route, self._mailbox, self._name = route, mailbox, name
        self._line = WorkQueue(f"{name} group, rank {rank}")
        self.calls, self.payload_nbytes = 0, 0
        self.spans: list[tuple[float, float]] | None = None
        _open_groups.add(self)

    def getBackendName(self) -> str:
        """Return the name it is registered under."""
        return self._name

    @property
    def pg_name(self) -> str:
        """The name that torch gave the group."""
        return self.group_name

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether `allocate_tensor` gives memory that is reduced in place on `device`."""
        return self._shares_memory() and torch.device(device).type == "cpu"

    def allocate_tensor(
        self, numel: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Return an uninitialised 1-D tensor of `numel` elements that collectives reduce where it lies.

        Where the group shares no memory, it is an ordinary tensor. The memory comes back when the tensor
        and all views of it are gone.

        Raises:
            UsageError: a negative size, or a device other than the CPU.
            OSError: the system has no memory left.
        """
        if numel < 0 or torch.device(device).type != "cpu":
            raise UsageError(
                f"allocate_tensor({numel}, device={str(device)!r}): valid are sizes ≥ 0 on the CPU",
                remedy="use torch.empty() for memory of other devices",
            )
        if not self._shares_memory():
            return torch.empty(numel, dtype=dtype)
        return arena.allocate(numel, dtype)

    def _shares_memory(self) -> bool:
        return self._route is not None and self._route.shares_memory

    def note_step(self, step: int) -> None:
        """Tell the other ranks, for their messages, which optimizer step this rank is in."""
        if self._route is not None:
            self._route.note_step(step)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long collectives wait for a rank."""
        if self._route is not None:
            self._route.timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Leave the group: what is in line is done first."""
        self._leave(None)

    def abort(self) -> None:
        """Leave the group at once: what is in line fails."""
        if self._route is not None:
            self._route.leave()
        self._leave(CollectiveError("the group was left with collectives under way"))

    def abandon(self, reason: CollectiveError) -> None:
        """Have calls under way in other threads raise `reason` soon, and later ones at once.

        The group is there, to be left, afterwards. Unlike `abort` this waits for nothing, so any thread may call it.
        """
        if self._route is not None:
            self._route.abandon(reason)
        self._line.abandon(reason)

    def _leave(self, error: Exception | None) -> None:
        self._line.close(error)
        if self._mailbox is not None:
            self._mailbox.close()
        if self._route is not None:
            self._route.close()
        self._route, self._mailbox = None, None

    # How calls are made.

    def _inner(self, tensors: Sequence[torch.Tensor] = ()) -> Any:
        """Return the gloo or NCCL group inside, which makes a call for `tensors` that is not for us.

        It is called itself, not by way of super(): from there C++ comes back to the overrides here, and holds
        the interpreter's lock all the while, for which a thread of gloo may be waiting.
        """
        return self._get_backend(tensors[0].device if tensors else torch.device("cpu"))

    def _ours(self, op: str, tensors: Sequence[torch.Tensor]) -> bool:
        return self._route is not None and op in self._route.ops and are_plain(tensors)

    def _engaged(self) -> CollectiveOps:
        assert self._route is not None, "only called where there is a route"
        return self._route

    def _full(self) -> AllCollectiveOps:
        assert self._route is not None, "only called where the route makes all calls"
        return cast(AllCollectiveOps, self._route)

    def _call(
        self, op: str, tensor: torch.Tensor, opts: Any, how: Reduction | None = None, root: int = -1
    ) -> OpSignature:
        return OpSignature(op, tensor.numel(), tensor.dtype, how.name if how else "", root, seconds_of(opts))

    def _make(
        self, name: str, job: Callable[[], None], result: Any, opts: Any, payload_nbytes: int
    ) -> dist.Work:
        route = self._engaged()
        if name != "barrier":
            self.calls += 1
            self.payload_nbytes += payload_nbytes

        launched, spans = time.perf_counter(), self.spans
        profiled = spans is None and torch.autograd._profiler_enabled()
        record = record_function(f"{self._name}:{name}") if profiled else None
        if record is not None:
            record.__enter__()  # left where the call ends, in whatever thread that is

        def guarded() -> None:
            try:
                job()
                if spans is not None:
                    spans.append((launched, time.perf_counter()))
            except UsageError:
                raise  # told before anything was written; the group stays in step
            except BaseException as error:
                route.give_up(error)
                raise
            finally:
                if record is not None:
                    record.__exit__(None, None, None)

        asynchronous = getattr(opts, "asyncOp", True)
        return self._line.make(guarded, list(result), name, asynchronous=asynchronous)
