"""Memory that the ranks of a host share: tensors in it are reduced where they lie.

A segment is anonymous memory behind a file descriptor (memfd): it has no name that could leak, no limit of
/dev/shm applies to it, and it is gone with the last process that holds it, however that process ends. Where
there is no memfd, an unlinked temporary file takes its place. The arena of a process cuts tensors out of its
own segments; whoever got a segment's descriptor maps the same memory.

    segment 0   | tensor | free | tensor | free ...        a free list per segment, neighbours joined
    segment 1   | tensor ...
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import threading
import weakref
from bisect import bisect_right, insort

import torch

__all__ = ["Arena", "Segment", "arena"]

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
        nbytes: its size. address: where it is mapped here. fd: what other processes map it by.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd, self.nbytes = fd, nbytes
        self.map = mmap.mmap(fd, nbytes)
        if _MADV_HUGEPAGE is not None and nbytes >= _PAGE_NBYTES:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self.map.madvise(_MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        weakref.finalize(self, os.close, fd)

    @classmethod
    def new(cls, nbytes: int) -> Segment:
        """Return fresh memory, all zero; it takes no pages until it is written."""
        return cls(_anonymous_file(nbytes), nbytes)

    @classmethod
    def of(cls, fd: int) -> Segment:
        """Return the memory behind a descriptor that another process handed over."""
        return cls(fd, os.fstat(fd).st_size)

    def bytes_at(self, offset: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
        """Return the memory from `offset` on, as an object that keeps the mapping alive."""
        return (ctypes.c_char * nbytes).from_buffer(self.map, offset)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the elements from byte `offset` on, 1-D, without a copy."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.map, dtype=dtype, count=numel, offset=offset)


class _Heap:
    """Free stretches (offset, nbytes) of one segment, in order, no two of them adjacent."""

    def __init__(self, nbytes: int) -> None:
        self.free: list[tuple[int, int]] = [(0, nbytes)]

    def take(self, nbytes: int) -> int | None:
        """Return the offset of `nbytes` from the smallest stretch that has them; None: there is none."""
        fitting = [(length, offset) for offset, length in self.free if length >= nbytes]
        if not fitting:
            return None
        length, offset = min(fitting)
        self.free.remove((offset, length))
        if length > nbytes:
            insort(self.free, (offset + nbytes, length - nbytes))
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Take back a stretch and join it with its free neighbours."""
        at = bisect_right(self.free, (offset, 0))
        if at < len(self.free) and self.free[at][0] == offset + nbytes:
            nbytes += self.free.pop(at)[1]
        if at > 0 and sum(self.free[at - 1]) == offset:
            before, length = self.free.pop(at - 1)
            offset, nbytes = before, length + nbytes
        insort(self.free, (offset, nbytes))


class Arena:
    """This process's own segments and the tensors in them; safe to use from several threads."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self._heaps: list[_Heap] = []
        self._starts: list[tuple[int, int]] = []  # (address, segment), ascending
        self._lock = threading.RLock()  # re-entrant: the collector may free a tensor anywhere
        self._kept = 0

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised 1-D tensor; its memory comes back when its storage is freed.

        Raises:
            OSError: the system has no memory or no file descriptor left.
        """
        nbytes = max(_ALIGN, _round_up(numel * dtype.itemsize, _ALIGN))
        with self._lock:
            segment, offset = self._place(nbytes)
            memory = self.segments[segment].bytes_at(offset, nbytes)
        weakref.finalize(memory, self._release, segment, offset, nbytes).atexit = False
        flat = torch.frombuffer(memory, dtype=dtype, count=max(numel, 1))
        return flat[:numel]

    def locate(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return (segment, byte offset) of a contiguous tensor, None if it lies elsewhere."""
        address = tensor.data_ptr()
        at = bisect_right(self._starts, (address, len(self.segments))) - 1
        if at < 0:
            return None
        start, segment = self._starts[at]
        inside = address + tensor.numel() * tensor.element_size() <= start + self.segments[segment].nbytes
        return (segment, address - start) if inside else None

    def _place(self, nbytes: int) -> tuple[int, int]:
        for segment, heap in enumerate(self._heaps):
            offset = heap.take(nbytes)
            if offset is not None:
                self._kept = max(0, self._kept - nbytes)
                return segment, offset
        size = _round_up(max(nbytes, _LEAST_SEGMENT_NBYTES), _PAGE_NBYTES)
        made, heap = Segment.new(size), _Heap(size)
        self.segments.append(made)
        self._heaps.append(heap)
        insort(self._starts, (made.address, len(self.segments) - 1))
        offset = heap.take(nbytes)
        assert offset is not None, "a fresh segment holds what it was made for"
        return len(self.segments) - 1, offset

    def _release(self, segment: int, offset: int, nbytes: int) -> None:
        with self._lock:
            self._kept += nbytes
            if self._kept > _KEPT_NBYTES:
                self._give_back(segment, offset, nbytes)
                self._kept -= nbytes
            self._heaps[segment].give(offset, nbytes)

    def _give_back(self, segment: int, offset: int, nbytes: int) -> None:
        """Return the whole pages of a stretch to the system; the mapping stays."""
        first = _round_up(offset, mmap.PAGESIZE)
        last = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and _MADV_REMOVE is not None:
            self.segments[segment].map.madvise(_MADV_REMOVE, first, last - first)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


arena = Arena()
"""The arena of this process: all its groups share it."""
