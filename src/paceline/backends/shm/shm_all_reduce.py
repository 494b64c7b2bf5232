"""All-reduce among the ranks of one host: eager, direct or staged (`transfer_modes`).

eager    every rank adds all inputs
direct   rank r of N adds the r-th slices of all ranks into its own tensor, block by block, and writes each block into
         the others' tensors while it is in the cache: about the memory traffic of one copy
staged   part by part: expose the others' slices, wait for all, add the own slice, wait for all, copy the others' sums

Sums and means of plain numbers run in compiled code where it was built (`paceline._core.native`): a call costs a few
microseconds. Everything else, and every call without it, runs in Python, with the same phases and bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.backends.block_reduction import Reduction, Scratch, reduce_into_all, split_blocks
from paceline.backends.op_signature import OpSignature
from paceline.backends.shm.control_block import EAGER_NBYTES, STAGING_NBYTES, ControlBlock, OpNotice
from paceline.backends.shm.peer_sockets import HostPeers
from paceline.backends.shm.shared_arena import arena
from paceline.backends.shm.transfer_modes import ALIGN_NUMEL, DataPaths

__all__ = ["CompiledSum", "ShmAllReduce", "slice_bounds"]

_COMPILED_KINDS = {torch.float32: 0, torch.float64: 1, torch.int32: 2, torch.int64: 3}  # as in native.c


def slice_bounds(numel: int, parts: int, index: int) -> tuple[int, int]:
    """Return first and one-past-last element of slice `index` of `parts`; slices may be empty.

    Example:
        >>> [slice_bounds(100, 2, index) for index in (0, 1)]
        [(0, 64), (64, 100)]
    """
    length = -(-numel // (parts * ALIGN_NUMEL)) * ALIGN_NUMEL
    return min(index * length, numel), min((index + 1) * length, numel)


class CompiledSum(NamedTuple):
    """An all-reduce that compiled code runs, prepared for calls that repeat.

    Attributes:
        call: the call.
        packed: its signature.
        numel: elements of the tensor.
        item: bytes of an element.
        nbytes: of the tensor.
        kind: of the elements, as the compiled code numbers them.
        divisor: of a mean; 1: a sum.
    """

    call: OpSignature
    packed: bytes
    numel: int
    item: int
    nbytes: int
    kind: int
    divisor: int


class _Staging(NamedTuple):
    """The three steps of a staged part, each called with its number in the group and its index in the tensor."""

    expose: Callable[[int, int], object]
    add: Callable[[int, int], object]
    copy_results: Callable[[int, int], object]


class ShmAllReduce(DataPaths):
    """All-reduce on one host, whose ranks are numbered on the host. Parameters as for `ShmBarrier`."""

    def __init__(self, peers: HostPeers, control: ControlBlock, timeout: float, *, cores: float) -> None:
        super().__init__(peers, control, timeout, cores=cores)
        self._scratch = Scratch()
        # Every rank reads the eager data of all: of many ranks, that is more than two barriers cost.
        self._eager_nbytes = min(EAGER_NBYTES, 3 * EAGER_NBYTES // max(1, self.size - 1))

    def all_reduce(self, call: OpSignature, tensor: Tensor, reduction: Reduction) -> None:
        compiled = self.compiled_sum(call, reduction)
        if compiled is not None:
            self.all_reduce_compiled(compiled, tensor, tensor.data_ptr())
            return
        flat = tensor.view(-1)
        if tensor.nbytes <= self._eager_nbytes:
            part = self._eager(call, [flat], flat.numel(), True)
            reduction([part.read(rank, 0) for rank in range(self.size)], flat, 0, self._scratch)
            return
        place = self._locate(flat.data_ptr(), flat.nbytes)
        staging = self._python_staging(flat, reduction) if place is None else None
        if staging is not None:
            staging.expose(self._parts, 0)
        self._start_call(call, OpNotice(call.pack(), *(place or ())))
        notices = self._notices()
        common = self._common(notices, reduction)
        if all(notice.segment >= 0 for notice in notices):
            self._all_reduce_direct(flat, notices, common)
        else:
            exposed = staging is not None
            if staging is None or common is not reduction:
                staging = self._python_staging(flat, common)
            self._run_staged(staging, _part_count(flat.numel(), flat.element_size()), notices, exposed)
        if common is not reduction:
            reduction.divide(flat)

    def _common(self, notices: Sequence[OpNotice], reduction: Reduction) -> Reduction:
        """Return what all ranks compute: where some call for a mean and some for a sum, each mean divides later."""
        mixed = any(notice.call != notices[self.index].call for notice in notices)
        return reduction.as_sum() if mixed else reduction

    def _all_reduce_direct(self, flat: Tensor, notices: Sequence[OpNotice], reduction: Reduction) -> None:
        low, high = slice_bounds(flat.numel(), self.size, self.index)
        try:
            tensors = [
                flat if rank == self.index else self._map_region(rank, notice, flat.numel(), flat.dtype)
                for rank, notice in enumerate(notices)
            ]
            slices = [tensor[low:high] for tensor in tensors]
            if low < high:
                reduce_into_all(slices, self.index, reduction, self._scratch, self._check_if_failed)
            self._wait_all()
        except BaseException:
            self._retire(notices)
            raise

    def _retire(self, notices: Sequence[OpNotice]) -> None:
        """Never reuse the memory of a call that failed: the others may write there until they learn of it."""
        arena.retire(notices[self.index].segment, notices[self.index].offset)

    def _check_if_failed(self) -> None:
        """Raise before writing where another rank may keep something else by now."""
        if self.control.failed:
            self.check()

    # Staged.

    def _run_staged(
        self, staging: _Staging, count: int, notices: Sequence[OpNotice], first_is_exposed: bool
    ) -> None:
        """Run the parts of a tensor, at least one of the ranks' tensors lying outside of the arena.

        Ranks whose tensors do expose their first part before the notice. If all did, that wait counts for it.
        """
        first, self._parts = self._parts, self._parts + count
        all_exposed = all(notice.segment < 0 for notice in notices)
        for index in range(count):
            if index > 0 or not first_is_exposed:
                staging.expose(first + index, index)
            if index > 0 or not all_exposed:
                self._wait_all()
            staging.add(first + index, index)
            if index > 0:
                staging.copy_results(first + index - 1, index - 1)
        self._wait_all()
        staging.copy_results(first + count - 1, count - 1)

    def _python_staging(self, flat: Tensor, reduction: Reduction) -> _Staging:
        parts = flat.split(STAGING_NBYTES // flat.element_size())
        control, own = self.control, self.index
        others = [rank for rank in range(self.size) if rank != own]

        def slices(index: int) -> list[Tensor]:
            part = parts[index]
            return [part[slice(*slice_bounds(part.numel(), self.size, rank))] for rank in range(self.size)]

        def exposed(rank: int, number: int, index: int) -> list[Tensor]:
            buffer = control.staging_buffer(rank, number, parts[index].numel(), flat.dtype)
            bounds = (slice_bounds(buffer.numel(), self.size, each) for each in range(self.size))
            return [buffer[slice(*each)] for each in bounds]

        def expose(number: int, index: int) -> None:
            buffers, values = exposed(own, number, index), slices(index)
            for rank in others:
                buffers[rank].copy_(values[rank])

        def add(number: int, index: int) -> None:
            mine = slices(index)[own]
            if not mine.numel():
                return
            inputs = [mine if rank == own else exposed(rank, number, index)[own] for rank in range(self.size)]
            result = control.result_buffer(own, number, mine.numel(), flat.dtype)
            for *block, target, out in split_blocks([*inputs, mine, result]):
                reduction(block, target, own, self._scratch)
                out.copy_(target)

        def copy_results(number: int, index: int) -> None:
            values = slices(index)
            for rank in others:
                target = values[rank]
                if target.numel():
                    target.copy_(control.result_buffer(rank, number, target.numel(), target.dtype))

        return _Staging(expose, add, copy_results)

    # Compiled.

    def compiled_sum(self, call: OpSignature, reduction: Reduction) -> CompiledSum | None:
        """Return the call as compiled code runs it; None: Python runs it."""
        kind = _COMPILED_KINDS.get(call.dtype) if call.dtype is not None else None
        if self._compiled is None or kind is None or reduction.name not in ("SUM", "AVG"):
            return None
        assert call.dtype is not None
        numel, item = call.numel, call.dtype.itemsize
        return CompiledSum(call, call.pack(), numel, item, numel * item, kind, reduction.divisor)

    def all_reduce_compiled(self, what: CompiledSum, tensor: Tensor, address: int) -> None:
        """All-reduce a contiguous tensor.

        Args:
            what: the call; its number and kind of elements are the tensor's.
            tensor: the tensor.
            address: of its first element.
        """
        call, packed, numel, item, nbytes, kind, divisor = what
        self._check_usable(call)
        compiled = self._compiled
        if nbytes <= self._eager_nbytes:
            turn, self._turn = self._turn, self._turn + 1
            same = compiled.all_reduce_eager(turn, packed, address, numel, kind, divisor, self._attend)
            if not same:
                self._check_match(call)
                compiled.add_eager(turn, address, numel, kind, divisor)
            return
        place = self._locate(address, nbytes)
        if place is None:
            compiled.stage(self._parts, address, min(numel, STAGING_NBYTES // item), item)
        turn, self._turn = self._turn, self._turn + 1
        same = compiled.start(turn, packed, *(place or (-1, 0)), self._attend)
        if not same:
            self._check_match(call)
        notices = self._notices()
        common = divisor if same else 1
        if all(notice.segment >= 0 for notice in notices):
            try:
                addresses = tuple(
                    address
                    if rank == self.index
                    else self._map_segment(rank, notice.segment).address + notice.offset
                    for rank, notice in enumerate(notices)
                )
                compiled.all_reduce_direct(addresses, numel, kind, common, self._attend)
            except BaseException:
                self._retire(notices)
                raise
        else:
            staging = _compiled_staging(compiled, what._replace(divisor=common), address)
            self._run_staged(staging, _part_count(numel, item), notices, place is None)
        if common != divisor:
            tensor.view(-1).div_(divisor)


def _part_count(numel: int, item: int) -> int:
    return -(-numel // (STAGING_NBYTES // item))


def _compiled_staging(compiled: Any, what: CompiledSum, address: int) -> _Staging:
    _, _, numel, item, _, kind, divisor = what
    step = STAGING_NBYTES // item

    def expose(number: int, index: int) -> None:
        compiled.stage(number, address + index * step * item, min(step, numel - index * step), item)

    def add(number: int, index: int) -> None:
        at, count = address + index * step * item, min(step, numel - index * step)
        compiled.reduce_staged(number, at, count, kind, divisor)

    def copy_results(number: int, index: int) -> None:
        compiled.take_results(number, address + index * step * item, min(step, numel - index * step), item)

    return _Staging(expose, add, copy_results)
