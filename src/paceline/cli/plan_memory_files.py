"""What ``paceline plan memory`` writes: JSON, the ledgers as CSV, the picture of memory over the steps."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.writable import checked_files
from paceline.durable import write_json, write_text

if TYPE_CHECKING:
    from paceline.bench.footprint.forecast import Forecast
    from paceline.plan.memory.verdict import Alternative
    from paceline.report.memory_chart import MemoryCurve

__all__ = ["curve_of", "plan_files"]

_Writer = Callable[
    [Path, str, "Sequence[Forecast]", "Sequence[Alternative]", Sequence[dict[str, Any]], str], object
]
_POINTS = 2000  # of a curve, beyond which ticks are drawn as their largest


def plan_files(json_file: Path | None, out: Path | None) -> dict[Path, _Writer]:
    """Return what writes which files, once it is clear that they can be written.

    Raises:
        UsageError: a file can't be written, or charts can't be drawn.
    """
    in_folder: dict[str, _Writer] = {
        "memory.json": _write_json,
        "ledger.csv": _write_csv,
        "memory.png": _draw,
    }
    return checked_files(json_file, _write_json, out, in_folder)


def _write_json(
    path: Path,
    model: str,
    forecasts: Sequence[Forecast],
    others: Sequence[Alternative],
    checks: Sequence[dict[str, Any]],
    command: str,
) -> None:
    from paceline.bench.facts import versions

    told = {
        "kind": "plan-memory",
        "schema": 1,
        "command": command,
        "versions": versions(("paceline", "torch")),
        "model": model,
        "parameters": forecasts[0].prediction.parameters,
        "forecasts": [each.facts() for each in forecasts],
        "alternatives": [
            {"change": each.change, "nbytes": each.verdict.nbytes, "answer": each.verdict.answer.value}
            for each in others
        ],
        "checks": list(checks),
    }
    write_json(path, told)


def _write_csv(path: Path, _model: str, forecasts: Sequence[Forecast], *_: object) -> None:
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["strategy", "devices", "line", "nbytes", "rule", "source"])
    for each in forecasts:
        for line in each.ledger.lines:
            writer.writerow(
                [each.setting.strategy, each.setting.ranks, line.name, line.nbytes, line.rule, line.source]
            )
    write_text(path, text.getvalue())


def _draw(path: Path, model: str, forecasts: Sequence[Forecast], *_: object) -> None:
    from paceline.report.memory_chart import memory_over_step

    memory_over_step(curve_of(model, forecasts[0])).save(path)


def curve_of(model: str, forecast: Forecast) -> MemoryCurve:
    """Return what is drawn of a forecast: its two steps, not what went before."""
    from paceline.plan.memory.timeline import CATEGORIES
    from paceline.report.memory_chart import MemoryCurve
    from paceline.units import format_bytes

    timeline = forecast.steps
    marks = [mark for mark in timeline.marks if mark.phase not in ("build", "wrap")]
    start = marks[0].tick if marks else 0
    peak = timeline.peak()
    start = min(start, peak.tick)
    total = timeline.held()[start:]
    stride = -(-len(total) // _POINTS)
    # of every run of ticks, the one with the most memory, so that no peak is lost
    picks = [at + int(total[at : at + stride].argmax()) for at in range(0, len(total), stride)]
    held = {name: timeline.held(name)[start:][picks].tolist() for name in CATEGORIES}
    verdict = forecast.verdict
    return MemoryCurve(
        held=held,
        phases=[((mark.tick - start) // stride, f"{mark.phase} {mark.step + 1}") for mark in marks],
        peak_at=(peak.tick - start) // stride,
        peak_told=f"{format_bytes(peak.nbytes)}: {forecast.ledger.where}",
        capacity_nbytes=verdict.capacity_nbytes if verdict else None,
        title=f"{model}, {forecast.setting.name}, {forecast.setting.batch} samples a device",
    )
