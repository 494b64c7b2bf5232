"""What ``paceline simulate`` shows: the table, and what follows from it in sentences.

Files that ``paceline simulate`` writes: all of it as JSON, the table as CSV, a chart by nodes.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline._core.files import write_json, write_text
from paceline._core.format import format_count, format_duration, format_percent, format_ratio, format_seconds
from paceline.errors import UsageError
from paceline.tools.cli.simulate.simulate_cluster_request import Asked
from paceline.tools.console_table import print_wide
from paceline.tools.result_files import checked_files, versions
from paceline.tools.simulate.cluster.cluster_simulation import LOSSES, ClusterRow
from paceline.tools.simulate.cluster.cluster_text import cluster_findings

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["FOOTER", "plan_files", "result", "show"]

FOOTER = (
    "step: the median, and what one in twenty steps takes at least. efficiency: useful time as a share of all time,\n"
    "the mean over jobs and where nine in ten lie; then what the rest is lost to. × one rank: work beside one alone."
)


def show(asked: Asked, rows: Sequence[ClusterRow]) -> None:
    """Print the table and the sentences."""
    print_wide(_table(asked, rows))
    typer.echo(f"{FOOTER}\n")
    typer.echo("\n".join(cluster_findings(rows)))


def _table(asked: Asked, rows: Sequence[ClusterRow]) -> Table:
    from rich.table import Table

    losses = [name for name in LOSSES if any(row.ledger[name] >= 5e-4 for row in rows)]
    table = Table(box=None, pad_edge=False)
    ranks = ["ranks"] * (asked.plan.network.per_node > 1)
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
    cells = [f"{row.nodes:,}", *([f"{row.ranks:,}"] * (plan.network.per_node > 1))]
    cells += [
        "" if row.ranks == 1 else row.algorithm,
        format_seconds(row.step.p50),
        format_seconds(row.step.p95),
    ]
    band = f"{format_percent(row.efficiency.p5)} to {format_percent(row.efficiency.p95)}"
    cells += [format_percent(row.efficiency.mean), "never ends" if row.stuck else band]
    cells += ["" if row.ledger[name] < 5e-4 else format_percent(row.ledger[name]) for name in losses]
    cells.append(format_ratio(row.speedup))
    if row.intervals is not None:
        cells.append(format_duration(row.intervals.used))
    if plan.work is not None:
        cells.append("" if row.job_seconds is None else format_duration(row.job_seconds.mean))
    if plan.price is not None:
        cells.append("" if row.cost is None else format_count(row.cost.mean))
    return cells


_SCHEMA = 1


_Writer = Callable[[Path, Asked, Sequence[ClusterRow], str], None]


_BANDS = ("step", "efficiency", "job_seconds", "cost")


def plan_files(json_file: Path | None, out: Path | None, numbers: int) -> dict[Path, _Writer]:
    """Return what writes which files, once it is clear that they can be written.

    Args:
        json_file, out: as asked. numbers: how many numbers of nodes there are.

    Raises:
        UsageError: a file can't be written, or a chart can't be drawn.
    """
    if out is not None and numbers < 2:
        raise UsageError("--out draws a chart over nodes", remedy="pass two numbers of --nodes or more")
    in_folder: dict[str, _Writer] = {
        "result.json": _write_json,
        "table.csv": _write_csv,
        "nodes.png": _draw,
    }
    return checked_files(json_file, _write_json, out, in_folder)


def result(asked: Asked, rows: Sequence[ClusterRow], command: str) -> dict[str, Any]:
    """Return all of it for JSON."""
    return {
        "kind": "simulate-cluster",
        "schema": _SCHEMA,
        "command": command,
        "versions": versions(("paceline", "numpy")),
        "settings": dict(asked.settings),
        "parameters": asked.parameters,
        "step_seconds": asked.plan.step_seconds,
        "computing_slows": asked.plan.computing_slows,
        "calls_slow": asked.plan.calls_slow,
        "rows": [row.to_record() for row in rows],
        "sentences": cluster_findings(rows),
    }


def _write_json(path: Path, asked: Asked, rows: Sequence[ClusterRow], command: str) -> None:
    write_json(path, result(asked, rows, command))


def _write_csv(path: Path, asked: Asked, rows: Sequence[ClusterRow], command: str) -> None:
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    plain = (
        "nodes",
        "ranks",
        "algorithm",
        "compute_seconds",
        "comm_seconds",
        "speedup",
        "mtbf_seconds",
        "failures",
    )
    parts = ("mean", "p5", "p50", "p95")
    writer.writerow([*plain, *(f"{band}_{part}" for band in _BANDS for part in parts), "useful", *LOSSES])
    for row in rows:
        to_record = row.to_record()
        bands = [(to_record[band] or {}).get(part) for band in _BANDS for part in parts]
        ledger = [to_record["ledger"][name] for name in ("useful", *LOSSES)]
        writer.writerow([*(to_record[name] for name in plain), *bands, *ledger])
    write_text(path, text.getvalue())


def _draw(path: Path, asked: Asked, rows: Sequence[ClusterRow], command: str) -> None:
    from paceline.tools.report.charts.simulation_charts import cluster_chart

    how = f"{asked.settings['batch']} batch, {asked.plan.strategy}"
    title = f"{format_count(asked.parameters)} parameters, {how}, links of {asked.settings['link']}"
    if asked.settings["profile"] is not None:
        title = f"{format_count(asked.parameters)} parameters, {how}, {asked.settings['backend']} as measured"
    cluster_chart(rows, title=title, price=asked.plan.price).save(path)
