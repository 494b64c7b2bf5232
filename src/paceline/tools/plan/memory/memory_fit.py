"""Verdict on whether a step fits into a device, and alternatives that do.

The margin: in 454 measured trainings none with an estimate below 80 % of a GPU's memory ran out of it (Fujii et al.,
arXiv 2411.06465). So up to that share it fits; above, it is tight: effects that no estimate covers (fragmentation,
kernels chosen for another input size) may need the rest.
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
    """Levels of fit."""

    FITS = "fits"
    TIGHT = "is tight"
    NOT = "does not fit"


@dataclass(frozen=True)
class MemoryVerdict:
    """Level of fit, and the two numbers that it follows from."""

    nbytes: int
    capacity_nbytes: int
    answer: FitLevel

    @property
    def share(self) -> float:
        """Needed share of the capacity."""
        return self.nbytes / self.capacity_nbytes

    @property
    def poor(self) -> bool:
        """Whether an alternative should be found."""
        return self.answer is not FitLevel.FITS

    @property
    def sentence(self) -> str:
        """The verdict as text, with the margin."""
        needed, there = format_bytes(self.nbytes), format_bytes(self.capacity_nbytes)
        shares = f"{100 * self.share:.0f} %; up to {100 * SAFE_SHARE:.0f} % is safe"
        return f"{self.answer.value}: {needed} of {there} ({shares})"


@dataclass(frozen=True)
class MemoryAlternative:
    """A change of the training setting, and its verdict."""

    change: str
    verdict: MemoryVerdict


def judge_fit(nbytes: int, capacity_nbytes: int) -> MemoryVerdict:
    """Return whether `nbytes` fit into a device of `capacity_nbytes`.

    Example:
        >>> [judge_fit(nbytes, 100).answer.value for nbytes in (70, 90, 101)]
        ['fits', 'is tight', 'does not fit']
    """
    if nbytes <= SAFE_SHARE * capacity_nbytes:
        return MemoryVerdict(nbytes, capacity_nbytes, FitLevel.FITS)
    return MemoryVerdict(
        nbytes, capacity_nbytes, FitLevel.TIGHT if nbytes <= capacity_nbytes else FitLevel.NOT
    )


def describe_alternatives(alternatives: Sequence[MemoryAlternative]) -> str:
    """Return the alternatives that fit, as a sentence; if none does, those that were tried.

    Example:
        >>> describe_alternatives([MemoryAlternative("half the batch", judge_fit(70, 100))])
        'It fits with half the batch (70 B).'
    """
    good = [each for each in alternatives if each.verdict.answer is FitLevel.FITS]
    parts = "; ".join(f"{each.change} ({format_bytes(each.verdict.nbytes)})" for each in good or alternatives)
    if not parts:
        return ""
    return f"It fits with {parts}." if good else f"It fits with none of: {parts}."
