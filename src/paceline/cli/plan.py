"""``paceline plan``: one page of advice, and each of its questions by itself; before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.file_options import JsonOption
from paceline.cli.plan_batch import batch
from paceline.cli.plan_hardware import hardware
from paceline.cli.plan_memory import memory
from paceline.cli.plan_network import network as network_command
from paceline.cli.plan_step import step
from paceline.cli.training_options import AutocastOption, CheckpointingOption, OptimizerOption

__all__ = ["app"]

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
    from paceline.cli.plan_advice import Asked, advise

    advise(
        Asked(
            model, devices, samples, micro, tokens, optimizer, autocast, checkpointing,
            device, device_memory, profile, backend, network, json_file, out,
        )
    )  # fmt: skip


app.command()(batch)
app.command()(hardware)
app.command()(memory)
app.command("network")(network_command)
app.command()(step)
