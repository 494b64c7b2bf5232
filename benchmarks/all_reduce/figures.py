"""What is compared, by name, and the results that `measure.py` wrote.

gloo at its best is, at each size, the faster of one call and of two halves under way at once (a gloo group has two
worker threads, and one call keeps one of them busy). So chance favours gloo.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_harness.turns import InterleavedTimes

__all__ = [
    "ARENA",
    "BEST",
    "COPY",
    "COPY_ALONE",
    "GLOO",
    "HALVES",
    "MPICH",
    "ORDINARY",
    "PASS",
    "Result",
    "Tried",
    "contestants_at",
]

GLOO, HALVES, BEST = "gloo", "gloo, two halves", "gloo at its best"
ORDINARY, ARENA = "paceline", "paceline, arena"
MPICH = "MPICH"
COPY, COPY_ALONE = "copy_, every rank", "copy_, one rank alone"
PASS = "mul_, every rank"

_LEAST_HALVES_NBYTES = 1_000_000
"""From here on gloo is also tried with two halves; below, a second call costs more than it brings."""


def contestants_at(nbytes: int) -> list[str]:
    """Return who takes part at a size."""
    halves = [HALVES] if nbytes >= _LEAST_HALVES_NBYTES else []
    return [GLOO, *halves, ORDINARY, ARENA, MPICH, COPY, COPY_ALONE, PASS]


Tried = list[dict[str, Any]]
"""MPICH's settings as `mpich.tries` found them, the best first."""


@dataclass(frozen=True)
class Result:
    """A measurement: how many ranks, the times at each size, and MPICH's settings that were tried."""

    ranks: int
    rows: list[InterleavedTimes]
    tried: Tried

    def at(self, nbytes: int) -> InterleavedTimes:
        """Return the times at a size that was measured."""
        return next(row for row in self.rows if row.nbytes == nbytes)

    @classmethod
    def load(cls, path: Path) -> Result:
        """Return the measurement that `measure.py` wrote."""
        record = json.loads(path.read_text(encoding="utf-8"))
        rows = [InterleavedTimes(**row) for row in record["rows"]]
        return cls(record["settings"]["ranks"], rows, record["mpich_settings_tried"])
