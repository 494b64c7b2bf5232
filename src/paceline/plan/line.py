"""The line T = α·a + β·b that fits times best in relative terms, with α ≥ 0 and β ≥ 0 (pure).

Minimised is Σ ((α·a + β·b − t) / t)²: a microsecond that is 10 % off counts as much as a second that is. Raw seconds
would let the largest message decide alone. Of two parameters that must not be negative at most three sets can be
best: both free, or either alone with the other at 0; the best of those that are allowed is exact (Lawson & Hanson,
Solving Least Squares Problems, 1974, ch. 23).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Line", "fit_line"]

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Line:
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


def fit_line(a: Numbers, b: Numbers, seconds: Numbers) -> Line:
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
    return Line(alpha, beta, loss, *_errors(alpha, beta, loss, len(x), (xx, yy, spread)))


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
