"""What ``paceline simulate async`` shows: the table, and what follows from it in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from paceline.cli.simulate_asked import Asked
from paceline.cli.wide_table import print_wide
from paceline.report.async_words import sentences
from paceline.simulate.rows import Row
from paceline.units import format_decimal, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["FOOTER", "show"]

FOOTER = (
    "loss: held out, of the centre at the end; best worker: the best of the workers' own parameters. steps/s: of all.\n"
    "bytes: sent and received by a worker, headers of the network included. staleness: in rounds, median / most."
)


def show(asked: Asked, rows: Sequence[Row]) -> None:
    """Print the table and the sentences."""
    print_wide(_table(asked, rows))
    typer.echo(f"{FOOTER}\n")
    for line in (*asked.notes, *(f"left out: {each}" for each in asked.left_out)):
        typer.echo(line)
    typer.echo("")
    typer.echo("\n".join(sentences(rows, asked.target, asked.plan.rules.outer.name)))


def _table(asked: Asked, rows: Sequence[Row]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("setting", no_wrap=True)
    columns = ["loss", "best worker", "virtual time", "to the target", "× DDP", "steps/s", "bytes a worker"]
    for name in (*columns, "staleness", "refused"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.name, *_cells(row))
    return table


def _cells(row: Row) -> list[str]:
    stale = row.staleness_median, row.staleness_max
    ages = "" if None in stale else f"{stale[0]:.2g} / {stale[1]:.2g}"
    return [
        "diverged" if row.diverged else f"{row.loss:.4g}",
        f"{row.best:.4g}",
        format_seconds(row.seconds),
        "never" if row.seconds_to_target is None else format_seconds(row.seconds_to_target),
        "" if row.speedup is None else f"{row.speedup:.3g}",
        f"{row.steps_per_second:.3g}",
        format_decimal(row.nbytes),
        ages,
        "" if row.lockstep else str(sum(row.refused.values())),
    ]
