"""What ``paceline simulate`` shows: the table, and what follows from it in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from paceline.cli.simulate_cluster_asked import Asked
from paceline.cli.wide_table import print_wide
from paceline.report.cluster_words import duration, percent, sentences, times
from paceline.simulate.cluster.run import LOSSES, ClusterRow
from paceline.units import format_count, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["FOOTER", "show"]

FOOTER = (
    "step: the median, and what one in twenty steps takes at least. efficiency: useful time as a share of all time,\n"
    "the mean over jobs and where nine in ten lie; then what the rest is lost to. × one rank: work beside one alone."
)


def show(asked: Asked, rows: Sequence[ClusterRow]) -> None:
    """Print the table and the sentences."""
    print_wide(_table(asked, rows))
    typer.echo(f"{FOOTER}\n")
    typer.echo("\n".join(sentences(rows)))


def _table(asked: Asked, rows: Sequence[ClusterRow]) -> Table:
    from rich.table import Table

    losses = [name for name in LOSSES if any(row.ledger[name] >= 5e-4 for row in rows)]
    table = Table(box=None, pad_edge=False)
    ranks = ["ranks"] * (asked.plan.carrier.per_node > 1)
    columns = ["nodes", *ranks, "all-reduce", "step", "1 in 20", "efficiency", "jobs", *losses, "× one rank"]
    columns += ["checkpoint every"] * any(row.intervals for row in rows)
    columns += ["the job"] * (asked.plan.work is not None) + ["cost"] * (asked.plan.price is not None)
    for name in columns:
        table.add_column(name, justify="left" if name == "all-reduce" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(asked, row, losses))
    return table


def _cells(asked: Asked, row: ClusterRow, losses: Sequence[str]) -> list[str]:
    """Return a row's cells, in the order of the columns."""
    plan = asked.plan
    cells = [f"{row.nodes:,}", *([f"{row.ranks:,}"] * (plan.carrier.per_node > 1))]
    cells += [
        "" if row.ranks == 1 else row.algorithm,
        format_seconds(row.step.p50),
        format_seconds(row.step.p95),
    ]
    band = f"{percent(row.efficiency.p5)} to {percent(row.efficiency.p95)}"
    cells += [percent(row.efficiency.mean), "never ends" if row.stuck else band]
    cells += ["" if row.ledger[name] < 5e-4 else percent(row.ledger[name]) for name in losses]
    cells.append(times(row.speedup))
    if row.intervals is not None:
        cells.append(duration(row.intervals.used))
    if plan.work is not None:
        cells.append("" if row.job_seconds is None else duration(row.job_seconds.mean))
    if plan.price is not None:
        cells.append("" if row.cost is None else format_count(row.cost.mean))
    return cells
