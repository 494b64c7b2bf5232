"""What a tracer writes down while a program runs: births, deaths and what each block turned out to be for.

The life of every block of memory during some training steps, and where their sum is largest.

A *tick* is one change: a block is born or dies. Ticks are counted from 0, so a timeline needs no clock, and two
traces of the same program are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["CATEGORIES", "MemoryBlock", "MemoryPeak", "MemoryTimeline", "PhaseMark", "TimelineRecorder"]


@dataclass
class _Life:
    """A block whose end is not known yet."""

    nbytes: int
    born: int
    category: str
    phase: str
    module: str
    operator: str
    died: int | None = None
    claimed: bool = False


class TimelineRecorder:
    """Collects lives of blocks; `timeline` tells them.

    Example:
        >>> recording = Recording()
        >>> key = recording.birth(8, "temporaries")
        >>> recording.death(key)
        >>> recording.timeline().peak().nbytes
        8
    """

    def __init__(self) -> None:
        self._lives: list[_Life] = []
        self._marks: list[PhaseMark] = []
        self._tick = 0
        self._closed = False
        self.step, self.phase = 0, "build"

    def begin(self, step: int, phase: str) -> None:
        """Begin a phase. What forward made and left behind is held for backward: it is an activation."""
        if self.phase == "forward":
            for life in self._lives:
                if life.died is None and life.phase == "forward" and life.category == "temporaries":
                    life.category = "activations"
        self.step, self.phase = step, phase
        self._marks.append(PhaseMark(self._tick, step, phase))

    def allocate(self, nbytes: int, category: str, module: str = "", operator: str = "") -> int:
        """Note a new block; return its number."""
        self._lives.append(_Life(nbytes, self._tick, category, self.phase, module, operator))
        self._tick += 1
        return len(self._lives) - 1

    def close(self) -> None:
        """Record no more deaths: what is alive stays alive."""
        self._closed = True

    def free(self, number: int) -> None:
        """Note that block `number` was freed."""
        if self._closed:
            return
        self._lives[number].died = self._tick
        self._tick += 1

    def claim(self, number: int, category: str) -> None:
        """Say what block `number` is for, over what was supposed when it was born; the first to say so is right."""
        life = self._lives[number]
        if not life.claimed:
            life.category, life.claimed = category, True

    def reuse(self, heir: int, number: int) -> None:
        """Let block `heir` have been block `number` all along: what was computed was written in place.

        The death of `number` and the birth of `heir` are forgotten; whoever frees `heir` ends both.
        """
        self._lives[heir].born = self._lives[number].born
        self._lives[heir].category = self._lives[number].category
        self._lives[number].nbytes = 0

    def nbytes(self, number: int) -> int:
        """Return the bytes of block `number`."""
        return self._lives[number].nbytes

    def alive(self, number: int) -> bool:
        """Tell whether block `number` has not been freed."""
        return self._lives[number].died is None

    def timeline(self) -> MemoryTimeline:
        """Return what was recorded so far; ticks at which nothing is left to happen stay."""
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
"""What a block is for, the most lasting first."""


@dataclass(frozen=True)
class MemoryBlock:
    """One block of memory.

    Attributes:
        nbytes: as it was asked for, before any rounding.
        born: tick at which it was allocated.
        died: tick at which it was freed; None: it is alive at the end.
        category: one of `CATEGORIES`.
        module: path of the module in which it was made, "" outside of all.
        operator: that made it.
    """

    nbytes: int
    born: int
    died: int | None
    category: str
    module: str = ""
    operator: str = ""

    def alive_at(self, tick: int) -> bool:
        """Tell whether the block holds memory right after `tick`."""
        return self.born <= tick and (self.died is None or tick < self.died)


@dataclass(frozen=True)
class PhaseMark:
    """Where a phase of a step begins: ``build``, ``wrap``, ``forward``, ``backward`` or ``optimizer``."""

    tick: int
    step: int
    phase: str


@dataclass(frozen=True)
class MemoryPeak:
    """The most bytes at once, and the tick at which they are reached first."""

    nbytes: int
    tick: int


@dataclass(frozen=True)
class MemoryTimeline:
    """All blocks of a traced program.

    Attributes:
        blocks: in the order of their birth.
        marks: phases in order.
        ticks: number of ticks.

    Example:
        >>> timeline = Timeline([Block(8, 0, 3, "parameters"), Block(4, 1, 2, "temporaries")], [], 4)
        >>> timeline.peak()
        Peak(nbytes=12, tick=1)
    """

    blocks: Sequence[MemoryBlock]
    marks: Sequence[PhaseMark]
    ticks: int

    def changes(self) -> Iterator[tuple[int, MemoryBlock]]:
        """Yield (bytes, block) of every tick in order; bytes are negative where a block dies."""
        found: list[tuple[int, int, MemoryBlock]] = []
        for block in self.blocks:
            found.append((block.born, block.nbytes, block))
            if block.died is not None:
                found.append((block.died, -block.nbytes, block))
        for _, nbytes, block in sorted(found, key=lambda change: change[0]):
            yield nbytes, block

    def held(self, category: str | None = None) -> NDArray[np.int64]:
        """Return the bytes that are held after each tick, of one category or of all."""
        change = np.zeros(self.ticks, dtype=np.int64)
        for block in self.blocks:
            if category is not None and block.category != category:
                continue
            change[block.born] += block.nbytes
            if block.died is not None:
                change[block.died] -= block.nbytes
        return np.cumsum(change)

    def peak(self) -> MemoryPeak:
        """Return the largest sum of blocks that are alive at once."""
        held = self.held()
        if not len(held):
            return MemoryPeak(0, 0)
        tick = int(held.argmax())
        return MemoryPeak(int(held[tick]), tick)

    def alive_at(self, tick: int) -> list[MemoryBlock]:
        """Return the blocks that hold memory right after `tick`."""
        return [block for block in self.blocks if block.alive_at(tick)]

    def mark_at(self, tick: int) -> PhaseMark:
        """Return the phase that `tick` belongs to."""
        before = [mark for mark in self.marks if mark.tick <= tick]
        return before[-1] if before else PhaseMark(0, 0, "build")

    def steps(self) -> MemoryTimeline:
        """Return the timeline without what was gone when the first step began: building and wrapping the model."""
        start = next((mark.tick for mark in self.marks if mark.phase == "forward"), 0)
        lasting = [block for block in self.blocks if block.died is None or block.died > start]
        return MemoryTimeline(lasting, self.marks, self.ticks)
