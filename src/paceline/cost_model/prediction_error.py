"""How far predictions were from what was measured and not fitted (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["CheckedPrediction", "PredictionError"]


@dataclass(frozen=True)
class CheckedPrediction:
    """One measurement that was held out, and what the others predict for it.

    Attributes:
        nbytes, ranks: where.
        seconds: measured.
        predicted: seconds, from a fit that has not seen it.
    """

    nbytes: int
    ranks: int
    seconds: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative error, at least 0."""
        return abs(self.predicted / self.seconds - 1.0)


@dataclass(frozen=True)
class PredictionError:
    """Relative errors of held-out measurements: 0.05 is 5 %.

    Attributes:
        median, mean, p90, maximum: of the errors.
        points: how many there were.
    """

    median: float
    mean: float
    p90: float
    maximum: float
    points: int

    @classmethod
    def of(cls, checked: Iterable[CheckedPrediction], *, least_nbytes: int = 0) -> PredictionError | None:
        """Return the errors of the measurements of `least_nbytes` or more; None if there are none."""
        errors: Sequence[float] = [each.error for each in checked if each.nbytes >= least_nbytes]
        if not errors:
            return None
        return cls(
            float(np.median(errors)),
            float(np.mean(errors)),
            float(np.quantile(errors, 0.9)),
            max(errors),
            len(errors),
        )

    def __str__(self) -> str:
        """Return it as people write it, such as ``2.1 % (at most 9.6 %, 12 points)``."""
        points = f"{self.points} point{'s' * (self.points != 1)}"
        return f"{100 * self.median:.1f} % (at most {100 * self.maximum:.1f} %, {points})"
