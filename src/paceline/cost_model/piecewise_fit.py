"""The line T = α·a + β·b that fits times best in relative terms, with α ≥ 0 and β ≥ 0 (pure).

Minimised is Σ ((α·a + β·b − t) / t)²: a microsecond that is 10 % off counts as much as a second that is. Raw seconds
would let the largest message decide alone. Of two parameters that must not be negative at most three sets can be
best: both free, or either alone with the other at 0; the best of those that are allowed is exact (Lawson & Hanson,
Solving Least Squares Problems, 1974, ch. 23).

Lines for ranges of sizes, and how many of them the data can bear (pure).

[Note: segments] Libraries change protocol or algorithm with the size, so one line seldom fits from bytes to gigabytes
(SMPI's piecewise factors: SimGrid, tuto_network_calibration). The sizes are cut into 1, 2 or 3 ranges of two sizes or
more. The cuts are those with the least loss, found exactly by trying all; how many ranges there are is decided by
leaving one size out at a time (never the first or the last: that would be extrapolation) and predicting it from
the others, cuts found anew. More ranges must lower the mean relative error by a tenth, by a thousandth of the times,
and by more than the standard error of that difference (the one-standard-error rule of Breiman et al., Classification
and Regression Trees, 1984), or they are not taken: chance alone would often favour more of them.

[Note: gaps] Between the last size of one range and the first of the next nothing was measured. Where the two lines
cross there, the first holds up to the crossing and the second from there: that is how a latency gives way to a
bandwidth. Where they don't, the time goes over from one to the other evenly in log size and log time. Either way
the fit is continuous.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "MOST_SEGMENTS",
    "FitSegment",
    "LineFit",
    "Samples",
    "cut",
    "fit_line",
    "how_many",
    "left_out",
    "seconds_at",
]

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class LineFit:
    """A fitted line.

    Attributes:
        alpha: seconds a message.
        beta: seconds a byte.
        loss: sum of squared relative residuals.
        alpha_error, beta_error: standard errors; None where the data can't tell: a parameter that is held at 0, or no
            more points than parameters.
    """

    alpha: float
    beta: float
    loss: float
    alpha_error: float | None = None
    beta_error: float | None = None


def fit_line(a: Numbers, b: Numbers, seconds: Numbers) -> LineFit:
    """Return the best line.

    Args:
        a: what α is multiplied by, of each point.
        b: what β is multiplied by, of each point.
        seconds: the measured times, above 0.

    Example:
        >>> line = fit_line(np.array([1.0, 1, 1]), np.array([1.0, 2, 4]), np.array([3.0, 4, 6]))
        >>> round(line.alpha, 9), round(line.beta, 9)
        (2.0, 1.0)
    """
    x, y = a / seconds, b / seconds
    xx, xy, yy = float(x @ x), float(x @ y), float(y @ y)
    sx, sy, spread = float(x.sum()), float(y.sum()), xx * yy - xy * xy
    options = [(sx / xx if xx else 0.0, 0.0), (0.0, sy / yy if yy else 0.0)]
    told = spread > 1e-12 * xx * yy
    if told:
        options.append(((sx * yy - sy * xy) / spread, (sy * xx - sx * xy) / spread))
    allowed = [option for option in options if min(option) >= 0.0]
    losses = [float(((alpha * x + beta * y - 1.0) ** 2).sum()) for alpha, beta in allowed]
    best = int(np.argmin(losses))
    (alpha, beta), loss = allowed[best], losses[best]
    return LineFit(alpha, beta, loss, *_errors(alpha, beta, loss, len(x), (xx, yy, spread)))


def _errors(
    alpha: float, beta: float, loss: float, points: int, sums: tuple[float, float, float]
) -> tuple[float | None, float | None]:
    """Return the standard errors: the root of the variance of residuals times the inverse normal matrix."""
    xx, yy, spread = sums
    free = (alpha > 0.0) + (beta > 0.0)
    if points <= free:
        return None, None
    variance = loss / (points - free)
    if free == 2:
        return math.sqrt(variance * yy / spread), math.sqrt(variance * xx / spread)
    return (
        math.sqrt(variance / xx) if alpha > 0.0 else None,
        math.sqrt(variance / yy) if beta > 0.0 else None,
    )


MOST_SEGMENTS = 3


LEAST_SIZES = 2


_LEAST_GAIN, _LEAST_DROP = 0.1, 1e-3


@dataclass(frozen=True)
class FitSegment:
    """A line and the sizes that it was fitted to.

    Attributes:
        low, high: first and last size in bytes.
        points: measurements.
        line: α and β.
    """

    low: float
    high: float
    points: int
    line: LineFit


@dataclass(frozen=True)
class Samples:
    """Measurements as arrays of one length, in ascending order of size.

    Attributes:
        nbytes: size n of each.
        messages, sent: a and b of T = α·a + β·b·n, of each.
        seconds: time of each.
    """

    nbytes: Numbers
    messages: Numbers
    sent: Numbers
    seconds: Numbers

    def where(self, kept: np.ndarray) -> Samples:
        """Return those that `kept` selects: a mask or a slice's indices."""
        return Samples(self.nbytes[kept], self.messages[kept], self.sent[kept], self.seconds[kept])

    @property
    def sizes(self) -> Numbers:
        """The different sizes in ascending order."""
        return np.unique(self.nbytes)


