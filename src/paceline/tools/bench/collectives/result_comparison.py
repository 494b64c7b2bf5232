"""Two results beside each other: what got faster or slower, what only one has, and what else differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from paceline._core.format import format_seconds, format_size
from paceline.tools.bench.collectives.collectives_rows import Key, Result, Row
from paceline.tools.bench.collectives.measurement_journal import differences

__all__ = ["Comparison", "Pair", "compare", "in_words", "table"]

_NOT_COMPARED = ("left_out", "complete", "backends", "ops", "ranks", "sizes", "versions")
"""Settings that say which rows there are, which the rows tell better, and versions, which have lines of their own."""


@dataclass(frozen=True)
class Pair:
    """The same case in two results."""

    before: Row
    after: Row

    @property
    def ratio(self) -> float:
        """Time of the second ÷ time of the first, medians: below 1, the second is faster."""
        return self.after.times.median_s / self.before.times.median_s


@dataclass(frozen=True)
class Comparison:
    """What two results have in common.

    Attributes:
        pairs: cases that both have, in the order of the first.
        only_first, only_second: rows that one of them has.
        differing: machine, versions and settings that differ, in words.
    """

    pairs: Sequence[Pair]
    only_first: Sequence[Row]
    only_second: Sequence[Row]
    differing: Sequence[str]


def compare(first: Result, second: Result) -> Comparison:
    """Return the comparison of two results."""
    ours, theirs = _by_key(first), _by_key(second)
    return Comparison(
        pairs=[Pair(row, theirs[key]) for key, row in ours.items() if key in theirs],
        only_first=[row for key, row in ours.items() if key not in theirs],
        only_second=[row for key, row in theirs.items() if key not in ours],
        differing=_differing(first, second),
    )


def _by_key(result: Result) -> dict[Key, Row]:
    return {row.key: row for row in result.rows}


def _differing(first: Result, second: Result) -> list[str]:
    settings = [
        {name: value for name, value in each.settings.items() if name not in _NOT_COMPARED}
        for each in (first, second)
    ]
    versions = [each.settings.get("versions", {}) for each in (first, second)]
    return [
        *(f"machine, {line}" for line in differences(first.machine, second.machine)),
        *(f"version of {line}" for line in differences(*versions)),
        *(f"setting {line}" for line in differences(*settings)),
    ]


def in_words(row: Row) -> str:
    """Return what a row is about: ``"gloo all-reduce, 2 ranks, 1 MB float32"``."""
    return f"{row.backend} {row.op}, {row.ranks} ranks, {format_size(row.nbytes)} {row.dtype}"


def table(pairs: Sequence[Pair]) -> Table:
    """Return the cases that both results have, with times and their ratio; a wrong result is red."""
    made = Table(title="B ÷ A below 1: B is faster", title_justify="left", pad_edge=False, box=None)
    for name in ("op", "backend"):
        made.add_column(name, no_wrap=True)
    for name in ("ranks", "S", "A", "B", "B ÷ A"):
        made.add_column(name, justify="right", no_wrap=True)
    for pair in pairs:
        row, other = pair.before, pair.after
        times = [
            format_seconds(each.times.median_s) + ("" if each.correct else " WRONG") for each in (row, other)
        ]
        cells = [row.op, row.backend, str(row.ranks), format_size(row.nbytes), *times, f"{pair.ratio:.2f}"]
        made.add_row(*cells, style="" if row.correct and other.correct else "red")
    return made
