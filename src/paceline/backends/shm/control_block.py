"""Shared memory through which the ranks of a group on one host coordinate: progress, notices, failures, buffers.

One segment, mapped by all. Every rank writes to its own slot only; the one word that all write is the count of
arrivals at barriers, which the kernel adds to.

    | arrivals | slot 0 | slot 1 | … | buffers 0 | buffers 1 | … | fifo 0→0 | fifo 0→1 | … |
      failed     notices, progress,    eager messages and          point-to-point messages
                 step, failure         staged copies

A notice announces the next collective of a rank and where its data lie. Notices alternate between two places: a rank
can be at most one collective ahead of a slow one, which still reads the other place.

A rank that gives up waiting at a barrier posts its failure before it raises. A rank that arrives at that barrier later
raises too, even if all ranks have arrived: memory that it would read may be gone.
"""

from __future__ import annotations

import json
import struct
import threading
import time
from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from paceline._core.native import load_native
from paceline.backends.shm import futex
from paceline.backends.shm.shared_arena import Segment

__all__ = ["EAGER_NBYTES", "FIFO_NBYTES", "STAGING_NBYTES", "ControlBlock", "GroupFailure", "OpNotice"]

EAGER_NBYTES = 64 << 10
"""Data up to this size travel with the notice, with one barrier instead of two."""

STAGING_NBYTES = 1 << 20
"""Bytes of a tensor outside the arena that a rank exposes at a time."""

FIFO_NBYTES = 256 << 10
"""Buffer for point-to-point messages from one rank to another."""

_PAGE = 4096
_SLOT_NBYTES = 4096
_ARRIVALS, _FAILED, _SLEEPERS = 0, 64, 128
_NOTICE_NBYTES = 64
_P2P_SIGNAL, _PROGRESS, _CORE, _STEP, _FAILURE = 128, 256, 260, 264, 512
_NOTICE = struct.Struct("=16siq")
_FAILURE_HEAD = struct.Struct("=dI")  # time, number of the barrier
_FAILURE_LENGTH, _FAILURE_TEXT = _FAILURE + 12, _FAILURE + 16
_TEXT_LENGTH = 500
_MASK, _HALF = 0xFFFFFFFF, 0x80000000  # counts wrap around; a < b if b is less than half the range ahead
_BUFFERS_NBYTES = EAGER_NBYTES * 2 + STAGING_NBYTES * 4  # two eager, two to expose, two for results


class OpNotice(NamedTuple):
    """Announcement of a rank's next collective.

    Attributes:
        call: the packed signature.
        segment: segment of its arena that holds the data; −1: they lie elsewhere.
        offset: of the data in that segment.
    """

    call: bytes
    segment: int = -1
    offset: int = 0


@dataclass(frozen=True)
class GroupFailure:
    """Why a group can't continue; posted by the rank that detects it first, and raised by all.

    Attributes:
        rank: rank at fault, in the world.
        host: name of its host.
        text: describes the failure; continues "rank r on host h …".
        step: optimizer step that it was in; −1: unknown.
        exit_code: of its process; None: unknown.
        dead: its process ended or left the group, rather than not answering.
    """

    rank: int
    host: str
    text: str
    _: KW_ONLY
    step: int = -1
    exit_code: int | None = None
    dead: bool = True


