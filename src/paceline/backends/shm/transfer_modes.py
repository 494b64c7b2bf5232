"""How the ranks of a host read each other's data: by one of three paths, the same on all ranks.

eager    up to 64 KiB: copied into the control block before the barrier, which is the only one
direct   all data lie in arenas: read in place, without a copy
staged   otherwise: part by part through a staging buffer that stays in the cache
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.backends.op_arguments import Tensors
from paceline.backends.op_signature import OpSignature
from paceline.backends.shm.control_block import EAGER_NBYTES, STAGING_NBYTES, ControlBlock, OpNotice
from paceline.backends.shm.peer_sockets import HostPeers
from paceline.backends.shm.shared_arena import Segment, arena
from paceline.backends.shm.shm_barrier import ShmBarrier

__all__ = ["ALIGN_NUMEL", "DataPaths", "Part"]

ALIGN_NUMEL = 64
"""Parts and slices begin at multiples of this many elements: at cache lines, for every dtype."""


class Part(NamedTuple):
    """Elements `low` to `high` of every piece; ``read(source, target)`` returns what a rank exposes to another."""

    low: int
    high: int
    read: Callable[[int, int], Tensor]


class DataPaths(ShmBarrier):
    """Data of the ranks of a host, exposed to each other. Tensors are contiguous and on the CPU.

    Parameters as for `ShmBarrier`.
    """

    def __init__(self, peers: HostPeers, control: ControlBlock, timeout: float, *, cores: float) -> None:
        super().__init__(peers, control, timeout, cores=cores)
        self._parts = 0  # staged so far: two parts in a row never use the same buffer
        self._shared: set[int] = set()  # own segments that all other ranks have
        self._sent_fds: set[tuple[int, int]] = set()  # (rank, own segment)
        self._segments: dict[tuple[int, int], Segment] = {}  # by (index of the owner, its number)

    def _exchange(
        self, call: OpSignature, pieces: Tensors, sources: Sequence[int], *, longest: int | None = None
    ) -> Iterator[Part]:
        """Expose `pieces` and yield, part by part, what all `sources` expose.

        Args:
            call: the collective.
            pieces: one 1-D tensor per target rank, or one for all of them.
            sources: the ranks whose pieces are read.
            longest: elements of the longest piece on any rank; None: all pieces have one length.
        """
        length = pieces[0].numel() if longest is None else longest
        exposes = self.index in sources
        if longest is None and len(pieces) * length * pieces[0].element_size() <= EAGER_NBYTES:
            yield self._eager(call, pieces, length, exposes)
            return
        self._start_call(call, self._notice(call, pieces if exposes and longest is None else []))
        notices = self._notices()
        if all(notices[rank].segment >= 0 for rank in sources):
            yield self._direct(pieces, sources, notices)
            self._wait_all()
            return
        yield from self._staged(pieces, length, exposes)

    def _eager(self, call: OpSignature, pieces: Tensors, length: int, exposes: bool) -> Part:
        dtype, turn, control = pieces[0].dtype, self._turn, self.control
        if exposes:
            buffer = control.eager_buffer(self.index, turn, dtype)
            for target, piece in enumerate(pieces):
                buffer[target * length : (target + 1) * length].copy_(piece)
        self._start_call(call, OpNotice(call.pack()))

        def read(source: int, target: int) -> Tensor:
            return control.eager_buffer(source, turn, dtype)[target * length : (target + 1) * length]

        return Part(0, length, read)

    def _direct(self, pieces: Tensors, sources: Sequence[int], notices: Sequence[OpNotice]) -> Part:
        length, dtype = pieces[0].numel(), pieces[0].dtype
        regions = {
            rank: self._map_region(rank, notices[rank], len(pieces) * length, dtype)
            for rank in sources
            if rank != self.index
        }

        def read(source: int, target: int) -> Tensor:
            if source == self.index:
                return pieces[target]
            return regions[source][target * length : (target + 1) * length]

        return Part(0, length, read)

    def _staged(self, pieces: Tensors, length: int, exposes: bool) -> Iterator[Part]:
        dtype, count = pieces[0].dtype, len(pieces)
        step = STAGING_NBYTES // (count * pieces[0].element_size()) // ALIGN_NUMEL * ALIGN_NUMEL
        first, self._parts = self._parts, self._parts + -(-length // step)
        for number, low in enumerate(range(0, length, step), first):
            high = min(low + step, length)
            if exposes:
                buffer = self.control.staging_buffer(self.index, number, count * step, dtype)
                for target, piece in enumerate(pieces):
                    if count == 1 or target != self.index:
                        part = piece[low:high]
                        buffer[target * step : target * step + part.numel()].copy_(part)
            self._wait_all()

            def read(
                source: int, target: int, number: int = number, low: int = low, high: int = high
            ) -> Tensor:
                if source == self.index:
                    return pieces[target][low:high]
                buffer = self.control.staging_buffer(source, number, count * step, dtype)
                return buffer[target * step : target * step + high - low]

            yield Part(low, high, read)

    def _notice(self, call: OpSignature, pieces: Tensors) -> OpNotice:
        """Return the notice for `pieces`, with their place if they are adjacent in the arena."""
        if not pieces or pieces[0].numel() == 0:
            return OpNotice(call.pack())
        first, nbytes = pieces[0].data_ptr(), pieces[0].nbytes
        adjacent = all(piece.data_ptr() == first + index * nbytes for index, piece in enumerate(pieces))
        place = self._locate(first, len(pieces) * nbytes) if adjacent else None
        return OpNotice(call.pack(), *(place or ()))

    def _locate(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Return (segment, offset) of memory of the arena that the other ranks can map; None: they can't."""
        place = arena.locate(address, nbytes)
        return place if place is not None and self._share(place[0]) else None

    def _share(self, segment: int) -> bool:
        """Send a segment of this rank's arena to the other ranks, and return whether all of them have it."""
        if segment in self._shared:
            return True
        fd = arena.segments[segment].fd
        for peer in self._peers.peers:
            key = peer.rank, segment
            if peer.rank != self._peers.me.rank and key not in self._sent_fds:
                if not self._peers.send_fd(peer.rank, segment, fd):
                    return False
                self._sent_fds.add(key)
        self._shared.add(segment)
        return True

    def _map_segment(self, index: int, number: int) -> Segment:
        """Return a segment of another rank's arena, mapped into this process."""
        segment = self._segments.get((index, number))
        if segment is None:
            fd = self._peers.receive_fd(self._peers.peers[index].rank, number)
            assert fd is not None, "sent before its notice was posted"
            segment = self._segments[index, number] = Segment.from_fd(fd)
        return segment

    def _map_region(self, index: int, notice: OpNotice, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the tensor that another rank announced, mapped into this process."""
        return self._map_segment(index, notice.segment).tensor(notice.offset, numel, dtype)

    def close(self) -> None:
        super().close()
        self._segments.clear()
