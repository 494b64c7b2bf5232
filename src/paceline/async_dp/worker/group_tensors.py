"""The tensors of a model that the ranks of a group train together: read whole on rank 0, written on all ranks.

Where every rank holds whole parameters (all strategies but full-shard) reading costs nothing, and writing broadcasts
those of rank 0, so replicas stay equal to the bit. Sharded parameters are gathered one by one into CPU memory of
rank 0, and written as each rank's shard of what rank 0 broadcasts; no other rank holds more than one whole parameter.

Buffers that are averaged (running statistics) may differ between ranks: rank 0's are read, and written to all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from paceline.async_dp.protocol.parameter_layout import FragmentLayout
from paceline.parallel.gradient_collectives import Comm, broadcast_tensors

__all__ = ["GroupTensors"]


class GroupTensors:
    """The tensors of all fragments of a model on the ranks of a group.

    Args:
        comm: the ranks.
        module: the model, not wrapped.
        fragments: its layout.

    Attributes:
        sharded: whether a rank holds only shards of parameters, so that `read` is a collective.
    """

    def __init__(self, comm: Comm, module: nn.Module, fragments: Sequence[FragmentLayout]) -> None:
        self._comm, self._module = comm, module
        self._names = [[tensor.name for tensor in fragment.tensors] for fragment in fragments]
        self.sharded = any(isinstance(param, DTensor) for param in module.parameters())
        self._whole: dict[str, Tensor] = {}  # sharded parameters, on the CPU of rank 0

    def _held(self, fragment: int) -> dict[str, Tensor]:
        """Return this rank's tensors of a fragment, where they are now: a strategy may move them."""
        if self.sharded:
            for module in self._module.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # else what a forward gathered would remain in use
        named = dict(self._module.named_parameters()) | dict(self._module.named_buffers())
        return {name: named[name].detach() for name in self._names[fragment]}

    @torch.no_grad()
    def read(self, fragment: int) -> Mapping[str, Tensor]:
        """Return the tensors of a fragment, whole on rank 0; if `sharded`, all ranks call this."""
        tensors = self._held(fragment)
        for name, tensor in tensors.items():
            if not isinstance(tensor, DTensor):
                continue
            whole = tensor.full_tensor()
            if self._comm.rank == 0:
                if name not in self._whole:
                    self._whole[name] = torch.empty(whole.shape, dtype=whole.dtype)
                tensors[name] = self._whole[name].copy_(whole)
        return tensors

    @torch.no_grad()
    def write(self, fragment: int) -> None:
        """Copy the tensors of a fragment, as `read` returned them on rank 0, to all ranks; all ranks call this."""
        tensors = self._held(fragment)
        for name, tensor in tensors.items():
            if not isinstance(tensor, DTensor):
                continue
            shard = tensor.to_local()
            if self._comm.rank == 0:
                whole = self._whole[name].to(shard.device)
            else:
                whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=shard.device)
            self._comm.broadcast(whole)
            placed = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
            shard.copy_(placed.to_local())
        broadcast_tensors(self._comm, [each for each in tensors.values() if not isinstance(each, DTensor)])
