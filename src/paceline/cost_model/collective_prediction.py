"""Fitted cost of a collective, its prediction errors, and the limits within which it predicts.

`paceline.cost_model.fit_measurements.fit_points` makes it. Sizes and numbers of ranks beyond those that were measured
are refused unless the caller allows extrapolation; the prediction then says so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np

from paceline._core.format import format_size, plural
from paceline._core.json_codec import Meta, NonNegative
from paceline.cost_model.cost_forms import CostForm, terms_of
from paceline.cost_model.piecewise_fit import FitSegment, piecewise_seconds
from paceline.errors import UsageError

__all__ = ["CheckedPrediction", "CollectiveFit", "PredictionError", "RanksSegments", "TimePrediction"]

RankCount = Annotated[int, Meta(ge=2)]
Segments = Annotated[tuple[FitSegment, ...], Meta(min_length=1)]


@dataclass(frozen=True)
class CheckedPrediction:
    """A held-out measurement, and what the others predict for it.

    Attributes:
        nbytes: size of the message.
        ranks: that took part.
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
    """Distribution of the relative errors of held-out measurements: 0.05 is 5 %."""

    median: NonNegative
    mean: NonNegative
    p90: NonNegative
    maximum: NonNegative
    points: Annotated[int, Meta(ge=1)]

    @classmethod
    def of(cls, checked: Iterable[CheckedPrediction], *, least_nbytes: int = 0) -> PredictionError | None:
        """Return the errors of measurements of at least `least_nbytes`; None if there are none."""
        errors = [each.error for each in checked if each.nbytes >= least_nbytes]
        if not errors:
            return None
        return cls(
            median=float(np.median(errors)),
            mean=float(np.mean(errors)),
            p90=float(np.quantile(errors, 0.9)),
            maximum=float(max(errors)),
            points=len(errors),
        )

    def __str__(self) -> str:
        """Return a summary such as ``2.1 % (at most 9.6 %, 12 points)``."""
        return (
            f"{100 * self.median:.1f} % (at most {100 * self.maximum:.1f} %, {plural(self.points, 'point')})"
        )


@dataclass(frozen=True)
class TimePrediction:
    """Predicted time of a collective.

    Attributes:
        seconds: the prediction.
        low: lower bound of 90 % of the held-out measurements; equals `seconds` if none was held out.
        high: upper bound of the same.
        error: the median relative error of those measurements; None if none was held out.
        extrapolated: what is beyond the measurements; None if nothing is.
    """

    seconds: float
    low: float
    high: float
    error: float | None
    extrapolated: str | None = None


@dataclass(frozen=True)
class RanksSegments:
    """Segments that were fitted to one number of ranks alone."""

    ranks: RankCount
    segments: Segments

    def __post_init__(self) -> None:
        _check_ascending(self.segments)


