"""What a tracer writes down while a program runs: births, deaths and what each block turned out to be for."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.plan.memory.timeline import Block, Mark, Timeline

__all__ = ["Recording"]


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


class Recording:
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
        self._marks: list[Mark] = []
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
        self._marks.append(Mark(self._tick, step, phase))

    def birth(self, nbytes: int, category: str, module: str = "", operator: str = "") -> int:
        """Note a new block; return its number."""
        self._lives.append(_Life(nbytes, self._tick, category, self.phase, module, operator))
        self._tick += 1
        return len(self._lives) - 1

    def close(self) -> None:
        """Record no more deaths: what is alive stays alive."""
        self._closed = True

    def death(self, number: int) -> None:
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

    def take_over(self, heir: int, number: int) -> None:
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

    def timeline(self) -> Timeline:
        """Return what was recorded so far; ticks at which nothing is left to happen stay."""
        blocks = [
            Block(life.nbytes, life.born, life.died, life.category, life.module, life.operator)
            for life in self._lives
            if life.nbytes
        ]
        return Timeline(sorted(blocks, key=lambda block: block.born), tuple(self._marks), max(self._tick, 1))
