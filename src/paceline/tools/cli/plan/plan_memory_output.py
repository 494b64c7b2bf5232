"""Output of ``paceline plan memory``: the answer, a comparison of settings, the ledger; JSON, CSV and a chart."""

from __future__ import annotations

import csv
import shlex
import sys
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline._core.files import write_json, write_text
from paceline._core.format import format_bytes, format_count
from paceline.tools.console_table import make_table, print_wide
from paceline.tools.plan.memory.memory_fit import describe_alternatives
from paceline.tools.result_files import checked_files, versions

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.tools.plan.memory.memory_fit import MemoryAlternative
    from paceline.tools.plan.memory.memory_forecast import MemoryForecast
    from paceline.tools.report.charts.memory_chart import MemoryCurve

__all__ = ["answer", "curve_of", "memory_files", "show_forecasts"]

_STATES = ("parameters", "buffers", "gradients", "buckets", "optimizer state")
_ACTIVATIONS = ("activations", "autocast copies", "recomputed", "inputs")
_POINTS = 2000  # most points of a curve


def show_forecasts(
    model: str, forecasts: Sequence[MemoryForecast], alternatives: Sequence[MemoryAlternative]
) -> None:
    """Print the answer first, then the reasons."""
    first = forecasts[0]
    typer.echo(answer(model, first))
    if advice := describe_alternatives(alternatives):
        typer.echo(advice)
    typer.echo("")
    if len(forecasts) > 1:
        print_wide(_comparison(forecasts))
    typer.echo(f"{model}, {first.setting.name}: the peak is in {first.ledger.where}.\n")
    print_wide(_ledger(first))
    columns = ("most activations and temporaries", "operator", "bytes")
    rows = [
        (module or "(outside of modules)", operator, format_bytes(nbytes))
        for module, operator, nbytes in first.ledger.largest
    ]
    print_wide(make_table(columns, rows, left=2))
    if first.building_nbytes > first.steps.peak().nbytes:
        typer.echo(
            f"Before the first step it takes {format_bytes(first.building_nbytes)}, because every rank builds the "
            "whole model; if that does not fit on the device, build it on the host."
        )
    if first.prediction.value_reads:
        typer.echo(
            f"The program read {first.prediction.value_reads} tensor values, which were all 1 here; memory that "
            "depends on values is not counted."
        )


def answer(model: str, forecast: MemoryForecast) -> str:
    """Return the memory of a step, and whether it fits, in a sentence."""
    size = format_count(forecast.prediction.parameters)
    what = (
        f"{model} ({size} parameters), {forecast.setting.name}, {forecast.setting.batch} samples per device"
    )
    if forecast.verdict is None:
        return f"{what}, takes {format_bytes(forecast.ledger.nbytes)} per device."
    return f"{what}, {forecast.verdict.sentence}."


def _comparison(forecasts: Sequence[MemoryForecast]) -> Table:
    rows = []
    for each in forecasts:
        nbytes_of = {line.name: line.nbytes for line in each.ledger.lines}
        states, activations = (
            sum(nbytes_of.get(name, 0) for name in names) for names in (_STATES, _ACTIVATIONS)
        )
        sizes = (states, activations, each.ledger.nbytes - states - activations, each.ledger.nbytes)
        level = each.verdict.answer.value if each.verdict else ""
        rows.append((each.setting.strategy, str(each.setting.ranks), *map(format_bytes, sizes), level))
    columns = ("strategy", "devices", "states", "activations", "the rest", "per device", "")
    table = make_table(columns, rows)
    table.columns[-1].justify = "left"
    return table


def _ledger(forecast: MemoryForecast) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_footer=True)
    table.add_column("at the peak", "all", no_wrap=True)
    table.add_column("bytes", format_bytes(forecast.ledger.nbytes), justify="right", no_wrap=True)
    table.add_column("share", "100 %", justify="right", no_wrap=True)
    table.add_column("rule", no_wrap=True)
    table.add_column("source", no_wrap=True)
    for line in forecast.ledger.lines:
        share = f"{100 * line.nbytes / max(forecast.ledger.nbytes, 1):.0f} %"
        table.add_row(line.name, format_bytes(line.nbytes), share, line.rule, line.source)
    return table


_Writer = Callable[
    [Path, str, "Sequence[MemoryForecast]", "Sequence[MemoryAlternative]", Sequence[dict[str, Any]]], object
]


def memory_files(json_file: Path | None, out: Path | None) -> dict[Path, _Writer]:
    """Return the writer of each output file, once all are known to be writable.

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
    forecasts: Sequence[MemoryForecast],
    alternatives: Sequence[MemoryAlternative],
    checks: Sequence[dict[str, Any]],
) -> None:
    record = {
        "kind": "plan-memory",
        "schema": 1,
        "command": shlex.join(["paceline", *sys.argv[1:]]),
        "versions": versions(("paceline", "torch")),
        "model": model,
        "parameters": forecasts[0].prediction.parameters,
        "forecasts": [each.facts() for each in forecasts],
        "alternatives": [
            {"change": each.change, "nbytes": each.verdict.nbytes, "answer": each.verdict.answer.value}
            for each in alternatives
        ],
        "checks": list(checks),
    }
    write_json(path, record)


def _write_csv(path: Path, _model: str, forecasts: Sequence[MemoryForecast], *_: object) -> None:
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["strategy", "devices", "line", "nbytes", "rule", "source"])
    for each in forecasts:
        setting = (each.setting.strategy, each.setting.ranks)
        writer.writerows(
            (*setting, line.name, line.nbytes, line.rule, line.source) for line in each.ledger.lines
        )
    write_text(path, text.getvalue())


def _draw(path: Path, model: str, forecasts: Sequence[MemoryForecast], *_: object) -> None:
    from paceline.tools.report.charts.memory_chart import memory_over_step

    memory_over_step(curve_of(model, forecasts[0])).save(path)


def curve_of(model: str, forecast: MemoryForecast) -> MemoryCurve:
    """Return the curve of a forecast's steps, without building and wrapping."""
    from paceline.tools.plan.memory.memory_timeline import CATEGORIES
    from paceline.tools.report.charts.memory_chart import MemoryCurve

    timeline = forecast.steps
    marks = [mark for mark in timeline.marks if mark.phase not in ("build", "wrap")]
    peak = timeline.peak()
    start = min(marks[0].tick if marks else 0, peak.tick)
    total = timeline.held()[start:]
    stride = -(-len(total) // _POINTS)
    # of every run of ticks, the one with the most memory, so that no peak is lost
    picks = [at + int(total[at : at + stride].argmax()) for at in range(0, len(total), stride)]
    verdict = forecast.verdict
    return MemoryCurve(
        held={name: timeline.held(name)[start:][picks].tolist() for name in CATEGORIES},
        phases=[((mark.tick - start) // stride, f"{mark.phase} {mark.step + 1}") for mark in marks],
        peak_at=(peak.tick - start) // stride,
        peak_label=f"{format_bytes(peak.nbytes)}: {forecast.ledger.where}",
        capacity_nbytes=verdict.capacity_nbytes if verdict else None,
        title=f"{model}, {forecast.setting.name}, {forecast.setting.batch} samples per device",
    )
