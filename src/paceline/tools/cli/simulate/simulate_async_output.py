"""Output of ``paceline simulate async``: table, findings, JSON, CSV and charts."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline._core.files import write_json, write_text
from paceline._core.format import format_decimal, format_seconds
from paceline.tools.cli.simulate.simulate_async_request import AsyncRequest
from paceline.tools.console_table import make_table, print_wide
from paceline.tools.result_files import checked_files, versions
from paceline.tools.simulate.async_results import AsyncRow, async_findings

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["FOOTER", "plan_files", "result", "show"]

FOOTER = (
    "loss: held out, of the global model at the end; best worker: best of the workers' own parameters.\n"
    "steps/s: of all. bytes: sent and received per worker, network headers included.\n"
    "staleness: in rounds, median / maximum."
)


def show(request: AsyncRequest, rows: Sequence[AsyncRow]) -> None:
    """Print the table and the findings."""
    print_wide(_table(rows))
    typer.echo(f"{FOOTER}\n")
    for line in (*request.notes, *(f"left out: {each}" for each in request.left_out)):
        typer.echo(line)
    typer.echo("")
    typer.echo("\n".join(async_findings(rows, request.target, request.plan.rules.outer.name)))


def _table(rows: Sequence[AsyncRow]) -> Table:
    columns = ["setting", "loss", "best worker", "virtual time", "to the target", "× DDP", "steps/s"]
    columns += ["bytes per worker", "staleness", "refused"]
    return make_table(columns, [[row.name, *_cells(row)] for row in rows])


def _cells(row: AsyncRow) -> list[str]:
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
        "" if row.is_ddp else str(sum(row.refused.values())),
    ]


_Writer = Callable[[Path, AsyncRequest, Sequence[AsyncRow], str], object]


_SCHEMA = 1


_COLUMNS = (
    "name", "every", "delay", "loss", "best", "seconds", "seconds_to_target", "speedup", "steps",
    "steps_per_second", "nbytes", "staleness_median", "staleness_max", "updates", "hub_busy", "diverged", "digest",
)  # fmt: skip


def plan_files(json_file: Path | None, out: Path | None) -> dict[Path, _Writer]:
    """Return the writer of each result file.

    Raises:
        UsageError: a file is not writable, or matplotlib is not installed.
    """
    in_folder: dict[str, _Writer] = {
        "result.json": _write_json,
        "table.csv": _write_csv,
        "loss.png": _draw_loss,
        "time-to-loss.png": _draw_times,
    }
    return checked_files(json_file, _write_json, out, in_folder)


def result(request: AsyncRequest, rows: Sequence[AsyncRow], command: str) -> dict[str, Any]:
    """Return the result for JSON."""
    return {
        "kind": "simulate-async",
        "schema": _SCHEMA,
        "command": command,
        "versions": versions(("paceline", "torch", "numpy")),
        "settings": dict(request.settings),
        "step_seconds": [machine.step_seconds for machine in request.plan.machines],
        "left_out": list(request.left_out),
        "notes": list(request.notes),
        "rows": [row.to_record() for row in rows],
        "sentences": async_findings(rows, request.target, request.plan.rules.outer.name),
    }


def _write_json(path: Path, request: AsyncRequest, rows: Sequence[AsyncRow], command: str) -> None:
    write_json(path, result(request, rows, command), indent=None)


def _write_csv(path: Path, request: AsyncRequest, rows: Sequence[AsyncRow], command: str) -> None:
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_COLUMNS, "refused"])
    for row in rows:
        to_record = row.to_record()
        writer.writerow([*(to_record[name] for name in _COLUMNS), sum(row.refused.values())])
    write_text(path, text.getvalue())


def _draw_loss(path: Path, request: AsyncRequest, rows: Sequence[AsyncRow], command: str) -> None:
    from paceline.tools.report.charts.simulation_charts import loss_chart

    loss_chart(rows, title=_title(request)).save(path)


def _draw_times(path: Path, request: AsyncRequest, rows: Sequence[AsyncRow], command: str) -> None:
    from paceline.tools.report.charts.simulation_charts import time_to_loss_chart

    aim = "DDP's final loss" if request.target is None else f"a loss of {request.target:g}"
    time_to_loss_chart(rows, aim=aim).save(path)


def _title(request: AsyncRequest) -> str:
    settings = request.settings
    return (
        f"{settings['task']} task, {settings['workers']} workers of speeds {settings['speeds']}, "
        f"links of {settings['link']}"
    )
