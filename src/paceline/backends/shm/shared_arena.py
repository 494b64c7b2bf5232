"""Memory shared by the ranks of a host: an allocator of tensors that are reduced in place.

A segment is anonymous memory behind a file descriptor (memfd): it has no name that could leak, /dev/shm's limit does
not apply to it, and it is freed with the last process that holds it, however that process ends. Without memfd, an
unlinked temporary file takes its place. The arena of a process allocates tensors in its own segments; a process that
received a segment's descriptor maps the same memory.

    segment 0   | tensor | free | tensor | free …        one free list per segment
    segment 1   | tensor …                               half as large as all before it together, so they stay few

A forked child shares this memory with its parent and leaves it to it: the child allocates from its own segments, and
frees none of the parent's.
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

__all__ = ["Arena", "FreeList", "Segment", "arena", "received_segments"]

_HUGE_PAGE_NBYTES = 2 << 20
"""Segments are multiples of a huge page."""

_SMALLEST_SEGMENT_NBYTES = 8 << 20
_ALIGN = 64  # a cache line: two ranks never write to the same one

_KEPT_NBYTES = 64 << 20
"""Free memory that stays allocated for the next tensor; the rest is returned to the system."""

_MADV_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
_MADV_REMOVE: int | None = getattr(mmap, "MADV_REMOVE", None)


def _anonymous_file(nbytes: int) -> int:
    """Return the descriptor of `nbytes` of unnamed memory.

    Raises:
        OSError: no memory or no descriptor is left.
    """
    if nbytes > os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE:
        # Else the system notices at the first write only.
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
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
    """Shared memory mapped into this process.

    Attributes:
        fd: descriptor by which other processes map it; −1: created by another process.
        nbytes: its size.
        map: the mapping.
        address: of the mapping in this process.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd, self.nbytes = fd, nbytes
        self.map = mmap.mmap(fd, nbytes)
        if _MADV_HUGEPAGE is not None and nbytes >= _HUGE_PAGE_NBYTES:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self.map.madvise(_MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    @classmethod
    def create(cls, nbytes: int) -> Segment:
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
            remedy = ": raise the limit (ulimit -n)" if error.errno == errno.EMFILE else ""
            raise OSError(
                error.errno, f"no {format_bytes(nbytes)} of shared memory: {error.strerror}{remedy}"
            ) from error
        weakref.finalize(segment, os.close, fd)
        return segment

    @classmethod
    def from_fd(cls, fd: int) -> Segment:
        """Return the memory behind a descriptor received from another process; closes the descriptor.

        Raises:
            OSError: no memory or no file descriptor is left to map it.
        """
        try:
            segment = cls(fd, os.fstat(fd).st_size)  # the mapping holds its own descriptor
        finally:
            os.close(fd)
        segment.fd = -1
        received_segments.add(segment)
        return segment

    def bytes_at(self, offset: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
        """Return the memory from `offset` on, as an object that keeps the mapping alive."""
        return (ctypes.c_char * nbytes).from_buffer(self.map, offset)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the elements from byte `offset` on, 1-D, without a copy."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.map, dtype=dtype, count=numel, offset=offset)

    def release_pages(self, offset: int, nbytes: int) -> None:
        """Return the whole pages of a span to the system; the mapping stays."""
        first = _round_up(offset, mmap.PAGESIZE)
        last = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and _MADV_REMOVE is not None:
            self.map.madvise(_MADV_REMOVE, first, last - first)


class Arena:
    """Tensors in this process's own segments. Thread-safe."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all segments: a forked child leaves them to its parent."""
        self.segments: list[Segment] = []
        self._free_lists: list[FreeList] = []
        self._starts: list[tuple[int, int]] = []  # (address, segment), ascending
        self._lock = threading.Lock()
        # Freed memory is queued: a tensor may be freed at any moment, also while the lock is held.
        self._freed: deque[tuple[int, int, int]] = deque()

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised 1-D tensor; its memory is freed with its storage.

        Raises:
            OSError: the system has no memory or no file descriptor left.
        """
        nbytes = max(_ALIGN, _round_up(numel * dtype.itemsize, _ALIGN))
        with self._lock:
            self._reclaim()
            segment, offset = self._allocate_span(nbytes)
            memory = self.segments[segment].bytes_at(offset, nbytes)
        weakref.finalize(memory, self._free, self._freed, segment, offset, nbytes).atexit = False
        return torch.frombuffer(memory, dtype=dtype, count=max(numel, 1))[:numel]

    def locate(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Return (segment, byte offset) of `nbytes` bytes of memory from `address` on; None: they lie elsewhere."""
        with self._lock:
            at = bisect_right(self._starts, (address, len(self.segments))) - 1
            if at < 0:
                return None
            start, segment = self._starts[at]
            end = start + self.segments[segment].nbytes
        return (segment, address - start) if address + nbytes <= end else None

    def release_free_pages(self) -> None:
        """Return the pages of free memory to the system."""
        with self._lock:
            self._reclaim()
            for segment, free_list in zip(self.segments, self._free_lists, strict=True):
                for offset, length, dirty in list(free_list.spans):
                    if dirty:
                        segment.release_pages(offset, length)
                        free_list.mark_clean(offset, length)

    def retire(self, segment: int, offset: int) -> None:
        """Never reuse the memory of the tensor at `offset`: another process may write to it at any time."""
        with self._lock:
            self._free_lists[segment].retire(offset)

    def _allocate_span(self, nbytes: int) -> tuple[int, int]:
        for segment, free_list in enumerate(self._free_lists):
            offset = free_list.allocate(nbytes)
            if offset is not None:
                return segment, offset
        needed = _round_up(max(nbytes, _SMALLEST_SEGMENT_NBYTES), _HUGE_PAGE_NBYTES)
        half = _round_up(sum(segment.nbytes for segment in self.segments) // 2, _HUGE_PAGE_NBYTES)
        try:
            created = Segment.create(max(needed, half))
        except OSError:
            created = Segment.create(needed)
        free_list = FreeList(created.nbytes)
        self.segments.append(created)
        self._free_lists.append(free_list)
        insort(self._starts, (created.address, len(self.segments) - 1))
        offset = free_list.allocate(nbytes)
        assert offset is not None, "a new segment fits the span that it was created for"
        return len(self.segments) - 1, offset

    def _free(self, freed: deque[tuple[int, int, int]], segment: int, offset: int, nbytes: int) -> None:
        freed.append((segment, offset, nbytes))
        if self._lock.acquire(blocking=False):
            try:
                self._reclaim()
            finally:
                self._lock.release()

    def _reclaim(self) -> None:
        while self._freed:
            segment, offset, nbytes = self._freed.popleft()
            free_list = self._free_lists[segment]
            span = free_list.free(offset, nbytes)
            if span is None:
                self.segments[segment].release_pages(offset, nbytes)
            elif sum(each.dirty for each in self._free_lists) > _KEPT_NBYTES:
                self.segments[segment].release_pages(*span)
                free_list.mark_clean(*span)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


received_segments: weakref.WeakSet[Segment] = weakref.WeakSet()
"""Memory of other processes that is mapped here."""

arena = Arena()
"""The arena of this process, shared by all its groups."""

os.register_at_fork(after_in_child=arena.reset)


class FreeList:
    """Best-fit free list of `nbytes` bytes, by offsets alone.

        | used | free          | used | free                   |
               | dirty | clean |      | dirty |      clean     |

    The first part of every free span may hold pages of the system, the rest holds none. Allocation takes the
    beginning of a span, so memory that was used before is reused first.

    Attributes:
        spans: (offset, length, dirty bytes at its beginning) of the free spans, in order, no two of them adjacent.
        dirty: bytes of free spans that may hold pages, in total.
    """

    def __init__(self, nbytes: int) -> None:
        self.spans: list[tuple[int, int, int]] = [(0, nbytes, 0)]
        self.dirty = 0
        self._retired: set[int] = set()

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of `nbytes` at the beginning of the smallest span that fits; None: none does."""
        fitting = [(length, offset, dirty) for offset, length, dirty in self.spans if length >= nbytes]
        if not fitting:
            return None
        length, offset, dirty = min(fitting)
        self.spans.remove((offset, length, dirty))
        self.dirty -= min(dirty, nbytes)
        if length > nbytes:
            insort(self.spans, (offset + nbytes, length - nbytes, max(0, dirty - nbytes)))
        return offset

    def free(self, offset: int, nbytes: int) -> tuple[int, int] | None:
        """Free a span, merge it with adjacent ones, and return offset and length of the whole; None: retired."""
        if any(offset <= retired < offset + nbytes for retired in self._retired):
            return None
        dirty = nbytes
        self.dirty += dirty
        at = bisect_right(self.spans, (offset, 0, 0))
        if at < len(self.spans) and self.spans[at][0] == offset + nbytes:
            _, length, dirty_after = self.spans.pop(at)
            dirty, nbytes = nbytes + dirty_after, nbytes + length
        if at > 0 and sum(self.spans[at - 1][:2]) == offset:
            before, length, dirty_before = self.spans.pop(at - 1)
            self.dirty += length - dirty_before
            offset, nbytes, dirty = before, length + nbytes, length + dirty
        insort(self.spans, (offset, nbytes, dirty))
        return offset, nbytes

    def mark_clean(self, offset: int, nbytes: int) -> None:
        """Record that a free span holds no pages any more."""
        at = bisect_right(self.spans, (offset, 0, 0))
        self.dirty -= self.spans[at][2]
        self.spans[at] = (offset, nbytes, 0)

    def retire(self, offset: int) -> None:
        """Never free the span that holds the byte at `offset`."""
        self._retired.add(offset)
