"""What ``paceline plan memory`` prints: the answer, all settings side by side, the ledger of the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from paceline.cli.wide_table import print_wide
from paceline.plan.memory.verdict import advice
from paceline.units import format_bytes, format_count

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.bench.footprint.forecast import Forecast
    from paceline.plan.memory.verdict import Alternative

__all__ = ["answer", "show"]

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
