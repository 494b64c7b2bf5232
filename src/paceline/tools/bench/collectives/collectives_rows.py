"""From seconds of every rank to a row of the result: pure functions over numbers.

[Note: one time per iteration] A collective is over when its last rank is done, so the largest time of all ranks
stands for an iteration; median, 95th percentile, least and largest are taken over iterations. Bandwidth is S over the
median time, never a mean of rates: the mean of S/t_i exceeds S over the mean of t_i, as the fastest iterations count
most in it. The slowest rank is the one that was last most often; evenly spread lateness gives it a share of 1/n.

The result of a measurement as JSON and CSV.

Rows as tables for a terminal: one per operation.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from paceline._core import files
from paceline._core.format import format_size
from paceline.errors import UsageError
from paceline.tools.bench.collectives.bus_bandwidth import algbw, busbw
from paceline.tools.result_files import versions

__all__ = [
    "FOOTER",
    "KIND",
    "SCHEMA",
    "Key",
    "Result",
    "Row",
    "Summary",
    "installed",
    "percentile",
    "read_result",
    "summarize",
    "table",
    "tables",
    "write_csv",
    "write_json",
]

Key = tuple[str, str, int, int, str]
"""Backend, operation, ranks, bytes and dtype: what tells rows apart."""


@dataclass(frozen=True)
class Summary:
    """What the iterations of one backend at one case come to; times in seconds, `slowest_share` from 0 to 1."""

    iterations: int
    median_s: float
    p95_s: float
    min_s: float
    max_s: float
    slowest_rank: int
    slowest_share: float


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the values lie, between neighbours in proportion.

    Example:
        >>> percentile([1.0, 2.0, 3.0], 0.75)
        2.5
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def summarize(seconds: Sequence[Sequence[float]]) -> Summary:
    """Return the summary of ``seconds[iteration][rank]``; see [Note: one time per iteration].

    Example:
        >>> summarize([[1.0, 2.0], [4.0, 3.0], [5.0, 6.0]]).median_s
        4.0
    """
    slowest = [max(ranks) for ranks in seconds]
    counts = Counter(list(ranks).index(most) for ranks, most in zip(seconds, slowest, strict=True))
    last, times = min(counts.items(), key=lambda item: (-item[1], item[0]))
    return Summary(
        iterations=len(seconds),
        median_s=median(slowest),
        p95_s=percentile(slowest, 0.95),
        min_s=min(slowest),
        max_s=max(slowest),
        slowest_rank=last,
        slowest_share=times / len(seconds),
    )


@dataclass(frozen=True)
class Row:
    """One backend at one case.

    Attributes:
        backend, op, dtype: names.
        ranks: processes. nbytes: S, as `paceline.tools.bench.collectives.bus_bandwidth` defines it.
        times: of its iterations.
        correct: whether every element was right on every rank, before and after the timed calls.
    """

    backend: str
    op: str
    ranks: int
    nbytes: int
    dtype: str
    times: Summary
    correct: bool

    @property
    def key(self) -> Key:
        """What tells the row from others."""
        return self.backend, self.op, self.ranks, self.nbytes, self.dtype

    @property
    def algbw(self) -> float:
        """Bytes per second: S over the median time."""
        return algbw(self.nbytes, self.times.median_s)

    @property
    def busbw(self) -> float:
        """Bytes per second that each rank's link must have carried at least."""
        return busbw(self.op, self.ranks, self.nbytes, self.times.median_s)

    def to_json(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return {
            "backend": self.backend,
            "op": self.op,
            "ranks": self.ranks,
            "nbytes": self.nbytes,
            "dtype": self.dtype,
            **asdict(self.times),
            "algbw": self.algbw,
            "busbw": self.busbw,
            "correct": self.correct,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Row:
        """Return the row that `to_json` wrote."""
        times = Summary(**{name: record[name] for name in Summary.__dataclass_fields__})
        own = {name: record[name] for name in ("backend", "op", "ranks", "nbytes", "dtype", "correct")}
        return cls(times=times, **own)


KIND, SCHEMA = "bench-collectives", 1


_COLUMNS = (
    *("backend", "op", "ranks", "nbytes", "dtype", "iterations", "median_s", "p95_s", "min_s", "max_s"),
    *("slowest_rank", "slowest_share", "algbw", "busbw", "correct"),
)


@dataclass(frozen=True)
class Result:
    """A measurement.

    Attributes:
        command: the line that made it.
        machine: where, as `paceline.tools.result_files.machine_record` tells.
        settings: how, with the versions of what took part, what was left out and why, and whether it is complete.
        rows: what was found.
    """

    command: str
    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    rows: Sequence[Row]

    def to_json(self) -> dict[str, Any]:
        """Return the measurement for JSON."""
        return {
            "kind": KIND,
            "schema": SCHEMA,
            "command": self.command,
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "rows": [row.to_json() for row in self.rows],
        }


def installed() -> dict[str, str]:
    """Return the versions of what bears on the times."""
    return versions(["paceline", "torch", "mpi4py", "mpich"])


def write_json(path: Path, result: Result) -> None:
    """Write a measurement; the file is whole or not there at all."""
    files.write_json(path, result.to_json())


def read_result(path: Path) -> Result:
    """Return the measurement that `write_json` wrote.

    Raises:
        UsageError: the file can't be read, or holds something else.
    """
    remedy = "name a file that `paceline bench collectives --json FILE` wrote"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if (record["kind"], record["schema"]) != (KIND, SCHEMA):
            raise UsageError(f"{path} holds {record['kind']!r}, schema {record['schema']}", remedy=remedy)
        rows = [Row.from_json(row) for row in record["rows"]]
        return Result(record["command"], record["machine"], record["settings"], rows)
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}", remedy=remedy) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is no result of bench collectives ({error})", remedy=remedy) from error


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    """Write the rows as CSV, one line each; seconds, and bytes per second."""

    def write(beside: Path) -> None:
        with beside.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, _COLUMNS, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(row.to_json() for row in rows)

    files.write_atomic(path, write)


