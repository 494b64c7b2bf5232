"""The life of every block of memory during some training steps, and where their sum is largest.

A *tick* is one change: a block is born or dies. Ticks are counted from 0, so a timeline needs no clock, and two
traces of the same program are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["CATEGORIES", "Block", "Mark", "Peak", "Timeline"]

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
class Block:
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
class Mark:
    """Where a phase of a step begins: ``build``, ``wrap``, ``forward``, ``backward`` or ``optimizer``."""

    tick: int
    step: int
    phase: str


@dataclass(frozen=True)
class Peak:
    """The most bytes at once, and the tick at which they are reached first."""

    nbytes: int
    tick: int


@dataclass(frozen=True)
class Timeline:
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

    blocks: Sequence[Block]
    marks: Sequence[Mark]
    ticks: int

    def changes(self) -> Iterator[tuple[int, Block]]:
        """Yield (bytes, block) of every tick in order; bytes are negative where a block dies."""
        found: list[tuple[int, int, Block]] = []
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

    def peak(self) -> Peak:
        """Return the largest sum of blocks that are alive at once."""
        held = self.held()
        if not len(held):
            return Peak(0, 0)
        tick = int(held.argmax())
        return Peak(int(held[tick]), tick)

    def alive_at(self, tick: int) -> list[Block]:
        """Return the blocks that hold memory right after `tick`."""
        return [block for block in self.blocks if block.alive_at(tick)]

    def mark_at(self, tick: int) -> Mark:
        """Return the phase that `tick` belongs to."""
        before = [mark for mark in self.marks if mark.tick <= tick]
        return before[-1] if before else Mark(0, 0, "build")

    def steps(self) -> Timeline:
        """Return the timeline without what was gone when the first step began: building and wrapping the model."""
        start = next((mark.tick for mark in self.marks if mark.phase == "forward"), 0)
        lasting = [block for block in self.blocks if block.died is None or block.died > start]
        return Timeline(lasting, self.marks, self.ticks)
