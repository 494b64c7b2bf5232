"""Whether what a step takes fits into a device, with how much to spare, and what would make it fit.

The margin: over 454 measured trainings an estimate below 80 % of a GPU's memory never ran out of it (Fujii et al.,
arXiv 2411.06465). So up to that share it fits, above it is tight: what no estimate sees (fragmentation, kernels that
another size of input chooses) may take the rest.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from paceline._core.format import format_bytes

__all__ = [
    "SAFE_SHARE",
    "FitLevel",
    "MemoryAlternative",
    "MemoryVerdict",
    "describe_alternatives",
    "judge_fit",
]

SAFE_SHARE = 0.8


class FitLevel(enum.Enum):
    """Whether it fits."""

    FITS = "fits"
    TIGHT = "is tight"
    NOT = "does not fit"


@dataclass(frozen=True)
class MemoryVerdict:
    """An answer and the two numbers that it follows from."""

    nbytes: int
    capacity_nbytes: int
    answer: FitLevel

    @property
    def share(self) -> float:
        """Of the capacity that is needed."""
        return self.nbytes / self.capacity_nbytes

    @property
    def poor(self) -> bool:
        """Whether another way had better be found."""
        return self.answer is not FitLevel.FITS

    @property
    def sentence(self) -> str:
        """The answer in words, with the margin."""
        needed, there = format_bytes(self.nbytes), format_bytes(self.capacity_nbytes)
        shares = f"{100 * self.share:.0f} %; up to {100 * SAFE_SHARE:.0f} % is safe"
        return f"{self.answer.value}: {needed} of {there} ({shares})"


@dataclass(frozen=True)
class MemoryAlternative:
    """Another way to train the same model, and what it takes.

    Attributes:
        change: what is different, in words.
        verdict: of that way.
    """

    change: str
    verdict: MemoryVerdict


def judge_fit(nbytes: int, capacity_nbytes: int) -> MemoryVerdict:
    """Return whether `nbytes` fit into a device of `capacity_nbytes`.

    Example:
        >>> judge(70, 100).answer, judge(90, 100).answer, judge(101, 100).answer
        (<Answer.FITS: 'fits'>, <Answer.TIGHT: 'is tight'>, <Answer.NOT: 'does not fit'>)
    """
    if nbytes <= SAFE_SHARE * capacity_nbytes:
        return MemoryVerdict(nbytes, capacity_nbytes, FitLevel.FITS)
    return MemoryVerdict(
        nbytes, capacity_nbytes, FitLevel.TIGHT if nbytes <= capacity_nbytes else FitLevel.NOT
    )


def describe_alternatives(alternatives: Sequence[MemoryAlternative]) -> str:
    """Return in words which of the alternatives fit; they were all computed.

    Example:
        >>> advice([Alternative("half the batch", judge(70, 100))])
        'It fits with half the batch (70 B).'
    """
    good = [each for each in alternatives if each.verdict.answer is FitLevel.FITS]
    if not good:
        tried = "; ".join(f"{each.change} ({format_bytes(each.verdict.nbytes)})" for each in alternatives)
        return f"It fits with none of: {tried}." if tried else ""
    told = "; ".join(f"{each.change} ({format_bytes(each.verdict.nbytes)})" for each in good)
    return f"It fits with {told}."
