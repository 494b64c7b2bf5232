"""Tables of the collectives benchmark: the rows of an operation, and two results compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline._core.format import format_seconds, format_size
from paceline.tools.bench.collectives.collectives_rows import CollectiveRow, CollectivesResult
from paceline.tools.console_table import make_table

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "COLLECTIVES_FOOTER",
    "ResultComparison",
    "RowPair",
    "comparison_table",
    "describe_row",
    "list_differences",
    "match_results",
    "operation_table",
    "operation_tables",
]

COLLECTIVES_FOOTER = (
    "Time: the slowest rank's in each iteration, then the median over iterations. algbw = S ÷ that median.\n"
    "busbw = algbw × f as in nccl-tests: f = 2(n−1)/n for all-reduce; (n−1)/n for reduce-scatter, all-gather and\n"
    "all-to-all; else 1. It is comparable between numbers of ranks, but not a link's speed. GB/s: 10⁹ bytes per s.\n"
    "p95: over iterations. slowest: the rank that was last most often, and its share of the iterations."
)
_COLUMNS = ("ranks", "S", "backend", "ms", "p95 ms", "algbw GB/s", "busbw GB/s", "slowest", "iterations")
_NOT_COMPARED = ("left_out", "complete", "backends", "ops", "ranks", "sizes", "versions")
"""Settings that select rows, which are compared themselves, and versions, which are listed separately."""


def operation_tables(rows: Sequence[CollectiveRow]) -> list[Table]:
    """Return one table per operation."""
    ops = dict.fromkeys(row.op for row in rows)
    return [operation_table([row for row in rows if row.op == op]) for op in ops]


def operation_table(rows: Sequence[CollectiveRow]) -> Table:
    """Return the rows of one operation by ranks and size; the fastest correct backend is bold, a wrong one red."""
    table = make_table(_COLUMNS, left=[2], title=f"{rows[0].op}, {rows[0].dtype}")
    for row in sorted(rows, key=lambda row: (row.ranks, row.nbytes)):  # stable: backends stay in their order
        same_case = [other for other in rows if (other.ranks, other.nbytes) == (row.ranks, row.nbytes)]
        right = [other.times.median_s for other in same_case if other.correct]
        fastest = len(same_case) > 1 and row.correct and row.times.median_s == min(right)
        table.add_row(*_cells(row), style="bold" if fastest else "" if row.correct else "red")
        if not row.correct:
            table.add_row("", "", "WRONG RESULT", style="red")
    return table


def _cells(row: CollectiveRow) -> list[str]:
    times = row.times
    return [
        str(row.ranks),
        format_size(row.nbytes),
        row.backend,
        *map(_short, (1e3 * times.median_s, 1e3 * times.p95_s, row.algbw / 1e9, row.busbw / 1e9)),
        f"{times.slowest_rank} ({times.slowest_share:.0%})",
        str(times.iterations),
    ]


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 999.5 else f"{value:.3g}" if value >= 1e-3 else f"{value:.1e}"


@dataclass(frozen=True)
class RowPair:
    """The same case in two results."""

    before: CollectiveRow
    after: CollectiveRow

    @property
    def ratio(self) -> float:
        """Median time of the second ÷ that of the first: below 1, the second is faster."""
        return self.after.times.median_s / self.before.times.median_s


@dataclass(frozen=True)
class ResultComparison:
    """Two results, matched row by row.

    Attributes:
        pairs: cases of both, in the order of the first.
        only_first: rows that only the first has.
        only_second: rows that only the second has.
        differing: machine, versions and settings that differ, as text.
    """

    pairs: Sequence[RowPair]
    only_first: Sequence[CollectiveRow]
    only_second: Sequence[CollectiveRow]
    differing: Sequence[str]


def match_results(first: CollectivesResult, second: CollectivesResult) -> ResultComparison:
    """Return the comparison of two results."""
    ours, theirs = ({row.key: row for row in result.rows} for result in (first, second))
    settings = [
        {name: value for name, value in result.settings.items() if name not in _NOT_COMPARED}
        for result in (first, second)
    ]
    versions = [result.settings.get("versions", {}) for result in (first, second)]
    return ResultComparison(
        pairs=[RowPair(row, theirs[key]) for key, row in ours.items() if key in theirs],
        only_first=[row for key, row in ours.items() if key not in theirs],
        only_second=[row for key, row in theirs.items() if key not in ours],
        differing=[
            *(f"machine, {line}" for line in list_differences(first.machine, second.machine)),
            *(f"version of {line}" for line in list_differences(*versions)),
            *(f"setting {line}" for line in list_differences(*settings)),
        ],
    )


def list_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the differences between two records of plain values, as text.

    Example:
        >>> list_differences({"dtype": "int32", "warmup": 2}, {"dtype": "float32", "warmup": 2})
        ["dtype: 'int32' against 'float32'"]
    """
    return [
        f"{name}: {ours.get(name)!r} against {theirs.get(name)!r}"
        for name in dict.fromkeys([*ours, *theirs])
        if ours.get(name) != theirs.get(name)
    ]


def describe_row(row: CollectiveRow) -> str:
    """Return the case of a row as text: ``"gloo all-reduce, 2 ranks, 1 MB float32"``."""
    return f"{row.backend} {row.op}, {row.ranks} ranks, {format_size(row.nbytes)} {row.dtype}"


def comparison_table(pairs: Sequence[RowPair]) -> Table:
    """Return the cases of both results, with times and their ratio; a wrong result is red."""
    columns = ("op", "backend", "ranks", "S", "A", "B", "B ÷ A")
    table = make_table(columns, left=2, title="B ÷ A below 1: B is faster")
    for pair in pairs:
        row, other = pair.before, pair.after
        times = [
            format_seconds(each.times.median_s) + ("" if each.correct else " WRONG") for each in (row, other)
        ]
        cells = [row.op, row.backend, str(row.ranks), format_size(row.nbytes), *times, f"{pair.ratio:.2f}"]
        table.add_row(*cells, style="" if row.correct and other.correct else "red")
    return table