class CollectiveFit(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"identified": "algorithm_told", "error_of_form": "error_of_algorithm"},
):
    """T = α·messages + β·sent·n, in one or more ranges of n.

    Attributes:
        op: such as ``"all-reduce"``.
        algorithm: name of the form that the times have, such as ``"ring, shared"``.
        identified: whether the times distinguish the algorithm from others; else it is the default one.
        ranks: numbers of ranks that were measured, in ascending order.
        points: number of measurements.
        segments: α, β and range of sizes, in ascending order.
        segments_of_ranks: segments per number of ranks that was measured; empty where the common ones predict better.
        sizes_error: every second size predicted from the others.
        ranks_error: each number of ranks predicted from the others; None if one number was measured.
        error_of_form: typical relative error of each form that was tried, in predicting a number of ranks from the
            others; empty if one number was measured.
    """

    op: str
    algorithm: str
    identified: bool
    ranks: Annotated[tuple[RankCount, ...], Meta(min_length=1)]
    points: Annotated[int, Meta(ge=1)]
    segments: Segments
    segments_of_ranks: tuple[RanksSegments, ...]
    sizes_error: PredictionError | None
    ranks_error: PredictionError | None
    error_of_form: dict[str, NonNegative]

    def __post_init__(self) -> None:
        _check_ascending(self.segments)

    @property
    def form(self) -> CostForm:
        """The algorithm's form."""
        return CostForm.parse(self.algorithm)

    @property
    def low(self) -> float:
        """The smallest measured size in bytes."""
        return self.segments[0].low

    @property
    def high(self) -> float:
        """The largest measured size in bytes."""
        return self.segments[-1].high

    def seconds(self, nbytes: float, ranks: int) -> float:
        """Return the value of the fit, within or beyond the measurements."""
        terms = terms_of(self.op, self.form, ranks)
        return piecewise_seconds(self.segments_for(ranks), nbytes, terms.messages, terms.sent)

    def segments_for(self, ranks: int) -> tuple[FitSegment, ...]:
        """Return the segments of a number of ranks, or the common ones."""
        return next((each.segments for each in self.segments_of_ranks if each.ranks == ranks), self.segments)

    def predict(self, nbytes: float, ranks: int, *, extrapolate: bool = False) -> TimePrediction:
        """Predict the collective's time, with its error.

        Args:
            nbytes: size n in bytes, above 0, as nccl-tests defines it for the operation.
            ranks: at least 1; one rank alone takes no time.
            extrapolate: predict beyond the measurements too; the result says so.

        Raises:
            UsageError: the size or number of ranks is invalid, or beyond the measurements without `extrapolate`.
        """
        if not nbytes > 0 or ranks < 1:
            raise UsageError(
                f"{self.op} of {nbytes} bytes by {ranks} ranks", remedy="give 1 byte and 1 rank, or more"
            )
        if ranks == 1:
            return TimePrediction(0.0, 0.0, 0.0, None)
        beyond = self._beyond(nbytes, ranks)
        if beyond and not extrapolate:
            raise UsageError(
                f"{self.op} of {format_size(nbytes)} by {ranks} ranks is beyond what was measured: {beyond}",
                remedy="measure it with paceline bench collectives, or allow extrapolation",
            )
        seconds, error = self.seconds(nbytes, ranks), self.error_at(ranks)
        spread = 1.0 + (error.p90 if error else 0.0)
        return TimePrediction(
            seconds, seconds / spread, seconds * spread, error.median if error else None, beyond
        )

    def half_bandwidth_size(self, ranks: int) -> float:
        """Return n½: the size in bytes that reaches half the bandwidth of the largest messages."""
        return self.size_at_efficiency(0.5, ranks)

    def size_at_efficiency(self, efficiency: float, ranks: int) -> float:
        """Return the least size in bytes that reaches a share of the bandwidth of the largest messages.

        That bandwidth is 1 / (β·sent) of the last segment. With one segment, the size is
        e/(1 − e)·α·messages/(β·sent) (torch's ``compute_min_saturation_bytes``). It may lie beyond the measurements;
        it is infinite if β is 0 or nothing is sent.

        Args:
            efficiency: e, above 0 and below 1.
            ranks: at least 2.

        Raises:
            UsageError: the efficiency is out of range.
        """
        if not 0.0 < efficiency < 1.0:
            raise UsageError(
                f"efficiency {efficiency}", remedy="give a share above 0 and below 1, such as 0.9"
            )
        terms = terms_of(self.op, self.form, ranks)
        segments = self.segments_for(ranks)
        slope = segments[-1].beta * terms.sent
        if slope <= 0.0:
            return math.inf

        def reaches(nbytes: float) -> bool:
            return self.seconds(nbytes, ranks) * efficiency <= slope * nbytes

        below = 0.0
        for size in _size_ladder(segments[0].low, segments[-1].high):
            if reaches(size):
                return size if below == 0.0 else _bisect(reaches, below, size)
            below = size
        return efficiency / (1.0 - efficiency) * segments[-1].alpha * terms.messages / slope

    def error_at(self, ranks: int) -> PredictionError | None:
        """Return the held-out errors that apply to a number of ranks; None if nothing was held out."""
        return self.sizes_error if ranks in self.ranks else self.ranks_error or self.sizes_error

    def _beyond(self, nbytes: float, ranks: int) -> str | None:
        """Describe which measurements a size and a number of ranks lie beyond; None within them."""
        limits, segments = [], self.segments_for(ranks)
        low, high = segments[0].low, segments[-1].high
        if not low <= nbytes <= high:
            limits.append(f"sizes from {format_size(low)} to {format_size(high)} were")
        if not self.ranks[0] <= ranks <= self.ranks[-1]:
            limits.append(f"{', '.join(map(str, self.ranks))} ranks were")
        return " and ".join(limits) or None


def _check_ascending(segments: tuple[FitSegment, ...]) -> None:
    if any(other.low <= one.high for one, other in itertools.pairwise(segments)):
        raise ValueError("segments must be in ascending order of size")


def _size_ladder(low: float, high: float) -> list[float]:
    """Return sizes from `low` to `high`, eight per doubling."""
    steps = max(1, math.ceil(8 * math.log2(high / low)))
    return [low * (high / low) ** (step / steps) for step in range(steps + 1)]


def _bisect(reaches: Callable[[float], bool], below: float, reached: float) -> float:
    for _ in range(60):
        middle = math.sqrt(below * reached)
        below, reached = (below, middle) if reaches(middle) else (middle, reached)
    return reached
