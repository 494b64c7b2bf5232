"""Memory that the ranks of a host share: tensors in it are reduced where they lie.

A segment is anonymous memory behind a file descriptor (memfd): it has no name that could leak, no limit of
/dev/shm applies to it, and it is gone with the last process that holds it, however that process ends. Where
there is no memfd, an unlinked temporary file takes its place. The arena of a process cuts tensors out of its
own segments; whoever got a segment's descriptor maps the same memory.

    segment 0   | tensor | free | tensor | free ...        a heap per segment (heap.py)
    segment 1   | tensor ...                               each half as large as all before it: so they stay few

A child that is forked shares this memory with its parent and leaves it to it: what the child allocates comes
from segments of its own, and what it drops is not freed.

Which parts of a piece of memory are free: first fit kept in order, by numbers alone.

    | taken | free        | taken | free                    |
            |dirty| clean |       |dirty|      clean        |

Of every free stretch the first part may hold pages of the system, the rest holds none. Memory is taken from
the front, so what was used before is used again first.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import tempfile
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque

import torch

from paceline._core.format import format_bytes

__all__ = ["Arena", "FreeList", "Segment", "arena"]

_PAGE_NBYTES = 2 << 20
"""Segments are multiples of a huge page."""


_LEAST_SEGMENT_NBYTES = 8 << 20


_ALIGN = 64  # a cache line: two ranks never write into the same one


_KEPT_NBYTES = 64 << 20
"""Free memory that is kept for the next tensor; what goes beyond is given back to the system."""


_MADV_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


_MADV_REMOVE: int | None = getattr(mmap, "MADV_REMOVE", None)


def _anonymous_file(nbytes: int) -> int:
    """Return the descriptor of `nbytes` of memory without a name.

    Raises:
        OSError: there is no memory left, or no descriptor.
    """
    if nbytes > os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))  # the system finds out at the first write only
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("paceline", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


class Segment:
    """A piece of shared memory, mapped into this process.

    Attributes:
        nbytes: its size. address: where it is mapped here. fd: what other processes map it by; −1: not ours.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd, self.nbytes = fd, nbytes
        self.map = mmap.mmap(fd, nbytes)
        if _MADV_HUGEPAGE is not None and nbytes >= _PAGE_NBYTES:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self.map.madvise(_MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    @classmethod
    def new(cls, nbytes: int) -> Segment:
        """Return fresh memory, all zero; it takes no pages until it is written.

        Raises:
            OSError: the system has no memory or no file descriptor left.
        """
        fd = -1
        try:
            fd = _anonymous_file(nbytes)
            segment = cls(fd, nbytes)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            remedy = {errno.EMFILE: ": raise the limit (ulimit -n)"}.get(error.errno or 0, "")
            raise OSError(
                error.errno, f"no {format_bytes(nbytes)} of shared memory: {error.strerror}{remedy}"
            ) from error
        weakref.finalize(segment, os.close, fd)
        return segment

    @classmethod
    def of(cls, fd: int) -> Segment:
        """Return the memory behind a descriptor that another process handed over; closes the descriptor.

        Raises:
            OSError: no memory or no file descriptor is left to map it.
        """
        try:
            segment = cls(fd, os.fstat(fd).st_size)  # the mapping holds a descriptor of its own
        finally:
            os.close(fd)
        segment.fd = -1
        return segment

    def bytes_at(self, offset: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
        """Return the memory from `offset` on, as an object that keeps the mapping alive."""
        return (ctypes.c_char * nbytes).from_buffer(self.map, offset)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the elements from byte `offset` on, 1-D, without a copy."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.map, dtype=dtype, count=numel, offset=offset)

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return the whole pages of a stretch to the system; the mapping stays."""
        first = _round_up(offset, mmap.PAGESIZE)
        last = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and _MADV_REMOVE is not None:
            self.map.madvise(_MADV_REMOVE, first, last - first)


class Arena:
    """This process's own segments and the tensors in them; safe to use from several threads."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.segments: list[Segment] = []
        self._heaps: list[FreeList] = []
        self._starts: list[tuple[int, int]] = []  # (address, segment), ascending
        self._lock = threading.Lock()
        # What comes back waits here: a tensor may be freed at any moment, also while the lock is held.
        self._returned: deque[tuple[int, int, int]] = deque()

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised 1-D tensor; its memory comes back when its storage is freed.

        Raises:
            OSError: the system has no memory or no file descriptor left.
        """
        nbytes = max(_ALIGN, _round_up(numel * dtype.itemsize, _ALIGN))
        with self._lock:
            self._take_back()
            segment, offset = self._place(nbytes)
            memory = self.segments[segment].bytes_at(offset, nbytes)
        weakref.finalize(memory, self._release, self._returned, segment, offset, nbytes).atexit = False
        flat = torch.frombuffer(memory, dtype=dtype, count=max(numel, 1))
        return flat[:numel]

    def locate(self, tensor: torch.Tensor, nbytes: int | None = None) -> tuple[int, int] | None:
        """Return (segment, byte offset) of a contiguous tensor, None if it lies elsewhere.

        Args:
            tensor: where to begin. nbytes: how much has to lie there, if not just the tensor.
        """
        address = tensor.data_ptr()
        with self._lock:
            at = bisect_right(self._starts, (address, len(self.segments))) - 1
            if at < 0:
                return None
            start, segment = self._starts[at]
            end = start + self.segments[segment].nbytes
        needed = tensor.numel() * tensor.element_size() if nbytes is None else nbytes
        return (segment, address - start) if address + needed <= end else None

    def abandon(self, segment: int, offset: int) -> None:
        """Never again give out the tensor that lies there: another process may write into it at any time."""
        with self._lock:
            self._heaps[segment].abandon(offset)

    def forsake(self) -> None:
        """Leave all memory to the parent: this is a child that was forked."""
        self._begin()

    def _place(self, nbytes: int) -> tuple[int, int]:
        for segment, heap in enumerate(self._heaps):
            offset = heap.take(nbytes)
            if offset is not None:
                return segment, offset
        half = sum(segment.nbytes for segment in self.segments) // 2
        made = self._make_segment(nbytes, half)
        heap = FreeList(made.nbytes)
        self.segments.append(made)
        self._heaps.append(heap)
        insort(self._starts, (made.address, len(self.segments) - 1))
        offset = heap.take(nbytes)
        assert offset is not None, "a fresh segment holds what it was made for"
        return len(self.segments) - 1, offset

    @staticmethod
    def _make_segment(nbytes: int, wished: int) -> Segment:
        needed = _round_up(max(nbytes, _LEAST_SEGMENT_NBYTES), _PAGE_NBYTES)
        with contextlib.suppress(OSError):
            return Segment.new(max(needed, _round_up(wished, _PAGE_NBYTES)))
        return Segment.new(needed)

    def _release(self, returned: deque[tuple[int, int, int]], segment: int, offset: int, nbytes: int) -> None:
        returned.append((segment, offset, nbytes))
        if self._lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._lock.release()

    def _take_back(self) -> None:
        while self._returned:
            segment, offset, nbytes = self._returned.popleft()
            heap = self._heaps[segment]
            free = heap.give(offset, nbytes)
            if free is None:
                self.segments[segment].give_back(offset, nbytes)
            elif sum(each.dirty for each in self._heaps) > _KEPT_NBYTES:
                self.segments[segment].give_back(*free)
                heap.cleaned(*free)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


arena = Arena()
"""The arena of this process: all its groups share it."""


os.register_at_fork(after_in_child=arena.forsake)


Stretch = tuple[int, int, int]
"""Offset and length of a free stretch, and how much of its front may hold pages."""


class FreeList:
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
