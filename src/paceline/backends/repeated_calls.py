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
from torch.nn import Parameter

from paceline._core.native import load_native
from paceline.backends.async_work import WorkQueue
from paceline.backends.block_reduction import get_reduction
from paceline.backends.collective_work import untraced
from paceline.backends.op_arguments import timeout_of
from paceline.backends.op_signature import OpSignature
from paceline.backends.shm.shm_all_reduce import CompiledSum
from paceline.backends.shm.shm_collectives import ShmCollectives
from paceline.errors import UsageError

__all__ = ["RepeatedCalls"]

_KEPT_CALLS = 1024
_SUM, _MEAN = dist.ReduceOp.SUM, dist.ReduceOp.AVG
_BARRIER = OpSignature("barrier")
_Key = tuple[bool, torch.dtype, int]  # whether it is a mean, and what of


@untraced
class RepeatedCalls:
    """Runs barriers, and all-reduces of one tensor, that the caller waits for.

    As torch has it, no work object stands for such a call (``asyncOp=False``): it is done.

    Args:
        ops: the collectives of the group.
        queue: the group's queue.
        size: ranks of the group.
    """

    def __init__(self, ops: ShmCollectives, queue: WorkQueue, size: int) -> None:
        self._ops, self._queue, self._size = ops, queue, size
        self._read = _reader()
        self._prepared: dict[_Key, CompiledSum | None] = {}

    def barrier(self, opts: object) -> bool:
        """Run a barrier; False: it takes the general path."""
        if type(opts) is not c10d.BarrierOptions or opts.asyncOp or timeout_of(opts) is not None:
            return False
        if _profiler_enabled() or not self._queue.enter():
            return False
        self._run(self._ops.barrier, _BARRIER)
        return True

    def all_reduce(self, tensors: object, opts: object) -> int | None:
        """Run an all-reduce, and return its bytes; None: it takes the general path."""
        found = None if self._read is None else self._read(tensors, opts)
        if found is None:
            return None
        key, address = found
        try:
            prepared = self._prepared[key]
        except KeyError:
            prepared = self._prepare(key)
        if prepared is None or not self._queue.enter():
            return None
        self._run(self._ops.all_reduce_compiled, prepared, tensors[0], address)  # pyright: ignore[reportIndexIssue]
        return prepared.nbytes

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
        is_mean, dtype, numel = key
        if len(self._prepared) >= _KEPT_CALLS:
            self._prepared.clear()
        try:
            reduction = get_reduction(_MEAN if is_mean else _SUM, dtype, self._size)
        except UsageError:
            return None  # the general path raises it
        call = OpSignature("all_reduce", numel, dtype, reduction.name)
        prepared = self._prepared[key] = self._ops.compiled_sum(call, reduction)
        return prepared


def _reader() -> Callable[[object, object], tuple[_Key, int] | None] | None:
    """Return a function that reads the arguments of an all-reduce of a plain tensor that the caller waits for.

    It returns None if the general path has to run the call; else what the call is, and the tensor's address.
    """
    native = load_native()
    if native is None:
        return None
    options = c10d.AllreduceOptions
    reader = native.SumReader(
        options, Tensor, Parameter, torch.strided, _SUM, _MEAN, options().timeout, _profiler_enabled
    )
    return reader.read