class ControlBlock:
    """The shared segment as one rank sees it.

    Args:
        segment: the memory; all zero at first.
        index: this rank among the ranks of the host.
        size: number of ranks of the host.
    """

    def __init__(self, segment: Segment, index: int, size: int) -> None:
        self.segment, self.index, self.size = segment, index, size
        self._view = memoryview(segment.map)
        # Words are read and written whole; struct's pack_into() writes zeros first, which other ranks would see.
        self._words, self._longs = self._view.cast("I"), self._view.cast("q")
        self._arrivals, self._sleepers = segment.address + _ARRIVALS, segment.address + _SLEEPERS
        self._slots = [_PAGE + rank * _SLOT_NBYTES for rank in range(size)]
        self._buffers = _PAGE + size * _SLOT_NBYTES
        self._fifos = self._buffers + size * _BUFFERS_NBYTES
        self._own_slot = self._slots[index]
        self._posting = threading.Lock()
        self._eager: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self.step = -1

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the size of the segment of a group of `size` ranks."""
        total = _PAGE + size * (_SLOT_NBYTES + _BUFFERS_NBYTES) + size * size * (FIFO_NBYTES + _PAGE)
        return -(-total // (2 << 20)) * (2 << 20)

    def compiled(self, spin: float, yielding: float, share: int) -> Any:
        """Return the compiled view of this memory; None: there is none.

        Args:
            spin: seconds that a rank polls at a barrier.
            yielding: seconds that it lets other processes run, in all, before it sleeps.
            share: ranks on a core; where there are more, one of them moves to another core.
        """
        native = load_native()
        if native is None:
            return None
        layout = (
            *(_ARRIVALS, _SLEEPERS, _FAILED, _PAGE, _SLOT_NBYTES, _PROGRESS, _CORE, _NOTICE_NBYTES),
            *(self._buffers, _BUFFERS_NBYTES, EAGER_NBYTES, STAGING_NBYTES),
        )
        return native.Ranks(self.segment.address, self.index, self.size, share, spin, yielding, layout)

    # Barriers.

    def arrive(self) -> bool:
        """Arrive at the next barrier, and return whether all ranks have arrived."""
        self._words[(self._own_slot + _PROGRESS) // 4] = (self._progress + 1) & _MASK
        futex.add(self._arrivals)
        complete = self.all_arrived()
        if complete and self._words[_SLEEPERS // 4]:
            futex.wake(self._arrivals)
        return complete

    @property
    def _progress(self) -> int:
        """Barriers that this rank has arrived at."""
        return self._words[(self._own_slot + _PROGRESS) // 4]

    @property
    def _target(self) -> int:
        """Count of arrivals that completes this rank's current barrier."""
        return self._progress * self.size & _MASK

    def all_arrived(self) -> bool:
        """Return whether all ranks have arrived at this rank's current barrier."""
        return (self._words[_ARRIVALS // 4] - self._target) & _MASK < _HALF

    def sleep(self, seconds: float) -> None:
        """Sleep until all ranks have arrived, a rank posts a failure, or `seconds` have passed."""
        futex.add(self._sleepers)  # before it looks: the last to arrive wakes others only if there are any
        try:
            seen = self._words[_ARRIVALS // 4]
            if (seen - self._target) & _MASK >= _HALF:
                futex.wait(self._arrivals, seen, seconds)
        finally:
            futex.subtract(self._sleepers)

    def missing(self) -> list[int]:
        """Return the ranks that have not arrived at this rank's current barrier."""
        arrived = [self._words[(slot + _PROGRESS) // 4] for slot in self._slots]
        return [rank for rank, count in enumerate(arrived) if (count - self._progress) & _MASK >= _HALF]

    # Notices and steps.

    def post_notice(self, turn: int, notice: OpNotice) -> None:
        """Announce this rank's collective number `turn`."""
        at = self._own_slot + _NOTICE_NBYTES * (turn & 1)
        _NOTICE.pack_into(self._view, at, notice.call, notice.segment, notice.offset)

    def read_notice(self, turn: int, rank: int) -> OpNotice:
        """Return the notice of `rank` for collective number `turn`."""
        return OpNotice(*_NOTICE.unpack_from(self._view, self._slots[rank] + _NOTICE_NBYTES * (turn & 1)))

    @property
    def step(self) -> int:
        """Optimizer step that this rank is in; −1: unknown."""
        return self.step_of(self.index)

    @step.setter
    def step(self, value: int) -> None:
        self._longs[(self._own_slot + _STEP) // 8] = value

    def step_of(self, rank: int) -> int:
        """Return the optimizer step that `rank` is in; −1: unknown."""
        return self._longs[(self._slots[rank] + _STEP) // 8]

    # Failures.

    @property
    def failed(self) -> bool:
        """True once a rank has posted a failure."""
        return self._words[_FAILED // 4] != 0

    def post_failure(self, failure: GroupFailure) -> None:
        """Publish why the group can't continue; a rank's first failure stands."""
        shortened = replace(failure, text=failure.text[:_TEXT_LENGTH])
        text = json.dumps(asdict(shortened), ensure_ascii=False).encode(errors="replace")
        with self._posting:
            if self._words[(self._own_slot + _FAILURE_LENGTH) // 4] == 0:
                start = self._own_slot + _FAILURE_TEXT
                self._view[start : start + len(text)] = text
                _FAILURE_HEAD.pack_into(
                    self._view, self._own_slot + _FAILURE, time.monotonic(), self._progress
                )
                futex.fence()
                self._words[(self._own_slot + _FAILURE_LENGTH) // 4] = len(text)  # visible from now on
                futex.fence()
        self._words[_FAILED // 4] = 1
        futex.wake(self._arrivals)

    def first_failure(self) -> GroupFailure | None:
        """Return the failure that was posted first; None: no rank has failed."""
        posted = self._failures()
        return GroupFailure(**json.loads(min(posted)[2])) if posted else None

    def barrier_failed(self) -> bool:
        """Return whether a rank failed at this rank's current barrier or an earlier one."""
        return any((self._progress - barrier) & _MASK < _HALF for _, barrier, _ in self._failures())

    def _failures(self) -> list[tuple[float, int, bytes]]:
        """Return time, number of the barrier and JSON of every rank's failure."""
        found = []
        for slot in self._slots if self.failed else ():
            length = self._words[(slot + _FAILURE_LENGTH) // 4]
            futex.fence()
            if length:
                when, barrier = _FAILURE_HEAD.unpack_from(self._view, slot + _FAILURE)
                start = slot + _FAILURE_TEXT
                found.append((when, barrier, bytes(self._view[start : start + length])))
        return found

    # Buffers.

    def eager_buffer(self, rank: int, turn: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the buffer for eager data of `rank` in collective number `turn`."""
        buffer = self._eager.get((rank, turn & 1, dtype))
        if buffer is None:
            at = self._buffers + rank * _BUFFERS_NBYTES + EAGER_NBYTES * (turn & 1)
            buffer = self.segment.tensor(at, EAGER_NBYTES // dtype.itemsize, dtype)
            self._eager[rank, turn & 1, dtype] = buffer
        return buffer

    def staging_buffer(self, rank: int, part: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the buffer in which `rank` exposes part number `part` of its tensor."""
        at = self._buffers + rank * _BUFFERS_NBYTES + 2 * EAGER_NBYTES + STAGING_NBYTES * (part & 1)
        return self.segment.tensor(at, numel, dtype)

    def result_buffer(self, rank: int, part: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the buffer in which `rank` exposes its result of part number `part`."""
        at = self._buffers + rank * _BUFFERS_NBYTES + 2 * EAGER_NBYTES + STAGING_NBYTES * (2 + (part & 1))
        return self.segment.tensor(at, numel, dtype)

    def fifo(self, source: int, target: int) -> int:
        """Return the offset of the FIFO from `source` to `target`: a page of counters, then the data."""
        return self._fifos + (source * self.size + target) * (FIFO_NBYTES + _PAGE)

    def p2p_signal(self, rank: int) -> int:
        """Return the address of the word that changes when a message of `rank` can move."""
        return self.segment.address + self._slots[rank] + _P2P_SIGNAL

    def p2p_signal_count(self, rank: int) -> int:
        """Return the value of that word."""
        return self._words[(self._slots[rank] + _P2P_SIGNAL) // 4]
