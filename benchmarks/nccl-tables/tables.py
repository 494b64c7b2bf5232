"""Published times of NCCL's all-reduce, as points to fit.

``tables.json`` holds the figures as they were published: bus bandwidth in GB/s, or microseconds. The time is
n · 2(p − 1)/p ÷ busbw, by the definition of nccl-tests.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from paceline.cost_model.fit_measurements import MeasuredPoint

__all__ = ["FILE", "OP", "Table", "load"]

FILE = Path(__file__).with_name("tables.json")
OP = "all-reduce"


@dataclass(frozen=True)
class Table:
    """One published table: its name, and its points in ascending order of size."""

    name: str
    points: tuple[MeasuredPoint, ...]

    def at_least(self, nbytes: int) -> Table:
        """Return the table without smaller sizes."""
        return Table(self.name, tuple(point for point in self.points if point.nbytes >= nbytes))


def load(path: Path = FILE) -> dict[str, Table]:
    """Return the tables by name."""
    made = {}
    for table in json.loads(path.read_text(encoding="utf-8"))["tables"]:
        ranks, unit = table["ranks"], table["columns"][1]
        points = tuple(
            MeasuredPoint(nbytes, ranks, _seconds(nbytes, value, ranks, unit))
            for nbytes, value in table["rows"]
        )
        made[table["name"]] = Table(table["name"], points)
    return made


def _seconds(nbytes: int, value: float, ranks: int, unit: str) -> float:
    return value * 1e-6 if unit == "microseconds" else nbytes * 2 * (ranks - 1) / ranks / (value * 1e9)
