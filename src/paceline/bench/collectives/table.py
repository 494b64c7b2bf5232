"""Rows as tables for a terminal: one per operation."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from paceline.bench.collectives.rows import Row
from paceline.units import format_size

__all__ = ["FOOTER", "table", "tables"]

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
