"""Piecewise-linear fits of time against size: T = α·a + β·b·n per range of sizes, with α ≥ 0 and β ≥ 0.

A line minimises Σ ((α·a + β·b·n − t) / t)²: 10 % of a microsecond counts as much as 10 % of a second, where raw
seconds would let the largest message decide alone. With two parameters that must not be negative, one of three sets is
optimal: both free, or either alone with the other at 0; the best feasible one is exact (Lawson & Hanson, Solving Least
Squares Problems, 1974, ch. 23).

[Note: segments] Libraries change protocol or algorithm with the size, so one line seldom fits from bytes to gigabytes
(SMPI's piecewise factors: SimGrid, tuto_network_calibration). The sizes are cut into 1, 2 or 3 ranges of at least two
sizes. The cuts with the least loss are found by exhaustive search. The number of ranges is decided by leaving one size
out at a time (never the first or the last: that would be extrapolation) and predicting it from the others, with the
cuts found again. Another range must lower the mean relative error by a tenth, by a thousandth of the times, and by more
than the standard error of that difference (the one-standard-error rule of Breiman et al., Classification and Regression
Trees, 1984), because chance alone would often favour more ranges.

[Note: gaps] Nothing was measured between the last size of one range and the first of the next. Where the two lines
cross in that gap, the first holds up to the crossing and the second from there: a latency gives way to a bandwidth.
Where they don't, time is interpolated in log size and log time. Either way the fit is continuous.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from paceline._core.json_codec import Meta, NonNegative, Positive

__all__ = [
    "MAX_SEGMENTS",
    "FitSamples",
    "FitSegment",
    "LineFit",
    "choose_segment_count",
    "fit_line",
    "fit_segments",
    "leave_one_out_errors",
    "piecewise_seconds",
]

Numbers = NDArray[np.float64]

MAX_SEGMENTS = 3
MIN_SIZES = 2  # of a segment
_MIN_GAIN, _MIN_DROP = 0.1, 1e-3


@dataclass(frozen=True)
class LineFit:
    """A fitted line.

    Attributes:
        alpha: seconds per message.
        beta: seconds per byte.
        loss: sum of squared relative residuals.
        alpha_error: standard error; None where the data can't give one, because the parameter is held at 0 or there
            are no more points than parameters.
        beta_error: as `alpha_error`.
    """

    alpha: float
    beta: float
    loss: float
    alpha_error: float | None = None
    beta_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class FitSegment:
    """A line and the range of sizes that it was fitted to; the fields of the line are those of `LineFit`.

    Attributes:
        low: first size in bytes.
        high: last size in bytes.
        points: number of measurements.
    """

    low: Positive
    high: Positive
    points: Annotated[int, Meta(ge=1)]
    alpha: NonNegative
    beta: NonNegative
    loss: NonNegative
    alpha_error: NonNegative | None
    beta_error: NonNegative | None

    def __post_init__(self) -> None:
        if self.high < self.low:
            raise ValueError(f"high is {self.high:g}, expected {self.low:g} bytes or more")
        if self.alpha == self.beta == 0.0:
            raise ValueError("beta is 0, expected more than 0, as alpha is 0")


@dataclass(frozen=True)
class FitSamples:
    """Measurements as arrays of one length, in ascending order of size.

    Attributes:
        nbytes: n.
        messages: a of T = α·a + β·b·n.
        sent: b of T = α·a + β·b·n.
        seconds: measured times.
    """

    nbytes: Numbers
    messages: Numbers
    sent: Numbers
    seconds: Numbers

    def where(self, kept: np.ndarray) -> FitSamples:
        """Return the samples that `kept` selects: a mask or indices."""
        return FitSamples(self.nbytes[kept], self.messages[kept], self.sent[kept], self.seconds[kept])

    @property
    def sizes(self) -> Numbers:
        """The distinct sizes in ascending order."""
        return np.unique(self.nbytes)


def fit_line(a: Numbers, b: Numbers, seconds: Numbers) -> LineFit:
    """Return the best line.

    Args:
        a: factor of α, per point.
        b: factor of β, per point.
        seconds: the measured times, above 0.

    Example:
        >>> line = fit_line(np.array([1.0, 1, 1]), np.array([1.0, 2, 4]), np.array([3.0, 4, 6]))
        >>> round(line.alpha, 9), round(line.beta, 9)
        (2.0, 1.0)
    """
    x, y = a / seconds, b / seconds
    xx, xy, yy = float(x @ x), float(x @ y), float(y @ y)
    sx, sy, determinant = float(x.sum()), float(y.sum()), xx * yy - xy * xy
    options = [(sx / xx if xx else 0.0, 0.0), (0.0, sy / yy if yy else 0.0)]
    if determinant > 1e-12 * xx * yy:
        options.append(((sx * yy - sy * xy) / determinant, (sy * xx - sx * xy) / determinant))
    feasible = [option for option in options if min(option) >= 0.0]
    losses = [float(((alpha * x + beta * y - 1.0) ** 2).sum()) for alpha, beta in feasible]
    best = int(np.argmin(losses))
    (alpha, beta), loss = feasible[best], losses[best]
    return LineFit(alpha, beta, loss, *_standard_errors(alpha, beta, loss, len(x), (xx, yy, determinant)))


def _standard_errors(
    alpha: float, beta: float, loss: float, points: int, normal: tuple[float, float, float]
) -> tuple[float | None, float | None]:
    """Return the roots of the residuals' variance times the inverse normal matrix's diagonal."""
    xx, yy, determinant = normal
    free = (alpha > 0.0) + (beta > 0.0)
    if points <= free:
        return None, None
    variance = loss / (points - free)
    if free == 2:
        return math.sqrt(variance * yy / determinant), math.sqrt(variance * xx / determinant)
    return (
        math.sqrt(variance / xx) if alpha > 0.0 else None,
        math.sqrt(variance / yy) if beta > 0.0 else None,
    )


def fit_segments(samples: FitSamples, count: int) -> list[FitSegment]:
    """Return the `count` segments with the least total loss; fewer if there are too few sizes."""
    sizes = samples.sizes
    count = max(1, min(count, len(sizes) // MIN_SIZES))
    starts = [*np.searchsorted(samples.nbytes, sizes), len(samples.nbytes)]
    lines: dict[tuple[int, int], LineFit] = {}

    def line(first: int, end: int) -> LineFit:
        if (first, end) not in lines:
            part = slice(starts[first], starts[end])
            lines[first, end] = fit_line(
                samples.messages[part], samples.sent[part] * samples.nbytes[part], samples.seconds[part]
            )
        return lines[first, end]

    best: tuple[float, list[tuple[int, int]]] | None = None
    for inner in itertools.combinations(range(MIN_SIZES, len(sizes) - MIN_SIZES + 1), count - 1):
        edges = list(itertools.pairwise((0, *inner, len(sizes))))
        if any(end - first < MIN_SIZES for first, end in edges) and count > 1:
            continue
        loss = sum(line(*edge).loss for edge in edges)
        if best is None or loss < best[0]:
            best = loss, edges
    assert best is not None
    return [
        FitSegment(
            low=float(sizes[first]),
            high=float(sizes[end - 1]),
            points=int(starts[end] - starts[first]),
            **vars(line(first, end)),
        )
        for first, end in best[1]
    ]


def piecewise_seconds(segments: Sequence[FitSegment], nbytes: float, messages: float, sent: float) -> float:
    """Return the time of a size by its segment, or between two segments by both; see [Note: gaps]."""

    def by(segment: FitSegment) -> float:
        return segment.alpha * messages + segment.beta * sent * nbytes

    for before, after in itertools.pairwise(segments):
        if nbytes <= before.high:
            return by(before)
        if nbytes < after.low:
            steeper = (before.beta - after.beta) * sent
            crossing = (after.alpha - before.alpha) * messages / steeper if steeper else math.nan
            if before.high <= crossing <= after.low:
                return by(before) if nbytes <= crossing else by(after)
            share = math.log(nbytes / before.high) / math.log(after.low / before.high)
            return by(before) ** (1 - share) * by(after) ** share
    return by(segments[-1])


def choose_segment_count(samples: FitSamples, most: int = MAX_SEGMENTS) -> int:
    """Return how many segments to fit, at most `most`; see [Note: segments]."""
    chosen, errors = 1, leave_one_out_errors(samples, 1)
    for count in range(2, most + 1):
        if len(samples.sizes) <= MIN_SIZES * count:
            break
        candidate = leave_one_out_errors(samples, count)
        if _clearly_less(candidate, errors):
            chosen, errors = count, candidate
    return chosen


def leave_one_out_errors(samples: FitSamples, count: int) -> dict[float, float]:
    """Return the mean relative error of predicting each inner size from the others with `count` segments."""
    errors = {}
    for size in samples.sizes[1:-1]:
        inside = samples.nbytes == size
        segments, at = fit_segments(samples.where(~inside), count), samples.where(inside)
        predicted = [
            piecewise_seconds(segments, float(size), messages, sent)
            for messages, sent in zip(at.messages, at.sent, strict=True)
        ]
        errors[float(size)] = float(np.abs(predicted / at.seconds - 1.0).mean())
    return errors


def _clearly_less(candidate: Mapping[float, float], errors: Mapping[float, float]) -> bool:
    """Compare the errors of the sizes that both have, by the rule of [Note: segments]."""
    common = sorted(candidate.keys() & errors.keys())
    if len(common) < 2:
        return False
    drop = np.array([errors[size] - candidate[size] for size in common])
    before = float(np.mean([errors[size] for size in common]))
    standard_error = float(np.std(drop, ddof=1)) / math.sqrt(len(drop))
    return float(drop.mean()) > max(_MIN_GAIN * before, _MIN_DROP, standard_error)
