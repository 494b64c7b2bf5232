"""The charts of ``paceline bench collectives``: time and bus bandwidth against size, for each operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from paceline.bench.collectives.results import Result
from paceline.bench.collectives.rows import Row
from paceline.report.canvas import Chart, require_matplotlib
from paceline.report.size_charts import SizeLine, bandwidth_by_size, time_by_size

__all__ = ["bandwidth", "check", "times", "writers"]


def check() -> None:
    """Raise a `UsageError` if charts can't be drawn here."""
    require_matplotlib()


def writers(folder: Path, ops: Iterable[str]) -> dict[Path, Callable[[Path, Result], object]]:
    """Return what draws each chart of the operations: ``all-reduce-time.png``, ``all-reduce-busbw.svg`` …"""
    return {
        folder / f"{op}-{name}{suffix}": partial(_write, op=op, draw=draw)
        for op in ops
        for name, draw in (("time", times), ("busbw", bandwidth))
        for suffix in (".png", ".svg")
    }


def _write(path: Path, result: Result, *, op: str, draw: Callable[[Sequence[Row], str], Chart]) -> None:
    rows = [row for row in result.rows if row.op == op]
    if rows:
        chart = draw(rows, f"{op} of {rows[0].dtype}, {result.settings['network']}")
        chart.save(path)


def times(rows: Sequence[Row], title: str) -> Chart:
    """Return the chart of the median times of one operation."""
    return time_by_size(_lines(rows, lambda row: row.times.median_s), title=title)


def bandwidth(rows: Sequence[Row], title: str) -> Chart:
    """Return the chart of the bus bandwidths of one operation."""
    return bandwidth_by_size(_lines(rows, lambda row: row.busbw), title=title, bandwidth="busbw")


def _lines(rows: Sequence[Row], value_of: Callable[[Row], float]) -> list[SizeLine]:
    points: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: row.nbytes):
        points.setdefault((row.backend, row.ranks), []).append((row.nbytes, value_of(row)))
    return [SizeLine(backend, ranks, found) for (backend, ranks), found in sorted(points.items())]
