"""What ``paceline simulate async`` writes: JSON, the table as CSV, two charts."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from paceline.bench.facts import versions
from paceline.cli.simulate_asked import Asked
from paceline.cli.writable import checked_files
from paceline.durable import write_json, write_text
from paceline.report.async_words import sentences
from paceline.simulate.rows import Row

__all__ = ["plan_files", "result"]

_Writer = Callable[[Path, Asked, Sequence[Row], str], object]
_SCHEMA = 1
_COLUMNS = (
    "name", "every", "delay", "loss", "best", "seconds", "seconds_to_target", "speedup", "steps",
    "steps_per_second", "nbytes", "staleness_median", "staleness_max", "updates", "hub_busy", "diverged", "digest",
)  # fmt: skip


def plan_files(json_file: Path | None, out: Path | None) -> dict[Path, _Writer]:
    """Return what writes which files, once it is clear that they can be written.

    Raises:
        UsageError: a file can't be written, or charts can't be drawn.
    """
    in_folder: dict[str, _Writer] = {
        "result.json": _write_json,
        "table.csv": _write_csv,
        "loss.png": _draw_loss,
        "time-to-loss.png": _draw_times,
    }
    return checked_files(json_file, _write_json, out, in_folder)


def result(asked: Asked, rows: Sequence[Row], command: str) -> dict[str, Any]:
    """Return all of it for JSON."""
    return {
        "kind": "simulate-async",
        "schema": _SCHEMA,
        "command": command,
        "versions": versions(("paceline", "torch", "numpy")),
        "settings": dict(asked.settings),
        "step_seconds": [machine.step_seconds for machine in asked.plan.machines],
        "left_out": list(asked.left_out),
        "notes": list(asked.notes),
        "rows": [row.facts() for row in rows],
        "sentences": sentences(rows, asked.target, asked.plan.rules.outer.name),
    }


def _write_json(path: Path, asked: Asked, rows: Sequence[Row], command: str) -> None:
    write_json(path, result(asked, rows, command), indent=None)


def _write_csv(path: Path, asked: Asked, rows: Sequence[Row], command: str) -> None:
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_COLUMNS, "refused"])
    for row in rows:
        facts = row.facts()
        writer.writerow([*(facts[name] for name in _COLUMNS), sum(row.refused.values())])
    write_text(path, text.getvalue())


def _draw_loss(path: Path, asked: Asked, rows: Sequence[Row], command: str) -> None:
    from paceline.report.async_charts import losses

    losses(rows, title=_title(asked)).save(path)


def _draw_times(path: Path, asked: Asked, rows: Sequence[Row], command: str) -> None:
    from paceline.report.async_charts import times

    aim = "the loss that DDP ends with" if asked.target is None else f"a loss of {asked.target:g}"
    times(rows, aim=aim).save(path)


def _title(asked: Asked) -> str:
    settings = asked.settings
    return (
        f"{settings['task']} task, {settings['workers']} workers of speeds {settings['speeds']}, "
        f"links of {settings['link']}"
    )
