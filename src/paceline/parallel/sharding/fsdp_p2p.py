"""FSDP2's two collectives, sent point to point where gloo's own are slow: in large messages (see `comm`)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from paceline._core.step_state import step_state
from paceline.parallel.engine.comm import Comm

__all__ = ["DirectAllGather", "DirectReduceScatter"]

_DIRECT_NBYTES = 2 << 20
"""Smaller messages stay with gloo's own collectives, where the fixed cost decides."""


class DirectAllGather(DefaultAllGather):
    """All-gather over `comm`; blocks, for gloo has no streams to order."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill `output_tensor` with all ranks' `input_tensor`, which may be its own part of it."""
        if output_tensor.nbytes < _DIRECT_NBYTES:
            return super().__call__(output_tensor, input_tensor, group, async_op)
        own = output_tensor.chunk(self._comm.size)[self._comm.rank]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        with step_state.waiting_for_peers():
            self._comm.all_gather(output_tensor).wait()
        return None


class DirectReduceScatter(DefaultReduceScatter):
    """Reduce-scatter (sum) over `comm`; blocks."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Put the sum of all ranks' part of `input_tensor` for this rank into `output_tensor`."""
        if input_tensor.nbytes < _DIRECT_NBYTES:
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        with step_state.waiting_for_peers():
            self._comm.reduce_scatter(input_tensor, output_tensor).wait()
        return None
