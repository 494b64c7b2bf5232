"""``paceline plan``: one page of advice, and each of its questions by itself; before anything runs.

``paceline plan hardware``: the devices and links that are known by name.

``paceline plan network``: what to send over a slow network, and how often.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline._core.files import write_json
from paceline._core.format import format_decimal, format_seconds
from paceline._core.units import parse_count, parse_rate, parse_seconds, parse_share
from paceline.tools.cli.plan.plan_batch_command import batch
from paceline.tools.cli.plan.plan_memory_command import memory
from paceline.tools.cli.plan.plan_step_command import step
from paceline.tools.cli.shared_options import AutocastOption, CheckpointingOption, JsonOption, OptimizerOption
from paceline.tools.result_files import check_writable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from paceline.tools.plan.slow_network import NetworkAdvice

__all__ = ["DEVICE_COLUMNS", "LINK_COLUMNS", "app", "device_rows", "hardware", "link_rows", "network"]

app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]})


@app.callback(invoke_without_command=True)
def plan(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(help="A size (tiny … 2.7b), or package.module:name; by its name in the profile."),
    ] = None,
    devices: Annotated[str, typer.Option(help="How many; the advice is for the most.")] = "1,2,4,8",
    samples: Annotated[
        int | None,
        typer.Option("--batch", metavar="SAMPLES", help="Global batch; else what fits or was measured."),
    ] = None,
    micro: Annotated[int | None, typer.Option(help="Samples of a micro-batch, at most.")] = None,
    tokens: Annotated[
        int | None, typer.Option("--context", help="Tokens of a sample; else as measured, or 128.")
    ] = None,
    optimizer: OptimizerOption = "adamw",
    autocast: AutocastOption = "off",
    checkpointing: CheckpointingOption = False,
    device: Annotated[
        str | None, typer.Option(help="A GPU by name (paceline plan hardware), to know whether it fits.")
    ] = None,
    device_memory: Annotated[str | None, typer.Option(help="Or its memory: 24GB.")] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What paceline bench parts measured: how long steps take."),
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Of the profile, where it has several.")] = None,
    network: Annotated[str | None, typer.Option(help="Of the profile, where it has several.")] = None,
    json_file: JsonOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write plan.json and the chart of scaling there.")
    ] = None,
) -> None:
    """Plan a training: does it fit, which batch, how to synchronise, how long, what limits, what would help most.

    Example: paceline plan --model small --device rtx-4090 --devices 1,2,4 --batch 256 --profile profile.json
    """
    if context.invoked_subcommand is not None:
        return
    if model is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)
    from paceline.tools.cli.plan.plan_advice_command import Asked, advise

    advise(
        Asked(
            model, devices, samples, micro, tokens, optimizer, autocast, checkpointing,
            device, device_memory, profile, backend, network, json_file, out,
        )
    )  # fmt: skip


DEVICE_COLUMNS = ("device", "memory, GB", "bf16", "fp16", "tf32", "fp32, TFLOP/s", "memory, GB/s", "its link")


LINK_COLUMNS = ("link", "GB/s one way", "latency, µs")


def hardware(
    sources: Annotated[bool, typer.Option("--sources", help="Show where each row is from.")] = False,
) -> None:
    """List the devices and links that are known by name, with dense rates and links one way.

    Example: paceline plan hardware --sources
    """
    from paceline.cost_model.hardware_catalog import DEVICES, INTERCONNECTS
    from paceline.tools.console_table import print_wide

    print_wide(_table(DEVICE_COLUMNS, device_rows(), [each.source for each in DEVICES.values()], sources))
    links = [f"{each.source}; latency: {each.latency_source}" for each in INTERCONNECTS.values()]
    print_wide(_table(LINK_COLUMNS, link_rows(), links, sources))


def device_rows() -> list[list[str]]:
    """Return the table of devices as text; a rate that a device has no unit for is empty."""
    from paceline.cost_model.hardware_catalog import DEVICES, DTYPES

    rows = []
    for each in DEVICES.values():
        rates = [getattr(each, dtype) for dtype in DTYPES]
        told = ["" if rate is None else f"{rate / 1e12:.4g}" for rate in rates]
        speed = f"{each.memory_nbytes_per_second / 1e9:.4g}"
        rows.append([each.name, f"{each.memory_nbytes / 1e9:g}", *told, speed, each.link])
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
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for at, name in enumerate(columns):
        table.add_column(name, justify="right" if at else "left", no_wrap=True)
    if shown:
        table.add_column("source", no_wrap=True)
    for row, source in zip(rows, sources, strict=True):
        table.add_row(*row, *([source] if shown else []))
    return table


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
    from paceline.tools.console_table import print_wide
    from paceline.tools.plan.slow_network import advise_network

    advice = advise_network(
        parse_count(parameters), ranks, parse_rate(rate), parse_seconds(step), parse_share(share), layers
    )
    if json_file is not None:
        check_writable(json_file, "--json")
    print_wide(_network_table(advice))
    typer.echo(f"{FOOTER}\n")
    typer.echo("\n".join(advice.sentences))
    if json_file is not None:
        command = shlex.join(["paceline", *sys.argv[1:]])
        write_json(json_file, {"kind": "plan-network", "schema": 1, "command": command, **advice.facts()})
        typer.echo(json_file)


def _network_table(advice: NetworkAdvice) -> Table:
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


app.command()(batch)
app.command()(hardware)
app.command()(memory)
app.command("network")(network)
app.command()(step)
