"""What the CUDA caching allocator makes of a row of allocations and frees: how much it gives out, how much it reserves.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.13) with its default settings:

- A request is rounded up to 512 bytes (`round_size`).
- Requests of at most 1 MiB come from segments of 2 MiB, others from segments of 20 MiB, those of 10 MiB and more from
  a segment of their own, rounded up to 2 MiB (`get_allocation_size`). The two pools are apart.
- The smallest free block that is large enough is taken (`get_free_block`) and split if enough is left: 512 bytes in the
  small pool, more than 1 MiB in the large one (`should_split`). A freed block is merged with free neighbours in
  its segment (`try_merge_blocks`).
- Where the device has no room for a new segment, segments that are wholly free are given back first.

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
    """What a row of requests came to.

    Attributes:
        requested_nbytes: the most that was asked for at once.
        allocated_nbytes: the most that was given out at once: torch's ``max_memory_allocated``.
        reserved_nbytes: the most that was taken from the device at once: ``max_memory_reserved``.
        out_at: number of the change (from 0) for which the device had no room; None: it had.
    """

    requested_nbytes: int
    allocated_nbytes: int
    reserved_nbytes: int
    out_at: int | None = None


def round_size(nbytes: int) -> int:
    """Return the size of the block that a request gets at least.

    Example:
        >>> rounded(1), rounded(512), rounded(513)
        (512, 512, 1024)
    """
    return max(GRAIN, -(-nbytes // GRAIN) * GRAIN)


def allocation_size(nbytes: int) -> int:
    """Return the size of the segment that is taken from the device for a block of (rounded) `nbytes`.

    Example:
        >>> [segment_nbytes(size * MIB) // MIB for size in (1, 2, 10, 11)]
        [2, 20, 10, 12]
    """
    if nbytes <= SMALL:
        return _SMALL_SEGMENT
    if nbytes < _OWN_SEGMENT:
        return _LARGE_SEGMENT
    return -(-nbytes // _SEGMENT_GRAIN) * _SEGMENT_GRAIN


@dataclass(eq=False)
class _Piece:
    """A stretch of a segment, given out or free, and its neighbours in the segment."""

    nbytes: int
    number: int  # older segments have smaller ones: a stand-in for the address
    small: bool
    before: _Piece | None = None
    after: _Piece | None = None

    @property
    def whole(self) -> bool:
        """Whether the piece is a segment of its own."""
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
        """Return the segments that are free from end to end."""
        return [piece for piece in self._of_key.values() if piece.whole]


class _Device:
    """Segments, their pieces, and how much of them is given out."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.reserved = 0
        self._pools = {True: _Pool(), False: _Pool()}
        self._numbers = 0

    def take(self, nbytes: int) -> _Piece | None:
        """Return a piece for (rounded) `nbytes`; None where there is no room."""
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
            self._give_back()
        if self.reserved + wanted > self.capacity:
            return None
        self.reserved += wanted
        return _Piece(wanted, self._number(), small)

    def _give_back(self) -> None:
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
        """Take `piece` back and merge it with its free neighbours."""
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
    """Return what the allocator makes of `changes`.

    Args:
        changes: (bytes, key) in order: an allocation where bytes are positive, the free of the same key where
            they are negative.
        capacity: bytes that segments may take.

    Example:
        >>> replay([(600, "a"), (1 << 21, "b"), (-600, "a"), (600, "c")])
        Replay(requested_nbytes=2097752, allocated_nbytes=2098176, reserved_nbytes=23068672, out_at=None)
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
            piece, given = piece_of.pop(key)
            requested, allocated = requested + nbytes, allocated - given
            device.free(piece)
        peaks = [max(pair) for pair in zip(peaks, (requested, allocated, device.reserved), strict=True)]
    return AllocatorReplay(*peaks)
