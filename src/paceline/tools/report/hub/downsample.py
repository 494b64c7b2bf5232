"""Summaries of long series in bounded memory: a curve that keeps its extremes, and quantiles of values."""

from __future__ import annotations

from collections import Counter

__all__ = ["DownsampledCurve", "Point", "QuantileSketch"]

Point = tuple[float, float]


class DownsampledCurve:
    """A curve of at most `limit` points: the first, the last, and the minimum and maximum of each segment.

    A segment is a run of consecutive points. When there are too many segments, neighbouring ones are merged in pairs.

    Args:
        limit: number of points to keep, 6 or more.

    Attributes:
        count: number of points added.

    Example:
        >>> curve = DownsampledCurve(limit=6)
        >>> for at in range(1000):
        ...     curve.add(at, 7.0 if at == 123 else 0.5)
        >>> len(curve.points()) <= 6, max(value for _, value in curve.points())
        (True, 7.0)
    """

    def __init__(self, limit: int = 2000) -> None:
        self.count = 0
        self._first: Point | None = None
        self._last: Point | None = None
        self._max_segments = max(2, (limit - 2) // 2 // 2 * 2)  # even
        self._segments: list[tuple[Point, Point]] = []
        self._open: tuple[Point, Point] | None = None
        self._segment_size, self._in_open = 1, 0

    def add(self, x: float, y: float) -> None:
        """Append a point."""
        point = (x, y)
        self.count += 1
        self._first = self._first or point
        self._last = point
        self._open = (point, point) if self._open is None else _extremes(self._open, (point, point))
        self._in_open += 1
        if self._in_open < self._segment_size:
            return
        self._segments.append(self._open)
        self._open, self._in_open = None, 0
        if len(self._segments) >= self._max_segments:
            pairs = zip(self._segments[::2], self._segments[1::2], strict=True)
            self._segments = [_extremes(*pair) for pair in pairs]
            self._segment_size *= 2

    def points(self) -> list[Point]:
        """Return the points kept, in order."""
        if self._first is None or self._last is None:
            return []
        kept = [self._first]
        for low, high in [*self._segments, *([self._open] if self._open else [])]:
            kept += [low, high] if low[0] <= high[0] else [high, low]
        kept.append(self._last)
        return [point for index, point in enumerate(kept) if index == 0 or point != kept[index - 1]]


def _extremes(one: tuple[Point, Point], other: tuple[Point, Point]) -> tuple[Point, Point]:
    low = other[0] if other[0][1] < one[0][1] else one[0]
    high = other[1] if other[1][1] > one[1][1] else one[1]
    return low, high


class QuantileSketch:
    """Counts of values rounded to three digits.

    Attributes:
        count: number of values added.
        largest: the exact maximum.

    Example:
        >>> staleness = QuantileSketch()
        >>> for value in (0.5, 0.25, 7.1234):
        ...     staleness.add(value)
        >>> staleness.median, staleness.largest
        (0.5, 7.1234)
    """

    def __init__(self) -> None:
        self.count, self.largest = 0, 0.0
        self._counts: Counter[float] = Counter()

    def add(self, value: float) -> None:
        """Add a finite value."""
        self.largest = value if not self.count else max(self.largest, value)
        self.count += 1
        self._counts[float(f"{value:.3g}")] += 1

    def merge(self, other: QuantileSketch) -> None:
        """Add all values of another sketch."""
        if other.count:
            self.largest = other.largest if not self.count else max(self.largest, other.largest)
            self.count += other.count
            self._counts.update(other._counts)

    @property
    def median(self) -> float | None:
        """Lower median, to three digits; None without values."""
        passed = 0
        for value in sorted(self._counts):
            passed += self._counts[value]
            if 2 * passed >= self.count:
                return value
        return None
