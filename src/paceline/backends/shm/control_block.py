"""The memory through which the ranks of a group on one host agree: who has come how far, and where data lie.

One segment, mapped by all. Every rank writes into its own slot only; the one word that all write is the
count of arrivals, which the kernel adds to.

    | arrivals | slot 0 | slot 1 | … | window 0 | window 1 | … | ring 0→0 | ring 0→1 | … |
      broken     notices, progress,    small messages and        point-to-point messages
                 step, failure         copies under way

A notice tells what a rank is about to do and where its data lie. Notices are written alternately into two
places: a rank can be at most one collective ahead of a slow one, which still reads the other.

A rank that gives a meeting up tells so before it raises. Whoever comes to that meeting later raises too, even
where it finds everybody there: memory that was to be read may have gone.
"""

from __future__ import annotations

import json
import struct
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import torch

from paceline.backends.shm import futex
from paceline.backends.shm.shared_arena import Segment

__all__ = ["RING_NBYTES", "SMALL_NBYTES", "WINDOW_NBYTES", "ControlBlock", "GroupFailure", "OpNotice"]

SMALL_NBYTES = 32 << 10
"""Messages up to this size travel inside the notice's turn, with one meeting instead of two."""

WINDOW_NBYTES = 1 << 20
"""Bytes of a tensor outside the arena that a rank shows at a time."""

RING_NBYTES = 256 << 10
"""Room for point-to-point messages from one rank to another."""

_PAGE = 4096
_SLOT_NBYTES = 4096
_ARRIVALS, _BROKEN = 0, 64
_BELL, _PROGRESS, _STEP, _FAILURE = 128, 256, 264, 512
_NOTICE = struct.Struct("=16siq")
_FAILURE_HEAD = struct.Struct("=dI")  # when, the meeting that was given up
_FAILURE_LENGTH, _FAILURE_TEXT = _FAILURE + 12, _FAILURE + 16
_TEXT_LENGTH = 500
_MASK, _HALF = 0xFFFFFFFF, 0x80000000  # counts run round; one is not before another if less than half ahead
_PANE_NBYTES = SMALL_NBYTES * 2 + WINDOW_NBYTES * 4  # two small ones, two to read, two to write (with slack)


class OpNotice(NamedTuple):
    """What a rank is about to do.

    Attributes:
        call: the packed call, equal on all ranks if they agree.
        segment, offset: where its data lie in its arena; −1: elsewhere.
    """

    call: bytes
    segment: int = -1
    offset: int = 0


@dataclass(frozen=True)
class GroupFailure:
    """Why a group can't go on; told once, by whoever saw it first, and repeated by all.

    Attributes:
        rank: the rank in the world whose fault it is. host: where it ran. step: the optimizer step it was in,
            −1 if nobody told. exit_code: of its process, None if unknown. text: what happened to it.
        dead: whether its process ended (or it left), rather than merely not answering.
    """

    rank: int
    host: str
    step: int
    exit_code: int | None
    text: str
    dead: bool = True


