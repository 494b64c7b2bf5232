"""Replay of allocations and frees by the rules of the CUDA caching allocator: bytes allocated and reserved.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.13) with its default settings:

- A request is rounded up to 512 bytes (`round_size`).
- Requests of at most 1 MiB come from segments of 2 MiB, others from segments of 20 MiB, those of 10 MiB and more from
  a separate segment, rounded up to 2 MiB (`get_allocation_size`). The two pools are separate.
- The smallest free block that is large enough is taken (`get_free_block`) and split if enough is left: 512 bytes in the
  small pool, more than 1 MiB in the large one (`should_split`). A freed block is merged with free neighbours in
  its segment (`try_merge_blocks`).
- If the device has no memory for a new segment, completely free segments are released first.

One stream is assumed. Expandable segments are not modelled: with them the reserve is smaller.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

__all__ = ["AllocatorReplay", "allocation_size", "replay_allocations", "round_size"]

MIB = 1 << 20
GRAIN = 512
SMALL = 1 * MIB
_SMALL_SEGMENT, _LARGE_SEGMENT, _OWN_SEGMENT, _SEGMENT_GRAIN = 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB


@dataclass(frozen=True)
class AllocatorReplay:
    """Peaks of a replay.

    Attributes:
        requested_nbytes: most bytes requested at once.
        allocated_nbytes: most bytes allocated at once: torch's ``max_memory_allocated``.
        reserved_nbytes: most bytes reserved at once: ``max_memory_reserved``.
        out_at: number of the change (from 0) for which memory ran out; None: it did not.
    """

    requested_nbytes: int
    allocated_nbytes: int
    reserved_nbytes: int
    out_at: int | None = None


def round_size(nbytes: int) -> int:
    """Return the size of the block for a request.

    Example:
        >>> round_size(1), round_size(512), round_size(513)
        (512, 512, 1024)
    """
    return max(GRAIN, -(-nbytes // GRAIN) * GRAIN)


def allocation_size(nbytes: int) -> int:
    """Return the size of a new segment for a block of (rounded) `nbytes`.

    Example:
        >>> [allocation_size(size * MIB) // MIB for size in (1, 2, 10, 11)]
        [2, 20, 10, 12]
    """
    if nbytes <= SMALL:
        return _SMALL_SEGMENT
    if nbytes < _OWN_SEGMENT:
        return _LARGE_SEGMENT
    return -(-nbytes // _SEGMENT_GRAIN) * _SEGMENT_GRAIN


@dataclass(eq=False)
class _Piece:
    """A block within a segment, allocated or free, with its neighbours."""

    nbytes: int
    number: int  # in place of the address: smaller for older segments
    small: bool
    before: _Piece | None = None
    after: _Piece | None = None

    @property
    def whole(self) -> bool:
        """Whether the piece is a whole segment."""
        return self.before is None and self.after is None


class _Pool:
    """Free pieces in order of size, then of age."""

    def __init__(self) -> None:
        self._keys: list[tuple[int, int]] = []
        self._of_key: dict[tuple[int, int], _Piece] = {}

    def add(self, piece: _Piece) -> None:
        key = (piece.nbytes, piece.number)
        bisect.insort(self._keys, key)
        self._of_key[key] = piece

    def remove(self, piece: _Piece) -> None:
        key = (piece.nbytes, piece.number)
        self._keys.pop(bisect.bisect_left(self._keys, key))
        del self._of_key[key]

    def best(self, nbytes: int) -> _Piece | None:
        """Return the smallest piece of at least `nbytes`."""
        at = bisect.bisect_left(self._keys, (nbytes, -1))
        return self._of_key[self._keys[at]] if at < len(self._keys) else None

    def holds(self, piece: _Piece) -> bool:
        return self._of_key.get((piece.nbytes, piece.number)) is piece

    def whole(self) -> list[_Piece]:
        """Return the completely free segments."""
        return [piece for piece in self._of_key.values() if piece.whole]


class _Device:
    """Segments of a device and their free pieces."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.reserved = 0
        self._pools = {True: _Pool(), False: _Pool()}
        self._numbers = 0

    def take(self, nbytes: int) -> _Piece | None:
        """Return a piece for (rounded) `nbytes`; None if memory runs out."""
        small = nbytes <= SMALL
        pool = self._pools[small]
        piece = pool.best(nbytes)
        if piece is None:
            piece = self._segment(nbytes, small)
            if piece is None:
                return None
        else:
            pool.remove(piece)
        rest = piece.nbytes - nbytes
        if rest >= GRAIN if small else rest > SMALL:
            pool.add(self._split(piece, nbytes))
        return piece

    def _segment(self, nbytes: int, small: bool) -> _Piece | None:
        wanted = allocation_size(nbytes)
        if self.reserved + wanted > self.capacity:
            self._release_free_segments()
        if self.reserved + wanted > self.capacity:
            return None
        self.reserved += wanted
        return _Piece(wanted, self._number(), small)

    def _release_free_segments(self) -> None:
        for pool in self._pools.values():
            for piece in pool.whole():
                pool.remove(piece)
                self.reserved -= piece.nbytes

    def _split(self, piece: _Piece, nbytes: int) -> _Piece:
        """Cut `piece` to `nbytes`; return the rest."""
        rest = _Piece(piece.nbytes - nbytes, self._number(), piece.small, piece, piece.after)
        if piece.after is not None:
            piece.after.before = rest
        piece.nbytes, piece.after = nbytes, rest
        return rest

    def free(self, piece: _Piece) -> None:
        """Free `piece` and merge it with its free neighbours."""
        pool = self._pools[piece.small]
        before, after = piece.before, piece.after
        if before is not None and pool.holds(before):
            pool.remove(before)
            piece.nbytes += before.nbytes
            piece.number = before.number
            piece.before = before.before
            if piece.before is not None:
                piece.before.after = piece
        if after is not None and pool.holds(after):
            pool.remove(after)
            piece.nbytes += after.nbytes
            piece.after = after.after
            if piece.after is not None:
                piece.after.before = piece
        pool.add(piece)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers


def replay_allocations(
    changes: Iterable[tuple[int, Hashable]], capacity: float = float("inf")
) -> AllocatorReplay:
    """Replay `changes`, and return the peaks.

    Args:
        changes: (bytes, key) in order: an allocation if bytes are positive, the free of the same key if negative.
        capacity: most bytes of all segments.

    Example:
        >>> replay_allocations([(600, "a"), (1 << 21, "b"), (-600, "a"), (600, "c")])
        AllocatorReplay(requested_nbytes=2097752, allocated_nbytes=2098176, reserved_nbytes=23068672, out_at=None)
    """
    device = _Device(capacity)
    piece_of: dict[Hashable, tuple[_Piece, int]] = {}
    requested = allocated = 0
    peaks = [0, 0, 0]
    for at, (nbytes, key) in enumerate(changes):
        if nbytes > 0:
            piece = device.take(round_size(nbytes))
            if piece is None:
                return AllocatorReplay(*peaks, out_at=at)
            piece_of[key] = piece, piece.nbytes
            requested, allocated = requested + nbytes, allocated + piece.nbytes
        elif key in piece_of:
            piece, allocated_size = piece_of.pop(key)
            requested, allocated = requested + nbytes, allocated - allocated_size
            device.free(piece)
        peaks = [max(pair) for pair in zip(peaks, (requested, allocated, device.reserved), strict=True)]
    return AllocatorReplay(*peaks)
