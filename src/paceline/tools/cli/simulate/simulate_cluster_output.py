"""Output of ``paceline simulate``: table, findings, JSON, CSV and chart."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline._core.files import write_json, write_text
from paceline._core.format import (
    format_count,
    format_duration,
    format_percent,
    format_ratio,
    format_seconds,
    plural,
)
from paceline.errors import UsageError
from paceline.tools.cli.simulate.simulate_cluster_request import ClusterRequest
from paceline.tools.console_table import make_table, print_wide
from paceline.tools.result_files import checked_files, versions
from paceline.tools.simulate.cluster.cluster_simulation import LOSSES, ClusterRow
from paceline.tools.simulate.cluster.cluster_text import cluster_findings
from paceline.tools.simulate.cluster.failure_cost import FAILURE_PARTS

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["FOOTER", "plan_files", "result", "show"]

FOOTER = (
    "step: median and 95th percentile. efficiency: useful share of all time, mean and range of 90 % of the jobs;\n"
    "then the losses. × one rank: throughput relative to a single rank."
)


def show(request: ClusterRequest, rows: Sequence[ClusterRow]) -> None:
    """Print the table and the findings."""
    print_wide(_table(request, rows))
    typer.echo(f"{FOOTER}\n")
    last = [row for row in rows if row.nodes == rows[-1].nodes and row.failure_cost]
    if last:
        typer.echo(f"A failure of {plural(last[0].nodes, 'node')} costs, on average:")
        print_wide(_cost_table(last))
        typer.echo(_batch_note(request, last))
    typer.echo("\n".join(cluster_findings(rows)))


def _table(request: ClusterRequest, rows: Sequence[ClusterRow]) -> Table:
    losses = [name for name in LOSSES if any(row.ledger[name] >= 5e-4 for row in rows)]
    ranks = ["ranks"] * (request.plan.network.per_node > 1)
    ways = ["recovery"] * any(row.recovery for row in rows)
    columns = ["nodes", *ranks, "all-reduce", "step", "1 in 20", *ways]
    columns += ["efficiency", "jobs", *losses, "× one rank"]
    columns += ["checkpoint every"] * any(row.intervals for row in rows)
    columns += ["the job"] * (request.plan.work is not None) + ["cost"] * (request.plan.price is not None)
    cells = [
        _cells(request, row, losses, again=number > 0 and row.nodes == rows[number - 1].nodes)
        for number, row in enumerate(rows)
    ]
    return make_table(columns, cells, left=0)


def _cells(request: ClusterRequest, row: ClusterRow, losses: Sequence[str], *, again: bool) -> list[str]:
    """Return the cells of a row; those of all ways of recovery are empty if it has the nodes of the row before."""
    plan = request.plan
    cells = [f"{row.nodes:,}", *([f"{row.ranks:,}"] * (plan.network.per_node > 1))]
    cells += [
        "" if row.ranks == 1 else row.algorithm,
        format_seconds(row.step.p50),
        format_seconds(row.step.p95),
    ]
    if again:
        cells = [""] * len(cells)
    cells += [row.recovery] if row.recovery else []
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


def _cost_table(rows: Sequence[ClusterRow]) -> Table:
    """Return what a failure costs with each way of recovery."""
    parts = [name for name in FAILURE_PARTS if any(row.failure_cost[name] for row in rows)]
    cells = [
        [
            row.recovery or "",
            *(format_seconds(row.failure_cost[name]) if row.failure_cost[name] else "" for name in parts),
            format_seconds(sum(row.failure_cost.values())),
        ]
        for row in rows
    ]
    return make_table(["recovery", *parts, "in all"], cells, left=1)


def _batch_note(request: ClusterRequest, rows: Sequence[ClusterRow]) -> str:
    """Say what the missing ranks change, if any are."""
    live = next((row for row in rows if row.recovery == "live"), None)
    if live is None or not live.failure_cost["slower steps"]:
        return ""
    ranks = plural(live.ranks, "rank")
    if request.plan.live.virtual_ranks:
        return f"While one of {ranks} is missing, the global batch stays: others compute its virtual ranks.\n"
    return (
        f"Without virtual ranks, while one of {ranks} is missing, the global batch is smaller by its share, and the "
        "result differs.\n"
    )


_SCHEMA = 2


_Writer = Callable[[Path, ClusterRequest, Sequence[ClusterRow], str], None]


_BANDS = ("step", "efficiency", "job_seconds", "cost")


def plan_files(json_file: Path | None, out: Path | None, numbers: int) -> dict[Path, _Writer]:
    """Return the writer of each result file.

    Args:
        json_file: file of ``--json``.
        out: folder of ``--out``.
        numbers: how many numbers of nodes are simulated.

    Raises:
        UsageError: a file is not writable, or there are too few numbers for a chart.
    """
    if out is not None and numbers < 2:
        raise UsageError("--out draws a chart over nodes", remedy="pass two numbers of --nnodes or more")
    in_folder: dict[str, _Writer] = {
        "result.json": _write_json,
        "table.csv": _write_csv,
        "nodes.png": _draw,
    }
    return checked_files(json_file, _write_json, out, in_folder)


def result(request: ClusterRequest, rows: Sequence[ClusterRow], command: str) -> dict[str, Any]:
    """Return the result for JSON."""
    return {
        "kind": "simulate-cluster",
        "schema": _SCHEMA,
        "command": command,
        "versions": versions(("paceline", "numpy")),
        "settings": dict(request.settings),
        "parameters": request.parameters,
        "step_seconds": request.plan.step_seconds,
        "computing_slows": request.plan.computing_slows,
        "calls_slow": request.plan.calls_slow,
        "rows": [row.to_record() for row in rows],
        "sentences": cluster_findings(rows),
    }


def _write_json(path: Path, request: ClusterRequest, rows: Sequence[ClusterRow], command: str) -> None:
    write_json(path, result(request, rows, command))


def _write_csv(path: Path, request: ClusterRequest, rows: Sequence[ClusterRow], command: str) -> None:
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    plain = (
        "nodes",
        "ranks",
        "recovery",
        "algorithm",
        "compute_seconds",
        "comm_seconds",
        "speedup",
        "mtbf_seconds",
        "rollback_seconds",
        "failures",
    )
    parts = ("mean", "p5", "p50", "p95")
    costs = [f"failure: {name}" for name in FAILURE_PARTS]
    writer.writerow(
        [*plain, *(f"{band}_{part}" for band in _BANDS for part in parts), "useful", *LOSSES, *costs]
    )
    for row in rows:
        to_record = row.to_record()
        bands = [(to_record[band] or {}).get(part) for band in _BANDS for part in parts]
        ledger = [to_record["ledger"][name] for name in ("useful", *LOSSES)]
        cost = [row.failure_cost.get(name) for name in FAILURE_PARTS]
        writer.writerow([*(to_record[name] for name in plain), *bands, *ledger, *cost])
    write_text(path, text.getvalue())


def _draw(path: Path, request: ClusterRequest, rows: Sequence[ClusterRow], command: str) -> None:
    from paceline.tools.report.charts.simulation_charts import cluster_chart

    how = f"{request.settings['scaling']} scaling, {request.plan.strategy}"
    title = f"{format_count(request.parameters)} parameters, {how}, links of {request.settings['link']}"
    if request.settings["profile"] is not None:
        title = (
            f"{format_count(request.parameters)} parameters, {how}, {request.settings['backend']} as measured"
        )
    cluster_chart(rows, title=title, price=request.plan.price).save(path)
