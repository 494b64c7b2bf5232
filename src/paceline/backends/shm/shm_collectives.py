"""Collectives among the ranks of one host, through memory that they share.

Phases of every collective:

    1. post a notice: what is called, where the data lie; small data travel with it
    2. meet: from here on everybody may read everybody's data
    3. take: combine or copy what the others show, in place where the data lie in the arena
    4. meet again, where others read or write this rank's own tensor

How data are shown depends on where they lie: routes.py. How they are combined: reduction.py.

All-reduce, direct (rank r of N): reduce the r-th slice of all ranks into the own tensor, block by block,
and write each block into the others' tensors while it is in the cache: about the memory traffic of one copy
(everywhere.py).

A result may overlap what this rank gives. Where the others still read there, a copy stands in for one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.backends.block_reduction import Reduction, Scratch, blocks, divide, reduce_everywhere
from paceline.backends.op_arguments import bytes_of, copy, flat_of, overlap, same_memory
from paceline.backends.op_signature import OpSignature
from paceline.backends.shm.control_block import SMALL_NBYTES, WINDOW_NBYTES, ControlBlock, OpNotice
from paceline.backends.shm.data_paths import ALIGN_NUMEL, DataPaths
from paceline.backends.shm.host_peers import HostPeers
from paceline.backends.shm.shared_arena import Arena
from paceline.errors import MismatchError

__all__ = ["ShmCollectives", "span"]


def span(numel: int, parts: int, index: int) -> tuple[int, int]:
    """Return first and one-past-last element of slice `index` of `parts`; slices may be empty.

    Example:
        >>> [span(100, 2, index) for index in (0, 1)]
        [(0, 64), (64, 100)]
    """
    length = -(-numel // (parts * ALIGN_NUMEL)) * ALIGN_NUMEL
    return min(index * length, numel), min((index + 1) * length, numel)


class ShmCollectives(DataPaths):
    """The collectives of a group on this host; ranks are counted on the host.

    Args:
        neighbours: the connections to the others. board: the shared board. arena: this process's arena.
        timeout: seconds that a call waits for a rank.
        patience: seconds to look again and again before sleeping; 0 where ranks share cores.
    """

    shares_memory = True
    ops = frozenset(
        {"barrier", "all_reduce", "reduce", "reduce_scatter", "all_gather"}
        | {"gather", "broadcast", "scatter", "all_to_all"}
    )

    def __init__(
        self, neighbours: HostPeers, board: ControlBlock, arena: Arena, timeout: float, patience: float
    ) -> None:
        super().__init__(neighbours, board, arena, timeout, patience)
        self._scratch = Scratch()

    def barrier(self, call: OpSignature) -> None:
        """Return when all ranks have called."""
        self._begin(call, OpNotice(call.packed()))

    def all_reduce(self, call: OpSignature, tensor: torch.Tensor, how: Reduction, ranks: int) -> None:
        """Reduce `tensor` over all ranks, in place; a mean divides by `ranks`."""
        flat = tensor.view(-1)
        if tensor.nbytes <= SMALL_NBYTES:
            for part in self._parts(call, [flat], range(self.size)):
                how([part.read(rank, 0) for rank in range(self.size)], flat, 0, self._scratch, ranks)
            return
        notices = self._begin(call, self._notice(call, [flat]))
        mixed = any(notice.call != notices[self.index].call for notice in notices)  # means and sums
        shared = how.as_sum() if mixed else how
        if all(notice.segment >= 0 for notice in notices):
            tensors = [
                self._region(rank, notice, flat.numel(), flat.dtype) for rank, notice in enumerate(notices)
            ]
            tensors[self.index] = flat
            try:
                self._all_reduce_direct(tensors, shared, ranks)
                self._meet()
            except BaseException:  # the others may write there as long as they don't know
                self._arena.abandon(notices[self.index].segment, notices[self.index].offset)
                raise
        else:
            self._all_reduce_windows(flat, shared, ranks)
        if shared is not how:
            divide(flat, ranks)

    def _all_reduce_direct(self, tensors: list[torch.Tensor], how: Reduction, ranks: int) -> None:
        low, high = span(tensors[0].numel(), self.size, self.index)
        if low < high:
            slices = [tensor[low:high] for tensor in tensors]
            reduce_everywhere(slices, self.index, how, self._scratch, ranks, self._look_if_broken)

    def _look_if_broken(self) -> None:
        """Raise before writing where another rank may keep something else by now."""
        if self.board.broken:
            self.look()

    def _all_reduce_windows(self, flat: torch.Tensor, how: Reduction, ranks: int) -> None:
        """Show part t, meet, reduce the own slice of it, and take the others' results of part t − 1."""
        step = WINDOW_NBYTES // flat.element_size()
        previous: list[torch.Tensor] = []
        number = 0
        for number, part in enumerate(flat.split(step)):
            slices = [part[slice(*span(part.numel(), self.size, rank))] for rank in range(self.size)]
            window = self.board.window(self.index, number, part.numel(), flat.dtype)
            for rank in range(self.size):
                if rank != self.index:
                    window[slice(*span(part.numel(), self.size, rank))].copy_(slices[rank])
            self._meet()
            own = slices[self.index]
            low, high = span(part.numel(), self.size, self.index)
            if low < high:
                shown = [
                    own
                    if rank == self.index
                    else self.board.window(rank, number, part.numel(), flat.dtype)[low:high]
                    for rank in range(self.size)
                ]
                result = self.board.result(self.index, number, high - low, flat.dtype)
                for *inputs, mine, out in blocks([*shown, own, result]):
                    how(inputs, mine, self.index, self._scratch, ranks)
                    out.copy_(mine)
            self._take_results(number - 1, previous)
            previous = slices
        self._meet()
        self._take_results(number, previous)

    def _take_results(self, number: int, slices: list[torch.Tensor]) -> None:
        for rank, own in enumerate(slices):
            if rank != self.index and own.numel():
                own.copy_(self.board.result(rank, number, own.numel(), own.dtype))

    def reduce(self, call: OpSignature, tensor: torch.Tensor, root: int, how: Reduction, ranks: int) -> None:
        """Reduce `tensor` over all ranks into that of `root`; the others' stay as they are."""
        flat = tensor.view(-1)
        for part in self._parts(call, [flat], range(self.size)):
            if self.index == root:
                inputs = [part.read(rank, 0) for rank in range(self.size)]
                for *block, out in blocks([*inputs, flat[part.low : part.high]]):
                    how(block, out, root, self._scratch, ranks)

    def reduce_scatter(
        self,
        call: OpSignature,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        how: Reduction,
        ranks: int,
    ) -> None:
        """Reduce ``inputs[r]`` over all ranks into the `output` of rank r."""
        own = self.index if same_memory(output, inputs[self.index]) else 0
        result = torch.empty_like(output) if _clash(output, inputs, self.index) else output
        flat = result.view(-1)
        for part in self._parts(call, [flat_of(each) for each in inputs], range(self.size)):
            shown = [part.read(rank, self.index) for rank in range(self.size)]
            for *block, out in blocks([*shown, flat[part.low : part.high]]):
                how(block, out, own, self._scratch, ranks)
        if result is not output:
            output.copy_(result)

    def all_gather(self, call: OpSignature, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Copy the `tensor` of every rank r into ``outputs[r]`` on all ranks."""
        self._collect(call, outputs, tensor, True)

    def gather(
        self, call: OpSignature, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int
    ) -> None:
        """Copy the `tensor` of every rank r into ``outputs[r]`` on `root`; elsewhere `outputs` is empty."""
        self._collect(call, outputs, tensor, self.index == root)

    def _collect(
        self, call: OpSignature, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, takes: bool
    ) -> None:
        mine = bytes_of(tensor.clone() if _clash(tensor, outputs, self.index) else tensor)
        places = [bytes_of(output) for output in outputs]
        order = [(self.index + distance) % self.size for distance in range(self.size)]
        for part in self._parts(call, [mine], range(self.size)):
            for rank in order if takes else ():  # the next one first: not all at the same source
                copy(places[rank][part.low : part.high], part.read(rank, 0))

    def broadcast(self, call: OpSignature, tensor: torch.Tensor, root: int) -> None:
        """Copy `tensor` from `root` to all ranks."""
        mine = bytes_of(tensor)
        for part in self._parts(call, [mine], [root]):
            if self.index != root:
                copy(mine[part.low : part.high], part.read(root, 0))

    def scatter(
        self, call: OpSignature, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int
    ) -> None:
        """Copy ``inputs[r]`` of `root` into the `output` of rank r; elsewhere `inputs` is empty."""
        result = torch.empty_like(output) if _clash(output, inputs, root) else output
        mine = bytes_of(result)
        shown = [bytes_of(each) for each in inputs] if self.index == root else [mine] * self.size
        for part in self._parts(call, shown, [root]):
            copy(mine[part.low : part.high], part.read(root, self.index))
        if result is not output:
            output.copy_(result)

    def all_to_all(
        self, call: OpSignature, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None:
        """Copy ``inputs[r]`` of every rank q into ``outputs[q]`` of rank r; sizes may differ.

        Raises:
            MismatchError: a rank sends another size than its receiver expects (raised by all ranks).
        """
        if overlap(outputs, inputs):
            inputs = [each.clone() for each in inputs]
        shown, places = [bytes_of(each) for each in inputs], [bytes_of(each) for each in outputs]
        longest = self._agree_on_sizes(call, shown, places)
        for part in self._parts(call, shown, range(self.size), longest=longest):
            for distance in range(self.size):
                rank = (self.index + distance) % self.size
                place = places[rank][part.low : part.high]
                copy(place, part.read(rank, self.index)[: place.numel()])

    def _agree_on_sizes(
        self, call: OpSignature, shown: Sequence[torch.Tensor], places: Sequence[torch.Tensor]
    ) -> int:
        """Compare what everybody sends with what everybody expects; return the longest piece."""
        mine = torch.tensor([[each.numel() for each in shown], [each.numel() for each in places]])
        table = torch.empty(self.size, 2, self.size, dtype=torch.int64)
        flat = mine.view(-1)
        for part in self._parts(call.about("sizes", flat), [flat], range(self.size)):
            for rank in range(self.size):
                table[rank].view(-1)[part.low : part.high].copy_(part.read(rank, 0))
        sent, expected = table[:, 0], table[:, 1].T
        wrong = (sent != expected).nonzero().tolist()
        if wrong:
            source, target = wrong[0]
            raise MismatchError(
                f"{call}: rank {source} sends {sent[source, target]} bytes to rank {target}, which expects "
                f"{expected[source, target]} (ranks counted on this host)",
                remedy="give input splits of each rank that equal the output splits of the receivers",
            )
        return int(table.max())


def _clash(tensor: torch.Tensor, pieces: Sequence[torch.Tensor], own: int) -> bool:
    """Return whether a tensor overlaps other pieces than its own; small ones are copied before that matters."""
    if len(pieces) * tensor.nbytes <= SMALL_NBYTES:
        return False
    others = [each for rank, each in enumerate(pieces) if rank != own or not same_memory(tensor, each)]
    return overlap([tensor], others)
