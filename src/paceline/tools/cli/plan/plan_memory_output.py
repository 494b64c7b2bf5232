"""What ``paceline plan memory`` prints: the answer, all settings side by side, the ledger of the first.

What ``paceline plan memory`` writes: JSON, the ledgers as CSV, the picture of memory over the steps.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline._core.files import write_json, write_text
from paceline._core.format import format_bytes, format_count
from paceline.tools.console_table import print_wide
from paceline.tools.plan.memory.memory_fit import advice
from paceline.tools.result_files import checked_files

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.tools.plan.memory.memory_fit import Alternative
    from paceline.tools.plan.memory.memory_forecast import Forecast
    from paceline.tools.report.charts.memory_chart import MemoryCurve

__all__ = ["answer", "curve_of", "plan_files", "show"]

_STATES = ("parameters", "buffers", "gradients", "buckets", "optimizer state")


_ACTIVATIONS = ("activations", "autocast copies", "recomputed", "inputs")


def show(model: str, forecasts: Sequence[Forecast], others: Sequence[Alternative]) -> None:
    """Print the answer first, then why."""
    first = forecasts[0]
    typer.echo(answer(model, first))
    if told := advice(others):
        typer.echo(told)
    typer.echo("")
    if len(forecasts) > 1:
        print_wide(_comparison(forecasts))
    typer.echo(f"{model}, {first.setting.name}: the peak is in {first.ledger.where}.\n")
    print_wide(_ledger(first))
    print_wide(_largest(first))
    if first.building_nbytes > first.steps.peak().nbytes:
        typer.echo(
            f"Before the first step it takes {format_bytes(first.building_nbytes)}, for every rank builds the whole "
            "model; where a device has no room for that, build it on the host."
        )
    if first.prediction.questions:
        typer.echo(
            f"The program asked {first.prediction.questions} times for a value and was told 1; memory that depends on "
            "values is not seen."
        )


def answer(model: str, forecast: Forecast) -> str:
    """Return the answer in a sentence."""
    size = format_count(forecast.prediction.parameters)
    told = f"{model} ({size} parameters), {forecast.setting.name}, {forecast.setting.batch} samples a device"
    if forecast.verdict is None:
        return f"{told}, takes {format_bytes(forecast.ledger.nbytes)} a device."
    return f"{told}, {forecast.verdict.sentence}."


def _comparison(forecasts: Sequence[Forecast]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    for name in ("devices", "states", "activations", "the rest", "a device", ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for each in forecasts:
        of_line = {line.name: line.nbytes for line in each.ledger.lines}
        states = sum(of_line.get(name, 0) for name in _STATES)
        activations = sum(of_line.get(name, 0) for name in _ACTIVATIONS)
        rest = each.ledger.nbytes - states - activations
        table.add_row(
            each.setting.strategy,
            str(each.setting.ranks),
            *map(format_bytes, (states, activations, rest, each.ledger.nbytes)),
            each.verdict.answer.value if each.verdict else "",
        )
    return table


def _ledger(forecast: Forecast) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_footer=True)
    table.add_column("at the peak", "all", no_wrap=True)
    table.add_column("bytes", format_bytes(forecast.ledger.nbytes), justify="right", no_wrap=True)
    table.add_column("share", "100 %", justify="right", no_wrap=True)
    table.add_column("rule", no_wrap=True)
    table.add_column("source", no_wrap=True)
    for line in forecast.ledger.lines:
        share = line.nbytes / max(forecast.ledger.nbytes, 1)
        table.add_row(
            line.name, format_bytes(line.nbytes), f"{share:.0%}".replace("%", " %"), line.rule, line.source
        )
    return table


def _largest(forecast: Forecast) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("most activations and temporaries", no_wrap=True)
    table.add_column("operator", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    for module, operator, nbytes in forecast.ledger.largest:
        table.add_row(module or "(outside of modules)", operator, format_bytes(nbytes))
    return table


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
    from paceline.tools.result_files import versions

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
    from paceline.tools.report.charts.memory_chart import memory_over_step

    memory_over_step(curve_of(model, forecasts[0])).save(path)


def curve_of(model: str, forecast: Forecast) -> MemoryCurve:
    """Return what is drawn of a forecast: its two steps, not what went before."""
    from paceline._core.format import format_bytes
    from paceline.tools.plan.memory.memory_timeline import CATEGORIES
    from paceline.tools.report.charts.memory_chart import MemoryCurve

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
        peak_label=f"{format_bytes(peak.nbytes)}: {forecast.ledger.where}",
        capacity_nbytes=verdict.capacity_nbytes if verdict else None,
        title=f"{model}, {forecast.setting.name}, {forecast.setting.batch} samples a device",
    )
