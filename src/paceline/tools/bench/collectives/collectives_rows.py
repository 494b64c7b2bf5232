"""Rows and results of the collectives benchmark: from the seconds of all ranks to JSON and CSV.

[Note: one time per iteration] A collective is over when its last rank is done, so an iteration's time is the largest
of all ranks; median, 95th percentile, minimum and maximum are taken over iterations. Bandwidth is S over the median
time, never a mean of rates: the mean of S/t_i exceeds S over the mean of t_i, as the fastest iterations have the
largest weight. The slowest rank is the one that was last most often; if lateness is even, its share is 1/n.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from paceline._core import files
from paceline._core.json_codec import decode, encode, read_result
from paceline.tools.bench.collectives.bus_bandwidth import algbw, busbw
from paceline.tools.result_files import result_head, versions

__all__ = [
    "CollectiveRow",
    "CollectivesResult",
    "RowKey",
    "TimeSummary",
    "benchmarked_versions",
    "read_collectives",
    "summarise_times",
    "write_collectives_csv",
    "write_collectives_json",
]

RowKey = tuple[str, str, int, int, str]
"""Identifies a row: backend, operation, ranks, bytes, dtype."""

_KIND, _SCHEMA = "bench-collectives", 1
_COLUMNS = (
    *("backend", "op", "ranks", "nbytes", "dtype", "iterations", "median_s", "p95_s", "min_s", "max_s"),
    *("slowest_rank", "slowest_share", "algbw", "busbw", "correct"),
)


@dataclass(frozen=True, kw_only=True)
class TimeSummary:
    """Statistics of a backend's iterations at one case; times in seconds, `slowest_share` from 0 to 1."""

    iterations: int
    median_s: float
    p95_s: float
    min_s: float
    max_s: float
    slowest_rank: int
    slowest_share: float


def summarise_times(seconds: Sequence[Sequence[float]]) -> TimeSummary:
    """Return the statistics of ``seconds[iteration][rank]``; see [Note: one time per iteration].

    Example:
        >>> summarise_times([[1.0, 2.0], [4.0, 3.0], [5.0, 6.0]]).median_s
        4.0
    """
    import numpy as np

    slowest = [max(ranks) for ranks in seconds]
    counts = Counter(list(ranks).index(most) for ranks, most in zip(seconds, slowest, strict=True))
    last, times = min(counts.items(), key=lambda item: (-item[1], item[0]))
    return TimeSummary(
        iterations=len(seconds),
        median_s=median(slowest),
        p95_s=float(np.quantile(slowest, 0.95)),
        min_s=min(slowest),
        max_s=max(slowest),
        slowest_rank=last,
        slowest_share=times / len(seconds),
    )


@dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """One backend at one case.

    Attributes:
        backend: its name.
        op: the operation's name.
        ranks: number of processes.
        nbytes: S, as defined in `paceline.tools.bench.collectives.bus_bandwidth`.
        dtype: name of the elements' type.
        times: of its iterations.
        correct: whether every element was right on every rank, before and after the timed calls.
    """

    backend: str
    op: str
    ranks: int
    nbytes: int
    dtype: str
    times: TimeSummary
    correct: bool

    @property
    def key(self) -> RowKey:
        """Identifies the row in a result."""
        return self.backend, self.op, self.ranks, self.nbytes, self.dtype

    @property
    def algbw(self) -> float:
        """Algorithm bandwidth in bytes per second: S over the median time."""
        return algbw(self.nbytes, self.times.median_s)

    @property
    def busbw(self) -> float:
        """Bus bandwidth in bytes per second."""
        return busbw(self.op, self.ranks, self.nbytes, self.times.median_s)

    def to_json(self) -> dict[str, Any]:
        """Return the row for JSON, its times flattened."""
        record = encode(self)
        times, correct = record.pop("times"), record.pop("correct")
        return record | times | {"algbw": self.algbw, "busbw": self.busbw, "correct": correct}

    @classmethod
    def from_json(cls, record: Mapping[str, Any], where: str) -> CollectiveRow:
        """Return the row that `to_json` wrote; `where` it stands, for errors."""
        return decode({**record, "times": record}, cls, where)


@dataclass(frozen=True)
class CollectivesResult:
    """A measurement.

    Attributes:
        command: the command line that reproduces it.
        machine: as `paceline.tools.result_files.machine_record` returns it.
        settings: of the measurement, with versions, what was left out and why, and whether it is complete.
        rows: one per backend and case.
    """

    command: str
    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    rows: Sequence[CollectiveRow]


def benchmarked_versions() -> dict[str, str]:
    """Return the versions of the packages that bear on the times."""
    return versions(["paceline", "torch", "mpi4py", "mpich"])


def write_collectives_json(path: Path, result: CollectivesResult) -> None:
    """Write a measurement, atomically."""
    head = result_head(_KIND, (), _SCHEMA, command=result.command, machine=result.machine)
    rows = [row.to_json() for row in result.rows]
    files.write_json(path, head | {"settings": dict(result.settings), "rows": rows})


def read_collectives(path: Path) -> CollectivesResult:
    """Return the measurement that `write_collectives_json` wrote.

    Raises:
        UsageError: the file can't be read, or has other content.
    """
    remedy = "name a file that `paceline bench collectives --json FILE` wrote"
    record = read_result(path, _KIND, _SCHEMA, what="result of bench collectives", remedy=remedy)
    body = decode(record, _Body, path.name)
    rows = [CollectiveRow.from_json(row, f"{path.name}.rows[{at}]") for at, row in enumerate(body.rows)]
    return CollectivesResult(body.command, body.machine, body.settings, rows)


@dataclass(frozen=True)
class _Body:
    command: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    rows: list[dict[str, Any]]


def write_collectives_csv(path: Path, rows: Iterable[CollectiveRow]) -> None:
    """Write the rows as CSV, one line each; seconds, and bytes per second."""

    def write(path: Path) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, _COLUMNS, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(row.to_json() for row in rows)

    files.write_atomic(path, write)