FOOTER = (
    "Time: the slowest rank's in each iteration, then the median over iterations. algbw = S ÷ that median.\n"
    "busbw = algbw × f as in nccl-tests: f = 2(n−1)/n for all-reduce; (n−1)/n for reduce-scatter, all-gather and\n"
    "all-to-all; else 1. It makes numbers of ranks comparable and is no wire's speed. GB/s: 10⁹ bytes per second.\n"
    "p95: over iterations. slowest: the rank that was last most often, and in which share of the iterations."
)


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return one table for each operation, by ranks and size; the fastest correct backend of a case is bold."""
    ops = dict.fromkeys(row.op for row in rows)
    return [table([row for row in rows if row.op == op]) for op in ops]


def table(rows: Sequence[Row]) -> Table:
    """Return the rows of one operation; a wrong one is red."""
    first = rows[0]
    made = Table(title=f"{first.op}, {first.dtype}", title_justify="left", pad_edge=False, box=None)
    for name in ("ranks", "S"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("backend", no_wrap=True)
    for name in ("ms", "p95 ms", "algbw GB/s", "busbw GB/s", "slowest", "iterations"):
        made.add_column(name, justify="right", no_wrap=True)
    ordered = sorted(
        rows, key=lambda row: (row.ranks, row.nbytes)
    )  # stable: backends stay as they were named
    for row in ordered:
        rivals = [other for other in rows if (other.ranks, other.nbytes) == (row.ranks, row.nbytes)]
        right = [other.times.median_s for other in rivals if other.correct]
        fastest = len(rivals) > 1 and row.correct and row.times.median_s == min(right)
        made.add_row(
            *_cells(row), style="" if row.correct and not fastest else "bold" if row.correct else "red"
        )
        if not row.correct:
            made.add_row("", "", "WRONG RESULT", style="red")
    return made


def _cells(row: Row) -> list[str]:
    times = row.times
    return [
        str(row.ranks),
        format_size(row.nbytes),
        row.backend,
        _short(1e3 * times.median_s),
        _short(1e3 * times.p95_s),
        _short(row.algbw / 1e9),
        _short(row.busbw / 1e9),
        f"{times.slowest_rank} ({times.slowest_share:.0%})",
        str(times.iterations),
    ]


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 999.5 else f"{value:.3g}" if value >= 1e-3 else f"{value:.1e}"
