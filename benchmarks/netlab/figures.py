"""What is compared between hosts, by name, and the results that `measure.py` wrote.

gloo at its best is, at each size, the faster of one call and of two halves under way at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.tools.bench.turn_statistics import InterleavedTimes

__all__ = ["ARENA", "BEST", "GLOO", "HALVES", "ORDINARY", "Result", "Row", "contestants_at"]

GLOO, HALVES, BEST = "gloo", "gloo, two halves", "gloo at its best"
ORDINARY, ARENA = "paceline", "paceline, arena"

_LEAST_HALVES_NBYTES = 1_000_000
"""From here on gloo is also tried with two halves."""


def contestants_at(nbytes: int) -> list[str]:
    """Return who takes part at a size."""
    halves = [HALVES] if nbytes >= _LEAST_HALVES_NBYTES else []
    return [GLOO, *halves, ORDINARY, ARENA]


@dataclass(frozen=True)
class Row:
    """What was measured at one size.

    Attributes:
        times: of all contestants.
        passed: bytes (sent, received) of one all-reduce at the interface of the busiest host, headers included, by
            contestant: medians over rounds.
    """

    times: InterleavedTimes
    passed: dict[str, tuple[float, ...]]

    def buffers(self, name: str) -> float:
        """Return how many times the buffer a host sends or receives in one all-reduce, whichever is more."""
        return max(self.passed[name]) / self.times.nbytes

    def to_json(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return self.times.to_json() | {"passed": self.passed}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Row:
        """Return the row that `to_json` wrote."""
        record = dict(record)
        passed = record.pop("passed")
        return cls(InterleavedTimes(**record), passed)


@dataclass(frozen=True)
class Result:
    """A measurement: hosts, ranks on each, rate of the links (``"1Gbit/s"``), and a row per size."""

    hosts: int
    ranks_per_host: int
    rate: str
    rows: list[Row]

    def at(self, nbytes: int) -> Row:
        """Return the row of a size that was measured."""
        return next(row for row in self.rows if row.times.nbytes == nbytes)

    @classmethod
    def load(cls, path: Path) -> Result:
        """Return the measurement that `measure.py` wrote."""
        record = json.loads(path.read_text(encoding="utf-8"))
        settings = record["settings"]
        rows = [Row.from_json(row) for row in record["rows"]]
        return cls(settings["hosts"], settings["ranks_per_host"], settings["rate"], rows)
