"""What a worker tells of an update, beside its numbers (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.star.words import Number, number

__all__ = ["Offer"]


@dataclass(slots=True)
class Offer:
    """An update's facts.

    Attributes:
        base: revision that it began from. samples, steps: that it was learnt from; NaN if that was not told.
        rate: samples a second of its worker. score: of its parameters. before: of what it began from.
    """

    base: Number
    samples: float
    steps: Number
    rate: Number | None = None
    score: Number | None = None
    before: Number | None = None

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> Offer:
        """Return what was told, whatever that is."""
        base, samples, steps = number(meta, "base"), number(meta, "samples"), number(meta, "steps")
        return cls(
            math.nan if base is None else base,
            math.nan if samples is None else samples,
            math.nan if steps is None else steps,
            number(meta, "rate"),
            number(meta, "score"),
            number(meta, "before"),
        )

    def makes_sense(self, revision: int) -> bool:
        """Tell whether it can be, of a centre at this revision."""
        known = 0 <= self.base <= revision
        return known and 0 <= self.samples < math.inf and 1 <= self.steps < math.inf
