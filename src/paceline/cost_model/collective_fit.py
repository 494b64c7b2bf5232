"""A fitted cost of a collective: what it predicts, how far to trust it, and where it must not be asked.

Made by `paceline.cost_model.fit_measurements.fit_points`. A prediction outside of the sizes or numbers of ranks that
were measured is refused unless it is asked for, and then says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline._core.format import format_size
from paceline.cost_model.algorithm_terms import AlgorithmTerms, terms_of
from paceline.cost_model.piecewise_fit import FitSegment, seconds_at
from paceline.cost_model.prediction_error import PredictionError
from paceline.errors import UsageError

__all__ = ["CollectiveFit", "Prediction"]


@dataclass(frozen=True)
class Prediction:
    """What a collective will take.

    Attributes:
        seconds: the prediction.
        low, high: nine in ten measurements that were held out lay within; both equal `seconds` if none was.
        error: the median relative error of those measurements; None if none was held out.
        extrapolated: what is beyond that which was measured; None if nothing is.
    """

    seconds: float
    low: float
    high: float
    error: float | None
    extrapolated: str | None = None


@dataclass(frozen=True)
class CollectiveFit:
    """T = α·messages + β·sent·n, in one or more ranges of n.

    Attributes:
        op: such as ``"all-reduce"``.
        form: the algorithm that the times look like.
        told: whether they could tell it from others; else it is the usual one.
        segments: α, β and range of sizes, in ascending order.
        own: for each number of ranks that was measured, its own segments; empty where the common ones predict better.
        ranks: the numbers of ranks that were measured, in ascending order.
        points: measurements.
        error_of_form: for each form that was tried, its typical relative error in predicting a number of ranks from
            the others; empty if one number was measured.
        sizes_error: every second size predicted from the others.
        ranks_error: each number of ranks predicted from the others; None if one number was measured.
    """

    op: str
    form: AlgorithmTerms
    told: bool
    segments: tuple[FitSegment, ...]
    ranks: tuple[int, ...]
    points: int
    error_of_form: dict[str, float]
    own: Mapping[int, tuple[FitSegment, ...]] = field(default_factory=dict)
    sizes_error: PredictionError | None = None
    ranks_error: PredictionError | None = None

    @property
    def low(self) -> float:
        """The smallest size in bytes that was measured."""
        return self.segments[0].low

    @property
    def high(self) -> float:
        """The largest size in bytes that was measured."""
        return self.segments[-1].high

    def seconds(self, nbytes: float, ranks: int) -> float:
        """Return the bare value of the fit, inside or outside of what was measured."""
        terms = terms_of(self.op, self.form, ranks)
        return seconds_at(self.segments_for(ranks), nbytes, terms.messages, terms.sent)

    def segments_for(self, ranks: int) -> tuple[FitSegment, ...]:
        """Return the segments that answer for a number of ranks: its own, or the common ones."""
        return self.own.get(ranks, self.segments)

    def predict(self, nbytes: float, ranks: int, *, extrapolate: bool = False) -> Prediction:
        """Return what the collective will take, with its error.

        Args:
            nbytes: size n in bytes, above 0, as nccl-tests defines it for the operation.
            ranks: at least 1; one rank alone takes no time.
            extrapolate: answer outside of what was measured too, and say so in the result.

        Raises:
            UsageError: that was not measured and `extrapolate` is not set, or there is no such size or number.
        """
        if not nbytes > 0 or ranks < 1:
            raise UsageError(
                f"{self.op} of {nbytes} bytes by {ranks} ranks", remedy="give 1 byte and 1 rank, or more"
            )
        if ranks == 1:
            return Prediction(0.0, 0.0, 0.0, None)
        beyond = self._beyond(nbytes, ranks)
        if beyond and not extrapolate:
            raise UsageError(
                f"{self.op} of {format_size(nbytes)} by {ranks} ranks is beyond what was measured: {beyond}",
                remedy="measure it with paceline bench collectives, or allow extrapolation",
            )
        seconds, accuracy = self.seconds(nbytes, ranks), self.error_at(ranks)
        spread = 1.0 + (accuracy.p90 if accuracy else 0.0)
        return Prediction(
            seconds, seconds / spread, seconds * spread, accuracy.median if accuracy else None, beyond
        )

    def half_size(self, ranks: int) -> float:
        """Return n½: the size in bytes at which half of the bandwidth of the largest messages is reached."""
        return self.size_for(0.5, ranks)

    def size_for(self, efficiency: float, ranks: int) -> float:
        """Return the least size in bytes that reaches a share of the bandwidth of the largest messages.

        That bandwidth is 1 / (β·sent) of the last segment. With one segment, it is e/(1 − e)·α·messages/(β·sent)
        (torch's ``compute_min_saturation_bytes``). It may lie beyond what was measured; infinite if β is 0 or
        nothing is sent.

        Args:
            efficiency: e, above 0 and below 1.
            ranks: at least 2.

        Raises:
            UsageError: there is no such share.
        """
        if not 0.0 < efficiency < 1.0:
            raise UsageError(
                f"efficiency {efficiency}", remedy="give a share above 0 and below 1, such as 0.9"
            )
        terms = terms_of(self.op, self.form, ranks)
        segments = self.segments_for(ranks)
        slope = segments[-1].line.beta * terms.sent
        if slope <= 0.0:
            return math.inf
        below = 0.0
        for size in _ladder(segments[0].low, segments[-1].high):
            if self.seconds(size, ranks) * efficiency <= slope * size:
                return size if below == 0.0 else self._bisect(below, size, efficiency, slope, ranks)
            below = size
        last = segments[-1].line.alpha * terms.messages
        return efficiency / (1.0 - efficiency) * last / slope

    def _bisect(self, below: float, reached: float, efficiency: float, slope: float, ranks: int) -> float:
        for _ in range(60):
            middle = math.sqrt(below * reached)
            if self.seconds(middle, ranks) * efficiency <= slope * middle:
                reached = middle
            else:
                below = middle
        return reached

    def error_at(self, ranks: int) -> PredictionError | None:
        """Return the errors of what was held out that tell of this number of ranks; None if nothing was."""
        return self.sizes_error if ranks in self.ranks else self.ranks_error or self.sizes_error

    def _beyond(self, nbytes: float, ranks: int) -> str | None:
        """Return in words what of this was not measured, None if all was."""
        said, segments = [], self.segments_for(ranks)
        low, high = segments[0].low, segments[-1].high
        if not low <= nbytes <= high:
            said.append(f"sizes from {format_size(low)} to {format_size(high)} were")
        if not self.ranks[0] <= ranks <= self.ranks[-1]:
            numbers = ", ".join(map(str, self.ranks))
            said.append(f"{numbers} ranks were")
        return " and ".join(said) or None


def _ladder(low: float, high: float) -> list[float]:
    """Return sizes from `low` to `high`, eight to each doubling."""
    steps = max(1, math.ceil(8 * math.log2(high / low)))
    return [low * (high / low) ** (step / steps) for step in range(steps + 1)]
