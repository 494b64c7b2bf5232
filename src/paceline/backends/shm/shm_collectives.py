"""Collectives among the ranks of one host, through memory that they share.

Phases of every collective:

    1. post a notice: the call, and where the data lie; eager data are copied with it
    2. barrier: from here on every rank may read every rank's data
    3. combine or copy what the others expose, in place where the data lie in the arena
    4. another barrier, where others read or write this rank's own tensor

How data are exposed depends on where they lie (`transfer_modes`).

All-reduce, direct, on rank r of N: reduce the r-th slice of all ranks into the own tensor, block by block, and write
each block into the others' tensors while it is in the cache: about the memory traffic of one copy.

A result may overlap an input. Where the others still read there, a copy takes the place of one of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.backends.block_reduction import Reduction, Scratch, reduce_into_all, split_blocks
from paceline.backends.op_arguments import Tensors, as_bytes, as_row, copy_unless_same, overlap, same_memory
from paceline.backends.op_signature import ALL_OPS, OpSignature, check_exchange_sizes
from paceline.backends.shm.control_block import EAGER_NBYTES, STAGING_NBYTES, ControlBlock, OpNotice
from paceline.backends.shm.peer_sockets import HostPeers
from paceline.backends.shm.shared_arena import arena
from paceline.backends.shm.transfer_modes import ALIGN_NUMEL, DataPaths

__all__ = ["ShmCollectives", "slice_bounds"]


def slice_bounds(numel: int, parts: int, index: int) -> tuple[int, int]:
    """Return first and one-past-last element of slice `index` of `parts`; slices may be empty.

    Example:
        >>> [slice_bounds(100, 2, index) for index in (0, 1)]
        [(0, 64), (64, 100)]
    """
    length = -(-numel // (parts * ALIGN_NUMEL)) * ALIGN_NUMEL
    return min(index * length, numel), min((index + 1) * length, numel)


class ShmCollectives(DataPaths):
    """`AllCollectiveOps` on one host, whose ranks are numbered on the host. Parameters as for `ShmBarrier`."""

    shares_memory = True
    ops = frozenset(ALL_OPS)
    along_tree = True

    def __init__(self, peers: HostPeers, control: ControlBlock, timeout: float, spin: float) -> None:
        super().__init__(peers, control, timeout, spin)
        self._scratch = Scratch()

    def barrier(self, call: OpSignature) -> None:
        self._start_call(call, OpNotice(call.pack()))

    def all_reduce(self, call: OpSignature, tensor: Tensor, reduction: Reduction) -> None:
        flat = tensor.view(-1)
        if tensor.nbytes <= EAGER_NBYTES:
            for part in self._exchange(call, [flat], range(self.size)):
                reduction([part.read(rank, 0) for rank in range(self.size)], flat, 0, self._scratch)
            return
        notices = self._start_call(call, self._notice(call, [flat]))
        mixed = any(notice.call != notices[self.index].call for notice in notices)  # means and sums
        common = reduction.as_sum() if mixed else reduction
        if all(notice.segment >= 0 for notice in notices):
            tensors = [
                flat if rank == self.index else self._map_region(rank, notice, flat.numel(), flat.dtype)
                for rank, notice in enumerate(notices)
            ]
            low, high = slice_bounds(flat.numel(), self.size, self.index)
            slices = [tensor[low:high] for tensor in tensors]
            try:
                if low < high:
                    reduce_into_all(slices, self.index, common, self._scratch, self._check_if_failed)
                self._wait_all()
            except BaseException:  # the others may write there until they learn of it
                arena.retire(notices[self.index].segment, notices[self.index].offset)
                raise
        else:
            self._all_reduce_staged(flat, common)
        if common is not reduction:
            reduction.divide(flat)

    def _check_if_failed(self) -> None:
        """Raise before writing where another rank may keep something else by now."""
        if self.control.failed:
            self.check()

    def _all_reduce_staged(self, flat: Tensor, reduction: Reduction) -> None:
        """Expose part t, wait for all ranks, reduce the own slice of it, and copy the others' results of part t − 1."""
        previous: list[Tensor] = []
        number = 0
        for number, part in enumerate(flat.split(STAGING_NBYTES // flat.element_size())):
            bounds = [slice_bounds(part.numel(), self.size, rank) for rank in range(self.size)]
            slices = [part[low:high] for low, high in bounds]
            buffer = self.control.staging_buffer(self.index, number, part.numel(), flat.dtype)
            for rank, (low, high) in enumerate(bounds):
                if rank != self.index:
                    buffer[low:high].copy_(slices[rank])
            self._wait_all()
            own = slices[self.index]
            low, high = bounds[self.index]
            if low < high:
                exposed = [
                    own
                    if rank == self.index
                    else self.control.staging_buffer(rank, number, part.numel(), flat.dtype)[low:high]
                    for rank in range(self.size)
                ]
                result = self.control.result_buffer(self.index, number, high - low, flat.dtype)
                for *inputs, mine, out in split_blocks([*exposed, own, result]):
                    reduction(inputs, mine, self.index, self._scratch)
                    out.copy_(mine)
            self._copy_results(number - 1, previous)
            previous = slices
        self._wait_all()
        self._copy_results(number, previous)

    def _copy_results(self, number: int, slices: list[Tensor]) -> None:
        for rank, target in enumerate(slices):
            if rank != self.index and target.numel():
                target.copy_(self.control.result_buffer(rank, number, target.numel(), target.dtype))

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
