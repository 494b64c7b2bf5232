"""FSDP2's two collectives, sent point to point where gloo's own are slow (see `wire`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from paceline.sync.wire import Wire

__all__ = ["DirectAllGather", "DirectReduceScatter"]


class _Allocates:
    """Plain memory for the collectives' buffers."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return an uninitialised tensor."""
        return torch.empty(*size, dtype=dtype, device=device)


class DirectAllGather(_Allocates, AllGather):
    """All-gather over `wire`; blocks, for gloo has no streams to order."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill `output_tensor` with all ranks' `input_tensor`, which may be its own part of it."""
        own = output_tensor.chunk(self._wire.size)[self._wire.rank]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        self._wire.all_gather(output_tensor).wait()
        return None


class DirectReduceScatter(_Allocates, ReduceScatter):
    """Reduce-scatter (sum) over `wire`; blocks."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Put the sum of all ranks' part of `input_tensor` for this rank into `output_tensor`."""
        self._wire.reduce_scatter(input_tensor, output_tensor).wait()
        return None
