"""Files that ``paceline simulate`` writes: all of it as JSON, the table as CSV, a chart by nodes."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from paceline.bench.facts import versions
from paceline.cli.simulate_cluster_asked import Asked
from paceline.cli.writable import checked_files
from paceline.durable import write_json, write_text
from paceline.errors import UsageError
from paceline.report.cluster_words import sentences
from paceline.simulate.cluster.run import LOSSES, ClusterRow
from paceline.units import format_count

__all__ = ["plan_files", "result"]

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
        "rows": [row.facts() for row in rows],
        "sentences": sentences(rows),
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
        facts = row.facts()
        bands = [(facts[band] or {}).get(part) for band in _BANDS for part in parts]
        ledger = [facts["ledger"][name] for name in ("useful", *LOSSES)]
        writer.writerow([*(facts[name] for name in plain), *bands, *ledger])
    write_text(path, text.getvalue())


def _draw(path: Path, asked: Asked, rows: Sequence[ClusterRow], command: str) -> None:
    from paceline.report.cluster_charts import by_nodes

    how = f"{asked.settings['batch']} batch, {asked.plan.strategy}"
    title = f"{format_count(asked.parameters)} parameters, {how}, links of {asked.settings['link']}"
    if asked.settings["profile"] is not None:
        title = f"{format_count(asked.parameters)} parameters, {how}, {asked.settings['backend']} as measured"
    by_nodes(rows, title=title, price=asked.plan.price).save(path)
