"""Which parts of a piece of memory are free: first fit kept in order, by numbers alone.

    | taken | free        | taken | free                    |
            |dirty| clean |       |dirty|      clean        |

Of every free stretch the first part may hold pages of the system, the rest holds none. Memory is taken from
the front, so what was used before is used again first.
"""

from __future__ import annotations

from bisect import bisect_right, insort

__all__ = ["Heap"]

Stretch = tuple[int, int, int]
"""Offset and length of a free stretch, and how much of its front may hold pages."""


class Heap:
    """The free stretches of `nbytes` bytes, in order, no two of them adjacent.

    Attributes:
        free: the stretches. dirty: bytes of them that may hold pages, in all.
    """

    def __init__(self, nbytes: int) -> None:
        self.free: list[Stretch] = [(0, nbytes, 0)]
        self.dirty = 0
        self._abandoned: set[int] = set()

    def take(self, nbytes: int) -> int | None:
        """Return the offset of `nbytes` from the smallest stretch that has them; None: there is none."""
        fitting = [(length, offset, dirty) for offset, length, dirty in self.free if length >= nbytes]
        if not fitting:
            return None
        length, offset, dirty = min(fitting)
        self.free.remove((offset, length, dirty))
        self.dirty -= min(dirty, nbytes)
        if length > nbytes:
            insort(self.free, (offset + nbytes, length - nbytes, max(0, dirty - nbytes)))
        return offset

    def give(self, offset: int, nbytes: int) -> tuple[int, int] | None:
        """Take a stretch back, join it with its free neighbours, and return offset and length of the whole.

        What was abandoned is not taken back: None.
        """
        if any(offset <= lost < offset + nbytes for lost in self._abandoned):
            return None
        dirty = nbytes
        self.dirty += dirty
        at = bisect_right(self.free, (offset, 0, 0))
        if at < len(self.free) and self.free[at][0] == offset + nbytes:
            _, length, behind = self.free.pop(at)
            dirty, nbytes = nbytes + behind, nbytes + length
        if at > 0 and sum(self.free[at - 1][:2]) == offset:
            before, length, ahead = self.free.pop(at - 1)
            self.dirty += length - ahead
            offset, nbytes, dirty = before, length + nbytes, length + dirty
        insort(self.free, (offset, nbytes, dirty))
        return offset, nbytes

    def cleaned(self, offset: int, nbytes: int) -> None:
        """Note that a free stretch holds no pages any more."""
        at = bisect_right(self.free, (offset, 0, 0))
        self.dirty -= self.free[at][2]
        self.free[at] = (offset, nbytes, 0)

    def abandon(self, offset: int) -> None:
        """Never take back the stretch that holds the byte at `offset`."""
        self._abandoned.add(offset)
