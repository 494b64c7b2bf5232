"""Barriers and all-reduces that the caller waits for: prepared once, then run in the caller's thread.

A training loop makes the same few calls again and again. The general path of a call (`process_group`) costs more than
the exchange of a small tensor, so a sum or mean of plain numbers takes this one where compiled code runs it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor
from torch.autograd import _profiler_enabled

from paceline.backends.async_work import WorkQueue
from paceline.backends.block_reduction import get_reduction
from paceline.backends.collective_work import FinishedWork, untraced
from paceline.backends.op_arguments import timeout_of
from paceline.backends.op_signature import OpSignature
from paceline.backends.shm.shm_all_reduce import CompiledSum
from paceline.backends.shm.shm_collectives import ShmCollectives
from paceline.errors import UsageError

__all__ = ["RepeatedCalls"]

_KEPT_CALLS = 1024
_PLAIN = (Tensor, torch.nn.Parameter)
_NO_TIMEOUT = c10d.AllreduceOptions().timeout
_BARRIER = OpSignature("barrier")
_Key = tuple[dist.ReduceOp.RedOpType, torch.dtype, int]


@untraced
class RepeatedCalls:
    """Runs barriers, and all-reduces of one tensor, that the caller waits for.

    Args:
        ops: the collectives of the group.
        queue: the group's queue.
        size: ranks of the group.
    """

    def __init__(self, ops: ShmCollectives, queue: WorkQueue, size: int) -> None:
        self._ops, self._queue, self._size = ops, queue, size
        self._prepared: dict[_Key, CompiledSum | None] = {}

    def barrier(self, opts: object) -> dist.Work | None:
        """Run a barrier; None: it takes the general path."""
        if type(opts) is not c10d.BarrierOptions or opts.asyncOp or not self._may_run(opts):
            return None
        self._run(self._ops.barrier, _BARRIER)
        return FinishedWork([])

    def all_reduce(self, tensors: object, opts: object) -> dist.Work | None:
        """Run an all-reduce; None: it takes the general path."""
        if type(opts) is not c10d.AllreduceOptions or opts.asyncOp:
            return None
        if type(tensors) is not list or len(tensors) != 1:
            return None
        tensor = tensors[0]
        if type(tensor) not in _PLAIN or not tensor.is_cpu:
            return None
        key = opts.reduceOp.op, tensor.dtype, tensor.numel()  # pyright: ignore[reportAttributeAccessIssue]
        try:
            prepared = self._prepared[key]
        except KeyError:
            prepared = self._prepare(key)
        if (
            prepared is None
            or tensor.layout is not torch.strided
            or not tensor.is_contiguous()
            or tensor.is_neg()
            or not self._may_run(opts)
        ):
            return None
        self._run(self._ops.all_reduce_compiled, prepared, tensor, tensor.data_ptr())
        return FinishedWork(tensors)

    def _may_run(self, opts: c10d.AllreduceOptions | c10d.BarrierOptions) -> bool:
        """Return whether a call may run here and now: with the group's time-out, unrecorded, and none before it."""
        if _profiler_enabled() or (opts.timeout != _NO_TIMEOUT and timeout_of(opts) is not None):
            return False
        return self._queue.enter()

    def _run(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            self._ops.set_background(False)
            call(*arguments)
        except UsageError:
            raise  # before anything was written; the group stays usable
        except BaseException as error:
            self._ops.report_error(error)
            raise
        finally:
            self._queue.leave()

    def _prepare(self, key: _Key) -> CompiledSum | None:
        op, dtype, numel = key
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            return None
        if len(self._prepared) >= _KEPT_CALLS:
            self._prepared.clear()
        try:
            reduction = get_reduction(op, dtype, self._size)
        except UsageError:
            return None  # the general path raises it
        call = OpSignature("all_reduce", numel, dtype, reduction.name)
        prepared = self._prepared[key] = self._ops.compiled_sum(call, reduction)
        return prepared
