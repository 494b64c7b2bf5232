"""``paceline plan hardware``: known devices and links; ``paceline plan network``: advice for a slow network."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from paceline._core.files import write_json
from paceline._core.format import format_decimal, format_seconds
from paceline._core.units import parse_count, parse_rate, parse_seconds, parse_share
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.command_options import own, shared
from paceline.tools.result_files import check_writable

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.tools.plan.compression_or_local_sgd import NetworkAdvice

__all__ = ["DEVICE_COLUMNS", "LINK_COLUMNS", "device_rows", "hardware", "link_rows", "network"]

DEVICE_COLUMNS = ("device", "memory, GB", "bf16", "fp16", "tf32", "fp32, TFLOP/s", "memory, GB/s", "its link")
LINK_COLUMNS = ("link", "GB/s one way", "latency, µs")

_FOOTER = (
    "bytes, communication, waiting: per rank, direction and step, on average. Gradients overlap with about half of a\n"
    "step, parameters that are merged later with the steps in between. The loss: after the same number of steps."
)


def hardware(
    sources: Annotated[bool, own(None, "Show the source of each row.", "--sources")] = False,
) -> None:
    """List the known devices and links, with dense rates and one-way bandwidths.

    Example: paceline plan hardware --sources
    """
    from paceline.cost_model.hardware_catalog import DEVICES, INTERCONNECTS
    from paceline.tools.console_table import print_wide

    print_wide(_table(DEVICE_COLUMNS, device_rows(), [each.source for each in DEVICES.values()], sources))
    links = [f"{each.source}; latency: {each.latency_source}" for each in INTERCONNECTS.values()]
    print_wide(_table(LINK_COLUMNS, link_rows(), links, sources))


def device_rows() -> list[list[str]]:
    """Return the table of devices as text; the rate of an unsupported type is empty."""
    from paceline.cost_model.hardware_catalog import DEVICES, DTYPES

    rows = []
    for each in DEVICES.values():
        rates = [getattr(each, dtype) for dtype in DTYPES]
        cells = ["" if rate is None else f"{rate / 1e12:.4g}" for rate in rates]
        bandwidth = f"{each.memory_nbytes_per_second / 1e9:.4g}"
        rows.append([each.name, f"{each.memory_nbytes / 1e9:g}", *cells, bandwidth, each.link])
    return rows


def link_rows() -> list[list[str]]:
    """Return the table of links as text."""
    from paceline.cost_model.hardware_catalog import INTERCONNECTS

    return [
        [each.name, f"{each.nbytes_per_second / 1e9:.4g}", f"{1e6 * each.latency_seconds:.2g}"]
        for each in INTERCONNECTS.values()
    ]


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], sources: Sequence[str], shown: bool
) -> Table:
    from paceline.tools.console_table import make_table

    if not shown:
        return make_table(columns, rows)
    table = make_table(
        [*columns, "source"], [[*row, source] for row, source in zip(rows, sources, strict=True)]
    )
    table.columns[-1].justify = "left"
    return table


def network(
    parameters: Annotated[str, shared("parameters")],
    world_size: Annotated[int, shared("world-size")],
    link: Annotated[str, shared("link", ", per rank while all send, such as 200Mbit/s")],
    step: Annotated[str, shared("step", ", such as 250ms")],
    max_wait: Annotated[str, own("PERCENT", "Part of a step that ranks may wait.")] = "10%",
    layers: Annotated[
        int | None, own("N", "Layers into which the model can be split; default: enough.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Advise what to send over a slow network, and how often; with speed and effect on the loss.

    Example: paceline plan network --parameters 20M --world-size 4 --link 200Mbit/s --step 0.97s
    """
    from paceline.tools.console_table import print_wide
    from paceline.tools.plan.compression_or_local_sgd import advise_network

    advice = advise_network(
        parse_count(parameters),
        world_size,
        parse_rate(link),
        parse_seconds(step),
        parse_share(max_wait),
        layers,
    )
    if json_file is not None:
        check_writable(json_file, "--json")
    print_wide(_network_table(advice))
    typer.echo(f"{_FOOTER}\n")
    typer.echo("\n".join(advice.sentences))
    if json_file is not None:
        command = shlex.join(["paceline", *sys.argv[1:]])
        write_json(json_file, {"kind": "plan-network", "schema": 1, "command": command, **advice.facts()})
        typer.echo(json_file)


def _network_table(advice: NetworkAdvice) -> Table:
    """Return the options, the mildest first; the chosen one is marked."""
    from paceline.tools.console_table import make_table

    columns = ("", "what is sent", "bytes", "communication", "waiting", "a step", "speed-up", "the loss")
    rows = [
        (
            "→" if option is advice.chosen else "",
            option.name,
            format_decimal(option.nbytes),
            *map(format_seconds, (option.comm_seconds, option.exposed_seconds, option.step_seconds)),
            f"{option.speedup:.3g}",
            option.effect,
        )
        for option in advice.options
    ]
    table = make_table(columns, rows, left=2)
    table.columns[-1].justify = "left"
    return table
