"""How the ranks of a host show each other their data: by one of three routes, chosen alike by all.

small    up to 32 KiB: copied into the board before the first meeting, which is the only one
direct   all data lie in arenas: read where they are; nothing is copied on the way
windows  anything else: shown part by part through a window that stays in the cache
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from paceline.backends.op_signature import OpSignature
from paceline.backends.shm.control_block import SMALL_NBYTES, WINDOW_NBYTES, ControlBlock, OpNotice
from paceline.backends.shm.host_peers import HostPeers
from paceline.backends.shm.shared_arena import Arena, Segment
from paceline.backends.shm.shm_barrier import ShmBarrier

__all__ = ["ALIGN_NUMEL", "DataPaths", "Part"]

ALIGN_NUMEL = 64
"""Parts and slices start at multiples of this many elements: at cache lines, for every dtype."""

Reader = Callable[[int, int], torch.Tensor]
"""``reader(source, target)``: the elements that rank `source` shows to rank `target`."""


class Part(NamedTuple):
    """Elements `low` to `high` of every piece, and how to read them."""

    low: int
    high: int
    read: Reader


class DataPaths(ShmBarrier):
    """The ways data take among the ranks of a host. Tensors are contiguous and on the CPU.

    Args:
        neighbours, board, timeout, patience: as for a meeting.
        arena: this process's arena.
    """

    def __init__(
        self, neighbours: HostPeers, board: ControlBlock, arena: Arena, timeout: float, patience: float
    ) -> None:
        super().__init__(neighbours, board, timeout, patience)
        self._arena = arena
        self._told: set[tuple[int, int]] = set()
        self._segments: dict[tuple[int, int], Segment] = {}

    def _parts(
        self,
        call: OpSignature,
        pieces: Sequence[torch.Tensor],
        sources: Sequence[int],
        *,
        longest: int | None = None,
    ) -> Iterator[Part]:
        """Show `pieces` and yield, part by part, what all `sources` show.

        Args:
            call: what all ranks call.
            pieces: one 1-D tensor per target rank, or one for all of them.
            sources: the ranks whose pieces are read.
            longest: elements of the longest piece anywhere, where pieces differ in size.
        """
        uneven = longest is not None
        length = pieces[0].numel() if longest is None else longest
        itemsize = pieces[0].element_size()
        mine = self.index in sources
        if len(pieces) * length * itemsize <= SMALL_NBYTES and not uneven:
            yield self._small(call, pieces, length, mine)
            return
        notice = self._notice(call, pieces if mine and not uneven else [])
        notices = self._begin(call, notice)
        if all(notices[rank].segment >= 0 for rank in sources):
            yield self._direct(pieces, sources, notices)
            self._meet()
            return
        yield from self._windows(pieces, length, mine)

    def _small(self, call: OpSignature, pieces: Sequence[torch.Tensor], length: int, mine: bool) -> Part:
        dtype, turn = pieces[0].dtype, self._turn
        if mine:
            place = self.board.small(self.index, turn, dtype)
            for target, piece in enumerate(pieces):
                place[target * length : (target + 1) * length].copy_(piece)
        self._begin(call, OpNotice(call.packed()))

        def read(source: int, target: int) -> torch.Tensor:
            return self.board.small(source, turn, dtype)[target * length : (target + 1) * length]

        return Part(0, length, read)

    def _direct(
        self, pieces: Sequence[torch.Tensor], sources: Sequence[int], notices: Sequence[OpNotice]
    ) -> Part:
        length, dtype = pieces[0].numel(), pieces[0].dtype
        regions = {
            rank: self._region(rank, notices[rank], len(pieces) * length, dtype)
            for rank in sources
            if rank != self.index
        }

        def read(source: int, target: int) -> torch.Tensor:
            if source == self.index:
                return pieces[target]
            return regions[source][target * length : (target + 1) * length]

        return Part(0, length, read)

    def _windows(self, pieces: Sequence[torch.Tensor], length: int, mine: bool) -> Iterator[Part]:
        dtype = pieces[0].dtype
        step = WINDOW_NBYTES // (len(pieces) * pieces[0].element_size()) // ALIGN_NUMEL * ALIGN_NUMEL
        for number, low in enumerate(range(0, length, step)):
            high = min(low + step, length)
            if mine:
                window = self.board.window(self.index, number, len(pieces) * step, dtype)
                for target, piece in enumerate(pieces):
                    if len(pieces) == 1 or target != self.index:
                        part = piece[low:high]
                        window[target * step : target * step + part.numel()].copy_(part)
            self._meet()

            def read(
                source: int, target: int, number: int = number, low: int = low, high: int = high
            ) -> torch.Tensor:
                if source == self.index:
                    return pieces[target][low:high]
                window = self.board.window(source, number, len(pieces) * step, dtype)
                return window[target * step : target * step + high - low]

            yield Part(low, high, read)

    def _notice(self, call: OpSignature, pieces: Sequence[torch.Tensor]) -> OpNotice:
        """Return the notice for `pieces`; it tells their place if they lie side by side in the arena."""
        if not pieces or pieces[0].numel() == 0:
            return OpNotice(call.packed())
        first, nbytes = pieces[0].data_ptr(), pieces[0].nbytes
        beside = all(piece.data_ptr() == first + index * nbytes for index, piece in enumerate(pieces))
        place = self._arena.locate(pieces[0], len(pieces) * nbytes) if beside else None
        if place is None or not self._tell(place[0]):
            return OpNotice(call.packed())
        return OpNotice(call.packed(), *place)

    def _tell(self, segment: int) -> bool:
        """Hand the others a segment of our arena, and return whether all of them have it."""
        fd = self._arena.segments[segment].fd
        for card in self._neighbours.cards:
            key = card.rank, segment
            if card.rank != self._neighbours.me.rank and key not in self._told:
                if not self._neighbours.send_fd(card.rank, segment, fd):
                    return False
                self._told.add(key)
        return True

    def _region(self, index: int, notice: OpNotice, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor that another rank told of, mapped here."""
        if index == self.index:
            return self._arena.segments[notice.segment].tensor(notice.offset, numel, dtype)
        key = index, notice.segment
        if key not in self._segments:
            fd = self._neighbours.take_fd(self._neighbours.cards[index].rank, notice.segment)
            assert fd is not None, "handed over before its notice was posted"
            self._segments[key] = Segment.of(fd)
        return self._segments[key].tensor(notice.offset, numel, dtype)

    def close(self) -> None:
        """Take leave."""
        super().close()
        self._segments.clear()
