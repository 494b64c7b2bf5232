"""``paceline plan network``: what to send over a slow network, and how often."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.file_options import JsonOption
from paceline.cli.writable import check_writable
from paceline.durable import write_json
from paceline.units import format_decimal, format_seconds, parse_count, parse_rate, parse_seconds, parse_share

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.plan.slow_network import Advice

__all__ = ["network"]

FOOTER = (
    "bytes, communication, waiting: of a rank, in one direction, a step on average. Gradients overlap with about half\n"
    "of a step, parameters that are merged later with the steps between. The loss: after equal steps."
)


def network(
    parameters: Annotated[str, typer.Option(help="Of the model: 20M, 1.5B.")],
    ranks: Annotated[int, typer.Option(help="That synchronise over the network.")],
    rate: Annotated[str, typer.Option(help="That a rank can send while the others do: 200Mbit/s, 25MB/s.")],
    step: Annotated[str, typer.Option(help="Time of a step without synchronisation: 0.97s, 250ms.")],
    share: Annotated[str, typer.Option(help="Of a step that ranks may wait.")] = "10%",
    layers: Annotated[
        int | None, typer.Option(help="Into which the model can be cut; else as many as it takes.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Tell what to send over a slow network, how often, how fast that is and what it does to the loss.

    Example: paceline plan network --parameters 20M --ranks 4 --rate 200Mbit/s --step 0.97s
    """
    from paceline.cli.wide_table import print_wide
    from paceline.plan.slow_network import advise

    advice = advise(
        parse_count(parameters), ranks, parse_rate(rate), parse_seconds(step), parse_share(share), layers
    )
    if json_file is not None:
        check_writable(json_file, "--json")
    print_wide(_table(advice))
    typer.echo(f"{FOOTER}\n")
    typer.echo("\n".join(advice.sentences))
    if json_file is not None:
        command = shlex.join(["paceline", *sys.argv[1:]])
        write_json(json_file, {"kind": "plan-network", "schema": 1, "command": command, **advice.facts()})
        typer.echo(json_file)


def _table(advice: Advice) -> Table:
    """Return the options, the mildest first; the chosen one is marked."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("what is sent", no_wrap=True)
    for name in ("bytes", "communication", "waiting", "a step", "speed-up"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("the loss", no_wrap=True)
    for option in advice.options:
        seconds = (option.comm_seconds, option.exposed_seconds, option.step_seconds)
        table.add_row(
            "→" if option is advice.chosen else "",
            option.name,
            format_decimal(option.nbytes),
            *map(format_seconds, seconds),
            f"{option.speedup:.3g}",
            option.effect,
        )
    return table
