"""Many values in little memory: a curve that keeps its extremes, and how often each value came (pure)."""

from __future__ import annotations

from collections import Counter

__all__ = ["DownsampledCurve", "Point", "QuantileSketch"]

Point = tuple[float, float]


class DownsampledCurve:
    """A curve of which at most `limit` points are kept: the first, the last, each stretch's lowest and highest.

    A stretch is a number of points that came one after the other. When there are too many stretches, each two of them
    become one.

    Args:
        most: points that are kept, 6 or more.

    Attributes:
        count: points that came.

    Example:
        >>> curve = Thinned(most=6)
        >>> for at in range(1000):
        ...     curve.add(at, 7.0 if at == 123 else 0.5)
        >>> len(curve.points()) <= 6, max(value for _, value in curve.points())
        (True, 7.0)
    """

    def __init__(self, limit: int = 2000) -> None:
        self.count = 0
        self._first: Point | None = None
        self._last: Point | None = None
        self._most = max(2, (limit - 2) // 2 // 2 * 2)  # stretches, an even number of them
        self._whole: list[tuple[Point, Point]] = []
        self._open: tuple[Point, Point] | None = None
        self._each, self._in_open = 1, 0

    def add(self, x: float, y: float) -> None:
        """Take in a point behind all others."""
        point = (x, y)
        self.count += 1
        self._first = self._first or point
        self._last = point
        self._open = (point, point) if self._open is None else _both(self._open, (point, point))
        self._in_open += 1
        if self._in_open < self._each:
            return
        self._whole.append(self._open)
        self._open, self._in_open = None, 0
        if len(self._whole) >= self._most:
            self._whole = [_both(*pair) for pair in zip(self._whole[::2], self._whole[1::2], strict=True)]
            self._each *= 2

    def points(self) -> list[Point]:
        """Return what is kept, in the order in which it came."""
        if self._first is None or self._last is None:
            return []
        kept = [self._first]
        for low, high in [*self._whole, *([self._open] if self._open else [])]:
            kept += [low, high] if low[0] <= high[0] else [high, low]
        kept.append(self._last)
        return [point for index, point in enumerate(kept) if index == 0 or point != kept[index - 1]]


def _both(one: tuple[Point, Point], other: tuple[Point, Point]) -> tuple[Point, Point]:
    """Return the lowest and the highest of two stretches."""
    low = other[0] if other[0][1] < one[0][1] else one[0]
    high = other[1] if other[1][1] > one[1][1] else one[1]
    return low, high


class QuantileSketch:
    """How often values came, to three digits.

    Attributes:
        count: values that came. largest: of them, exactly.

    Example:
        >>> ages = Sketch()
        >>> for age in (0.5, 0.25, 7.1234):
        ...     ages.add(age)
        >>> ages.median, ages.largest
        (0.5, 7.1234)
    """

    def __init__(self) -> None:
        self.count, self.largest = 0, 0.0
        self._times: Counter[float] = Counter()

    def add(self, value: float) -> None:
        """Count a value that is finite."""
        self.largest = value if not self.count else max(self.largest, value)
        self.count += 1
        self._times[float(f"{value:.3g}")] += 1

    def merge(self, other: QuantileSketch) -> None:
        """Count all that another one has."""
        if other.count:
            self.largest = other.largest if not self.count else max(self.largest, other.largest)
            self.count += other.count
            self._times.update(other._times)

    @property
    def median(self) -> float | None:
        """The smallest value that half of all do not exceed; None: there are none."""
        passed = 0
        for value in sorted(self._times):
            passed += self._times[value]
            if 2 * passed >= self.count:
                return value
        return None
