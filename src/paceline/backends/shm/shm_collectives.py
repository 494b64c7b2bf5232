"""Collectives among the ranks of one host, through memory that they share.

Phases of every collective:

    1. post a notice: the call, and where the data lie; eager data are copied with it
    2. barrier: from here on every rank may read every rank's data
    3. combine or copy what the others expose, in place where the data lie in the arena
    4. another barrier, where others read or write this rank's own tensor

How data are exposed depends on where they lie (`transfer_modes`).

All-reduce has a file of its own, `shm_all_reduce`.

A result may overlap an input. Where the others still read there, a copy takes the place of one of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.backends.block_reduction import Reduction, split_blocks
from paceline.backends.op_arguments import Tensors, as_bytes, as_row, copy_unless_same, overlap, same_memory
from paceline.backends.op_signature import ALL_OPS, OpSignature, check_exchange_sizes
from paceline.backends.shm.control_block import EAGER_NBYTES, OpNotice
from paceline.backends.shm.shm_all_reduce import ShmAllReduce

__all__ = ["ShmCollectives"]


_BARRIER_NOTICE = OpNotice(OpSignature("barrier").pack())


class ShmCollectives(ShmAllReduce):
    """`AllCollectiveOps` on one host, whose ranks are numbered on the host. Parameters as for `ShmBarrier`."""

    shares_memory = True
    ops = frozenset(ALL_OPS)
    along_tree = True

    def barrier(self, call: OpSignature) -> None:
        self._start_call(call, _BARRIER_NOTICE)

    def reduce(self, call: OpSignature, tensor: Tensor, root: int, reduction: Reduction) -> None:
        flat = tensor.view(-1)
        for part in self._exchange(call, [flat], range(self.size)):
            if self.index == root:
                inputs = [part.read(rank, 0) for rank in range(self.size)]
                for *block, out in split_blocks([*inputs, flat[part.low : part.high]]):
                    reduction(block, out, root, self._scratch)

    def reduce_scatter(
        self, call: OpSignature, output: Tensor, inputs: Tensors, reduction: Reduction
    ) -> None:
        own = self.index if same_memory(output, inputs[self.index]) else 0
        result = torch.empty_like(output) if _clashes(output, inputs, self.index) else output
        flat = result.view(-1)
        for part in self._exchange(call, [as_row(each) for each in inputs], range(self.size)):
            exposed = [part.read(rank, self.index) for rank in range(self.size)]
            for *block, out in split_blocks([*exposed, flat[part.low : part.high]]):
                reduction(block, out, own, self._scratch)
        if result is not output:
            output.copy_(result)

    def all_gather(self, call: OpSignature, outputs: Tensors, tensor: Tensor) -> None:
        self._gather(call, outputs, tensor, receives=True)

    def gather(self, call: OpSignature, outputs: Tensors, tensor: Tensor, root: int) -> None:
        self._gather(call, outputs, tensor, receives=self.index == root)

    def _gather(self, call: OpSignature, outputs: Tensors, tensor: Tensor, *, receives: bool) -> None:
        own = as_bytes(tensor.clone() if _clashes(tensor, outputs, self.index) else tensor)
        targets = [as_bytes(output) for output in outputs]
        # Each rank begins with another source.
        order = [(self.index + distance) % self.size for distance in range(self.size)]
        for part in self._exchange(call, [own], range(self.size)):
            for rank in order if receives else ():
                copy_unless_same(targets[rank][part.low : part.high], part.read(rank, 0))

    def broadcast(self, call: OpSignature, tensor: Tensor, root: int) -> None:
        own = as_bytes(tensor)
        for part in self._exchange(call, [own], [root]):
            if self.index != root:
                copy_unless_same(own[part.low : part.high], part.read(root, 0))

    def scatter(self, call: OpSignature, output: Tensor, inputs: Tensors, root: int) -> None:
        result = torch.empty_like(output) if _clashes(output, inputs, root) else output
        own = as_bytes(result)
        pieces = [as_bytes(each) for each in inputs] if self.index == root else [own] * self.size
        for part in self._exchange(call, pieces, [root]):
            copy_unless_same(own[part.low : part.high], part.read(root, self.index))
        if result is not output:
            output.copy_(result)

    def all_to_all(self, call: OpSignature, outputs: Tensors, inputs: Tensors) -> None:
        if overlap(outputs, inputs):
            inputs = [each.clone() for each in inputs]
        pieces, targets = [as_bytes(each) for each in inputs], [as_bytes(each) for each in outputs]
        sizes = torch.tensor([[each.numel() for each in pieces], [each.numel() for each in targets]])
        table = torch.empty(self.size, 2, self.size, dtype=torch.int64)
        self._gather(call.with_tensor("sizes", sizes), list(table), sizes, receives=True)
        check_exchange_sizes(call, table)
        for part in self._exchange(call, pieces, range(self.size), longest=int(table.max())):
            for distance in range(self.size):
                rank = (self.index + distance) % self.size
                target = targets[rank][part.low : part.high]
                copy_unless_same(target, part.read(rank, self.index)[: target.numel()])


def _clashes(tensor: Tensor, pieces: Tensors, own: int) -> bool:
    """Return whether a tensor overlaps pieces other than its own; eager data are copied before that matters."""
    if len(pieces) * tensor.nbytes <= EAGER_NBYTES:
        return False
    others = [each for rank, each in enumerate(pieces) if rank != own or not same_memory(tensor, each)]
    return overlap([tensor], others)
