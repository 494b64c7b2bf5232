"""Base of the process group: its memory and lifecycle, and how its calls run."""

from __future__ import annotations

import atexit
import time
import weakref
from collections import deque
from datetime import timedelta
from typing import Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function

from paceline.backends.async_work import WorkQueue
from paceline.backends.block_reduction import Reduction
from paceline.backends.call_steps import Job, Steps
from paceline.backends.collective_work import untraced
from paceline.backends.op_arguments import Tensors, are_strided_cpu, timeout_of
from paceline.backends.op_signature import AllCollectiveOps, CollectiveOps, OpSignature, PointToPointOps
from paceline.backends.repeated_calls import RepeatedCalls
from paceline.backends.shm.shared_arena import arena
from paceline.backends.shm.shm_collectives import ShmCollectives
from paceline.errors import CollectiveError, UsageError

__all__ = ["GroupBase"]


def _is_on_one_host(collectives: CollectiveOps | None) -> TypeGuard[ShmCollectives]:
    return isinstance(collectives, ShmCollectives)


_open_groups: weakref.WeakSet[GroupBase] = weakref.WeakSet()


@atexit.register
def _abort_open_groups() -> None:
    """End the threads of groups that were never destroyed: they must not run during interpreter shutdown."""
    for group in list(_open_groups):
        group.abort()


@untraced
class GroupBase(dist.ProcessGroup):
    """A ``torch.distributed`` process group without its collectives, which `PacelineProcessGroup` adds.

    Args:
        rank: rank in the group.
        size: number of ranks.
        collectives: runs collectives; None: everything falls back to the group inside.
        p2p: carries point-to-point messages; None: they fall back.
        name: name under which the backend is registered.

    Attributes:
        calls: collectives that this rank has called, without barriers; a coalesced call counts once.
        payload_nbytes: bytes of their tensors, on the larger side of calls with inputs and outputs.
        spans: if set to a list, receives launch and completion of each collective, in seconds of
            ``time.perf_counter()``.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        collectives: CollectiveOps | None,
        p2p: PointToPointOps | None,
        name: str = "paceline",
    ) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue] — the stubs only have the form with a store
        self._collectives, self._p2p, self._name = collectives, p2p, name
        self._queue = WorkQueue(f"{name} group, rank {rank}")
        self._kept: deque[dist.Work] = deque(maxlen=64)
        self.calls, self.payload_nbytes = 0, 0
        self.spans: list[tuple[float, float]] | None = None
        self._repeated = (
            RepeatedCalls(collectives, self._queue, size) if _is_on_one_host(collectives) else None
        )
        _open_groups.add(self)

    def getBackendName(self) -> str:
        """Return the name under which it is registered."""
        return self._name

    @property
    def pg_name(self) -> str:
        """Name that torch gave the group."""
        return self.group_name

    # Memory.

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether `allocate_tensor` returns memory that is reduced in place on `device`."""
        return self._shares_memory() and torch.device(device).type == "cpu"

    def allocate_tensor(
        self, numel: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Return an uninitialised 1-D tensor of `numel` elements that collectives reduce in place.

        Its memory is freed with the tensor and all its views. Without shared memory it is an ordinary tensor.

        Raises:
            UsageError: a negative size, or a device other than the CPU.
            OSError: the system has no memory left.
        """
        if numel < 0 or torch.device(device).type != "cpu":
            raise UsageError(
                f"allocate_tensor({numel}, device={str(device)!r}): valid are sizes ≥ 0 on the CPU",
                remedy="use torch.empty() for memory of other devices",
            )
        return arena.allocate(numel, dtype) if self._shares_memory() else torch.empty(numel, dtype=dtype)

    @property
    def sums_along_tree(self) -> bool:
        """Whether sums of CPU tensors are added along the tree of `paceline._core.summation_tree` over the ranks.

        So they are on one host, and over hosts with equal numbers of consecutive ranks that are powers of two.
        """
        return self._collectives is not None and self._collectives.along_tree

    def _shares_memory(self) -> bool:
        return self._collectives is not None and self._collectives.shares_memory

    # Lifecycle.

    def note_step(self, step: int) -> None:
        """Publish the optimizer step that this rank is in; the other ranks' errors name it."""
        if self._collectives is not None:
            self._collectives.note_step(step)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long collectives wait for a rank."""
        if self._collectives is not None:
            self._collectives.timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Leave the group once all pending calls are done."""
        self._close(None)

    def abort(self) -> None:
        """Leave the group at once; pending calls fail."""
        if self._collectives is not None:
            self._collectives.cancel()
        self._close(CollectiveError("this rank left the group with collectives pending"))

    def interrupt(self, reason: CollectiveError) -> None:
        """Make pending calls of other threads raise `reason` soon, and later calls at once.

        Unlike `abort` this waits for nothing, so any thread may call it; the group is still to be destroyed.
        """
        if self._collectives is not None:
            self._collectives.interrupt(reason)
        self._queue.abort(reason)

    def _close(self, error: Exception | None) -> None:
        self._queue.close(error)
        if self._p2p is not None:
            self._p2p.close()
        if self._collectives is not None:
            self._collectives.close()
        self._collectives, self._p2p, self._repeated = None, None, None

    # How calls run.

    def _select(self, op: str, tensors: Tensors) -> AllCollectiveOps | None:
        """Return the implementation of `op` for these tensors; None: the group inside runs it."""
        ops = self._collectives
        if ops is None or op not in ops.ops or not are_strided_cpu(tensors):
            return None
        return cast(AllCollectiveOps, ops)

    def _fallback(self, tensors: Tensors = ()) -> Any:
        """Return the gloo or NCCL group inside.

        It is called directly, not through super(): C++ would call the overrides here, and hold the interpreter's
        lock meanwhile, for which a thread of gloo may be waiting.
        """
        return self._get_backend(tensors[0].device if tensors else torch.device("cpu"))

    def _signature(
        self, op: str, tensor: Tensor, opts: Any, reduction: Reduction | None = None, root: int = -1
    ) -> OpSignature:
        name = reduction.name if reduction else ""
        return OpSignature(op, tensor.numel(), tensor.dtype, name, root=root, timeout=timeout_of(opts))

    def _submit(
        self, ops: CollectiveOps, name: str, job: Job, result: Any, opts: Any, *, nbytes: int
    ) -> dist.Work:
        """Queue a call; `result` is the value of its future, `nbytes` its payload."""
        if name != "barrier":
            self.calls += 1
            self.payload_nbytes += nbytes

        launched, spans = time.perf_counter(), self.spans
        profiled = spans is None and torch.autograd._profiler_enabled()
        record = record_function(f"{self._name}:{name}") if profiled else None
        if record is not None:
            record.__enter__()  # exited where the call ends, in any thread

        asynchronous = getattr(opts, "asyncOp", True)

        def run() -> Steps:
            ops.set_background(asynchronous)
            try:
                yield from job() or ()
                if spans is not None:
                    spans.append((launched, time.perf_counter()))
            except (UsageError, GeneratorExit):
                raise  # before anything was written; the group stays usable, or nobody runs the rest
            except BaseException as error:
                ops.report_error(error)
                raise
            finally:
                if record is not None:
                    record.__exit__(None, None, None)

        overlaps = name in getattr(ops, "overlapping", ())
        return self._queue.submit(run, list(result), name, asynchronous=asynchronous, overlaps=overlaps)
