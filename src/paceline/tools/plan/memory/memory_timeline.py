"""Timeline of memory blocks over training steps: when each is allocated and freed, its purpose, and the peak.

A *tick* is one change: an allocation or a free. Ticks are counted from 0, so a timeline needs no clock, and two traces
of the same program are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["CATEGORIES", "MemoryBlock", "MemoryPeak", "MemoryTimeline", "PhaseMark", "TimelineRecorder"]


@dataclass
class _Life:
    """A block while it is recorded."""

    nbytes: int
    born: int
    category: str
    phase: str
    module: str
    operator: str
    died: int | None = None
    claimed: bool = False


class TimelineRecorder:
    """Records allocations and frees, and returns them as a `MemoryTimeline`.

    Example:
        >>> recorder = TimelineRecorder()
        >>> block = recorder.allocate(8, "temporaries")
        >>> recorder.free(block)
        >>> recorder.timeline().peak().nbytes
        8
    """

    def __init__(self) -> None:
        self._lives: list[_Life] = []
        self._marks: list[PhaseMark] = []
        self._tick = 0
        self._closed = False
        self.step, self.phase = 0, "build"

    def begin(self, step: int, phase: str) -> None:
        """Begin a phase; temporaries that outlive forward become activations, since backward needs them."""
        if self.phase == "forward":
            for life in self._lives:
                if life.died is None and life.phase == "forward" and life.category == "temporaries":
                    life.category = "activations"
        self.step, self.phase = step, phase
        self._marks.append(PhaseMark(self._tick, step, phase))

    def allocate(self, nbytes: int, category: str, module: str = "", operator: str = "") -> int:
        """Record a new block; return its number."""
        self._lives.append(_Life(nbytes, self._tick, category, self.phase, module, operator))
        self._tick += 1
        return len(self._lives) - 1

    def close(self) -> None:
        """Ignore all further frees."""
        self._closed = True

    def free(self, number: int) -> None:
        """Record the free of block `number`."""
        if self._closed:
            return
        self._lives[number].died = self._tick
        self._tick += 1

    def claim(self, number: int, category: str) -> None:
        """Set the category of block `number`, unless an earlier claim did."""
        life = self._lives[number]
        if not life.claimed:
            life.category, life.claimed = category, True

    def reuse(self, result: int, number: int) -> None:
        """Record that block `result` was computed in place, in the memory of block `number`, which it replaces."""
        self._lives[result].born = self._lives[number].born
        self._lives[result].category = self._lives[number].category
        self._lives[number].nbytes = 0

    def nbytes(self, number: int) -> int:
        """Return the bytes of block `number`."""
        return self._lives[number].nbytes

    def alive(self, number: int) -> bool:
        """Return whether block `number` has not been freed."""
        return self._lives[number].died is None

    def timeline(self) -> MemoryTimeline:
        """Return the timeline so far."""
        blocks = [
            MemoryBlock(life.nbytes, life.born, life.died, life.category, life.module, life.operator)
            for life in self._lives
            if life.nbytes
        ]
        return MemoryTimeline(
            sorted(blocks, key=lambda block: block.born), tuple(self._marks), max(self._tick, 1)
        )


CATEGORIES = (
    "parameters",
    "buffers",
    "optimizer state",
    "buckets",
    "gradients",
    "gathered units",
    "communication",
    "inputs",
    "activations",
    "autocast copies",
    "recomputed",
    "temporaries",
    "workspaces",
)
"""Purposes of blocks, the longest-lived first."""


@dataclass(frozen=True)
class MemoryBlock:
    """One block of memory.

    Attributes:
        nbytes: as requested, before rounding.
        born: tick of the allocation.
        died: tick of the free; None: alive at the end.
        category: one of `CATEGORIES`.
        module: path of the module that allocated it; "" outside of modules.
        operator: that allocated it.
    """

    nbytes: int
    born: int
    died: int | None
    category: str
    module: str = ""
    operator: str = ""

    def alive_at(self, tick: int) -> bool:
        """Return whether the block is allocated right after `tick`."""
        return self.born <= tick and (self.died is None or tick < self.died)


@dataclass(frozen=True)
class PhaseMark:
    """Beginning of a phase of a step: ``build``, ``wrap``, ``forward``, ``backward`` or ``optimizer``."""

    tick: int
    step: int
    phase: str


@dataclass(frozen=True)
class MemoryPeak:
    """Most bytes at once, and the first tick at which they are reached."""

    nbytes: int
    tick: int


@dataclass(frozen=True)
class MemoryTimeline:
    """All blocks of a traced program.

    Attributes:
        blocks: in the order of allocation.
        marks: phases in order.
        ticks: number of ticks.

    Example:
        >>> blocks = [MemoryBlock(8, 0, 3, "parameters"), MemoryBlock(4, 1, 2, "temporaries")]
        >>> MemoryTimeline(blocks, [], 4).peak()
        MemoryPeak(nbytes=12, tick=1)
    """

    blocks: Sequence[MemoryBlock]
    marks: Sequence[PhaseMark]
    ticks: int

    def changes(self) -> Iterator[tuple[int, MemoryBlock]]:
        """Yield (bytes, block) of every tick in order; bytes are negative for a free."""
        found: list[tuple[int, int, MemoryBlock]] = []
        for block in self.blocks:
            found.append((block.born, block.nbytes, block))
            if block.died is not None:
                found.append((block.died, -block.nbytes, block))
        for _, nbytes, block in sorted(found, key=lambda change: change[0]):
            yield nbytes, block

    def held(self, category: str | None = None) -> NDArray[np.int64]:
        """Return the allocated bytes after each tick, of one category or of all."""
        change = np.zeros(self.ticks, dtype=np.int64)
        for block in self.blocks:
            if category is not None and block.category != category:
                continue
            change[block.born] += block.nbytes
            if block.died is not None:
                change[block.died] -= block.nbytes
        return np.cumsum(change)

    def peak(self) -> MemoryPeak:
        """Return the peak."""
        held = self.held()
        if not len(held):
            return MemoryPeak(0, 0)
        tick = int(held.argmax())
        return MemoryPeak(int(held[tick]), tick)

    def alive_at(self, tick: int) -> list[MemoryBlock]:
        """Return the blocks that are allocated right after `tick`."""
        return [block for block in self.blocks if block.alive_at(tick)]

    def mark_at(self, tick: int) -> PhaseMark:
        """Return the phase of `tick`."""
        before = [mark for mark in self.marks if mark.tick <= tick]
        return before[-1] if before else PhaseMark(0, 0, "build")

    def steps(self) -> MemoryTimeline:
        """Return the timeline without blocks that were freed before the first step (by building and wrapping)."""
        start = next((mark.tick for mark in self.marks if mark.phase == "forward"), 0)
        lasting = [block for block in self.blocks if block.died is None or block.died > start]
        return MemoryTimeline(lasting, self.marks, self.ticks)