class ControlBlock:
    """The shared segment as rank `index` of `size` sees it.

    Args:
        segment: the memory; all zero at the start. index: this rank among the ranks of the host.
    """

    def __init__(self, segment: Segment, index: int, size: int) -> None:
        self.segment, self.index, self.size = segment, index, size
        self._view = memoryview(segment.map)
        # Read and written whole; struct's pack_into() writes zeros first, which others would see.
        self._words, self._longs = self._view.cast("I"), self._view.cast("q")
        self._arrivals = segment.address + _ARRIVALS
        self._target = 0
        self._progress = 0
        self._slots = [_PAGE + rank * _SLOT_NBYTES for rank in range(size)]
        self._panes = _PAGE + size * _SLOT_NBYTES
        self._rings = self._panes + size * _PANE_NBYTES
        self._mine = self._slots[index]
        self._telling = threading.Lock()
        self._small: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self.step = -1

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the size of the segment of a group of `size` ranks."""
        total = _PAGE + size * (_SLOT_NBYTES + _PANE_NBYTES) + size * size * (RING_NBYTES + _PAGE)
        return -(-total // (2 << 20)) * (2 << 20)

    # Meeting: everybody arrives, then goes on.

    def arrive(self) -> bool:
        """Count this rank in for the next meeting, and return whether everybody is there."""
        self._progress = (self._progress + 1) & _MASK
        self._target = (self._target + self.size) & _MASK
        self._words[(self._mine + _PROGRESS) // 4] = self._progress
        futex.add(self._arrivals)
        complete = self.all_here()
        if complete:
            futex.wake(self._arrivals)
        return complete

    def all_here(self) -> bool:
        """Return whether everybody has arrived at the meeting that this rank arrived at last."""
        return (self._words[_ARRIVALS // 4] - self._target) & _MASK < _HALF

    def sleep(self, seconds: float) -> None:
        """Sleep until everybody has arrived, or for a while."""
        seen = self._words[_ARRIVALS // 4]
        if (seen - self._target) & _MASK >= _HALF:
            futex.wait(self._arrivals, seen, seconds)

    def late(self) -> list[int]:
        """Return who has not arrived at the meeting that this rank arrived at last."""
        return [rank for rank in range(self.size) if self._behind(rank)]

    def _behind(self, rank: int) -> bool:
        there = self._words[(self._slots[rank] + _PROGRESS) // 4]
        return (there - self._progress) & _MASK >= _HALF

    # What ranks tell each other.

    def post(self, turn: int, notice: OpNotice) -> None:
        """Tell what this rank does in collective number `turn`."""
        at = self._mine + 64 * (turn & 1)
        _NOTICE.pack_into(self._view, at, notice.call, notice.segment, notice.offset)

    def read(self, turn: int, rank: int) -> OpNotice:
        """Return what `rank` told for collective number `turn`."""
        return OpNotice(*_NOTICE.unpack_from(self._view, self._slots[rank] + 64 * (turn & 1)))

    @property
    def step(self) -> int:
        """The optimizer step this rank is in, −1 if nobody told."""
        return self.step_of(self.index)

    @step.setter
    def step(self, value: int) -> None:
        self._longs[(self._mine + _STEP) // 8] = value

    def step_of(self, rank: int) -> int:
        """Return the optimizer step that `rank` is in, −1 if nobody told."""
        return self._longs[(self._slots[rank] + _STEP) // 8]

    @property
    def broken(self) -> bool:
        """Whether anybody told of a failure."""
        return self._words[_BROKEN // 4] != 0

    def fail(self, failure: GroupFailure) -> None:
        """Tell everybody why the group can't go on; what a rank told first stands."""
        told = replace(failure, text=failure.text[:_TEXT_LENGTH])
        text = json.dumps(asdict(told), ensure_ascii=False).encode(errors="replace")
        with self._telling:
            if self._words[(self._mine + _FAILURE_LENGTH) // 4] == 0:
                start = self._mine + _FAILURE_TEXT
                self._view[start : start + len(text)] = text
                _FAILURE_HEAD.pack_into(self._view, self._mine + _FAILURE, time.monotonic(), self._progress)
                futex.fence()
                self._words[(self._mine + _FAILURE_LENGTH) // 4] = len(text)  # from now on it is told
                futex.fence()
        self._words[_BROKEN // 4] = 1
        futex.wake(self._arrivals)

    def failure(self) -> GroupFailure | None:
        """Return the first failure that anybody told, None if there is none."""
        told = self._told()
        return GroupFailure(**json.loads(min(told)[2])) if told else None

    def given_up(self) -> bool:
        """Return whether somebody gave up the meeting that this rank arrived at last, or an earlier one."""
        return any((self._progress - meeting) & _MASK < _HALF for _, meeting, _ in self._told())

    def _told(self) -> list[tuple[float, int, bytes]]:
        """Return when which meeting was given up and why, by everybody who told."""
        told = []
        for slot in self._slots if self.broken else ():
            length = self._words[(slot + _FAILURE_LENGTH) // 4]
            futex.fence()
            if length:
                when, meeting = _FAILURE_HEAD.unpack_from(self._view, slot + _FAILURE)
                start = slot + _FAILURE_TEXT
                told.append((when, meeting, bytes(self._view[start : start + length])))
        return told

    # Memory to pass data through.

    def small(self, rank: int, turn: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `rank`'s place for a small message in collective number `turn`."""
        place = self._small.get((rank, turn & 1, dtype))
        if place is None:
            at = self._panes + rank * _PANE_NBYTES + SMALL_NBYTES * (turn & 1)
            place = self.segment.tensor(at, SMALL_NBYTES // dtype.itemsize, dtype)
            self._small[rank, turn & 1, dtype] = place
        return place

    def window(self, rank: int, part: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the window in which `rank` shows part number `part` of its tensor."""
        at = self._panes + rank * _PANE_NBYTES + 2 * SMALL_NBYTES + WINDOW_NBYTES * (part & 1)
        return self.segment.tensor(at, numel, dtype)

    def result(self, rank: int, part: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the window in which `rank` shows what it reduced of part number `part`."""
        at = self._panes + rank * _PANE_NBYTES + 2 * SMALL_NBYTES + WINDOW_NBYTES * (2 + (part & 1))
        return self.segment.tensor(at, numel, dtype)

    def ring(self, source: int, target: int) -> int:
        """Return the offset of the ring of messages from `source` to `target` (one page, then the data)."""
        return self._rings + (source * self.size + target) * (RING_NBYTES + _PAGE)

    def bell(self, rank: int) -> int:
        """Return the address of the word that changes when there is something new for `rank`."""
        return self.segment.address + self._slots[rank] + _BELL

    def bell_count(self, rank: int) -> int:
        """Return what stands in that word."""
        return self._words[(self._slots[rank] + _BELL) // 4]
