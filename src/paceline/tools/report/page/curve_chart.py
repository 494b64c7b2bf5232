"""Interactive chart of curves on a report page: its data, reduced to a bounded number of points.

A long curve is cut into segments of consecutive points; of each segment the page holds the mean, the minimum and the
maximum, so that smoothing is right and no outlier is lost. ``curve_chart.js`` draws it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

__all__ = ["MAX_POINTS", "Curve", "CurveChart"]

MAX_POINTS = 2000
"""Largest number of points of one curve on a page."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A named curve.

    Attributes:
        name: its name in the legend.
        points: (x, value) in order of x; a value that is not finite leaves a gap.
        seconds: wall time of each point since the beginning; empty if unknown.
        colour: number of its colour from 0 to 5; None: the next one.
        style: ``"line"``, ``"dashed"``, ``"faint"`` or ``"crosses"``.
        smooth: whether the reader's smoothing applies.
    """

    name: str
    points: Sequence[tuple[float, float]]
    seconds: Sequence[float] = ()
    colour: int | None = None
    style: Literal["line", "dashed", "faint", "crosses"] = "line"
    smooth: bool = True


@dataclass(frozen=True, kw_only=True)
class CurveChart:
    """A chart of curves that the reader can zoom, smooth and read values from.

    Attributes:
        title: heading of the section.
        caption: text below the chart.
        unit: label of the y axis, with its unit.
        curves: the curves.
        x: what x counts: ``"step"``, or ``"time"`` in seconds since the beginning.
        number: how values are written: ``"plain"``, ``"seconds"``, ``"percent"`` or ``"bytes/s"``.
        from_zero: begin the y axis at zero, and draw a lower chart.
        log: begin with a logarithmic y axis.
        away: shaded intervals of x.
        marks: (x, text) of vertical lines; over steps (step, text, seconds), seconds as in `Curve`.
        table: not used; a chart of bars may have one.
    """

    title: str
    caption: str
    unit: str
    curves: Sequence[Curve]
    x: Literal["step", "time"] = "step"
    number: Literal["plain", "seconds", "percent", "bytes/s"] = "plain"
    from_zero: bool = False
    log: bool = False
    away: Sequence[tuple[float, float]] = ()
    marks: Sequence[tuple[float, str] | tuple[float, str, float]] = ()
    table: None = None
    is_curves = True

    def json(self) -> str:
        """Return the data for the script, escaped for a ``<script>`` element."""
        timed = self.x == "step" and all(curve.seconds for curve in self.curves)
        data = {
            "axes": ["step", "time"] if timed else [self.x],
            "number": self.number,
            "zero": self.from_zero,
            "log": self.log,
            "away": [list(each) for each in self.away],
            "marks": [list(each) for each in self.marks],
            "lines": [_encoded(curve, number, timed) for number, curve in enumerate(self.curves)],
        }
        return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _encoded(curve: Curve, number: int, timed: bool) -> dict[str, Any]:
    """Return a curve's data; arrays are little-endian, base64."""
    x = np.array([at for at, _ in curve.points], float)
    y = np.array([value for _, value in curve.points], float)
    size = max(1, -(-len(x) // MAX_POINTS))
    starts = np.arange(0, len(x), size)
    middles = np.minimum(starts + (size - 1) // 2, len(x) - 1)
    data: dict[str, Any] = {
        "name": curve.name,
        "style": curve.style,
        "colour": (number if curve.colour is None else curve.colour) % 6,
        "smooth": curve.smooth,
        "x": _base64(x[middles], "<f8"),
    }
    if timed:
        data["t"] = _base64(np.array(curve.seconds, float)[middles], "<f4")
    if size == 1:
        return data | {"y": _base64(y, "<f4")}
    finite = np.isfinite(y)
    counts = np.add.reduceat(finite.astype(float), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.where(finite, y, 0.0), starts) / counts
    low = np.minimum.reduceat(np.where(finite, y, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, y, -np.inf), starts)
    return data | {
        "y": _base64(mean, "<f4"),
        "low": _base64(low, "<f4"),
        "high": _base64(high, "<f4"),
        "size": size,
    }


def _base64(values: np.ndarray, kind: str) -> str:
    with np.errstate(over="ignore"):
        return base64.b64encode(values.astype(kind).tobytes()).decode()