def cut(samples: Samples, count: int) -> list[FitSegment]:
    """Return the `count` segments with the least loss in all; fewer if there are too few sizes for them."""
    sizes = samples.sizes
    count = max(1, min(count, len(sizes) // LEAST_SIZES))
    starts = [*np.searchsorted(samples.nbytes, sizes), len(samples.nbytes)]
    made: dict[tuple[int, int], LineFit] = {}

    def line(first: int, end: int) -> LineFit:
        if (first, end) not in made:
            part = slice(starts[first], starts[end])
            made[first, end] = fit_line(
                samples.messages[part], samples.sent[part] * samples.nbytes[part], samples.seconds[part]
            )
        return made[first, end]

    best: tuple[float, list[tuple[int, int]]] | None = None
    for inner in itertools.combinations(range(LEAST_SIZES, len(sizes) - LEAST_SIZES + 1), count - 1):
        edges = list(itertools.pairwise((0, *inner, len(sizes))))
        if any(end - first < LEAST_SIZES for first, end in edges) and count > 1:
            continue
        loss = sum(line(*edge).loss for edge in edges)
        if best is None or loss < best[0]:
            best = loss, edges
    assert best is not None
    return [
        FitSegment(
            float(sizes[first]), float(sizes[end - 1]), int(starts[end] - starts[first]), line(first, end)
        )
        for first, end in best[1]
    ]


def seconds_at(segments: Sequence[FitSegment], nbytes: float, messages: float, sent: float) -> float:
    """Return the time of a size by its segment, or between two by both; see [Note: gaps]."""

    def by(segment: FitSegment) -> float:
        return segment.line.alpha * messages + segment.line.beta * sent * nbytes

    for before, after in itertools.pairwise(segments):
        if nbytes <= before.high:
            return by(before)
        if nbytes < after.low:
            steeper = (before.line.beta - after.line.beta) * sent
            crossing = (after.line.alpha - before.line.alpha) * messages / steeper if steeper else math.nan
            if before.high <= crossing <= after.low:
                return by(before) if nbytes <= crossing else by(after)
            part = math.log(nbytes / before.high) / math.log(after.low / before.high)
            return by(before) ** (1 - part) * by(after) ** part
    return by(segments[-1])


def how_many(samples: Samples, most: int = MOST_SEGMENTS) -> int:
    """Return how many segments to fit, at most `most`; see [Note: segments]."""
    chosen, errors = 1, left_out(samples, 1)
    for count in range(2, most + 1):
        if len(samples.sizes) <= LEAST_SIZES * count:
            break
        found = left_out(samples, count)
        if _clearly_less(found, errors):
            chosen, errors = count, found
    return chosen


def left_out(samples: Samples, count: int) -> dict[float, float]:
    """Return for each inner size the mean relative error of predicting it from the others with `count` segments."""
    errors = {}
    for size in samples.sizes[1:-1]:
        inside = samples.nbytes == size
        segments, at = cut(samples.where(~inside), count), samples.where(inside)
        predicted = [
            seconds_at(segments, float(size), messages, sent)
            for messages, sent in zip(at.messages, at.sent, strict=True)
        ]
        errors[float(size)] = float(np.abs(predicted / at.seconds - 1.0).mean())
    return errors


def _clearly_less(found: Mapping[float, float], errors: Mapping[float, float]) -> bool:
    """Return whether the errors found are less, on the sizes that both have, by the rule of [Note: segments]."""
    common = sorted(found.keys() & errors.keys())
    if len(common) < 2:
        return False
    drop = np.array([errors[size] - found[size] for size in common])
    before = float(np.mean([errors[size] for size in common]))
    by_chance = float(np.std(drop, ddof=1)) / math.sqrt(len(drop))
    return float(drop.mean()) > max(_LEAST_GAIN * before, _LEAST_DROP, by_chance)
