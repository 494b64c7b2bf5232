"""``paceline simulate`` and ``paceline simulate async``: what a job would do on machines and links elsewhere."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.hub_options import (
    BoundOption,
    DownOption,
    MarginOption,
    OuterLrOption,
    OuterMomentumOption,
    OuterOption,
    OuterWarmupOption,
    PopulationOption,
    StalenessOption,
    UnstableOption,
)
from paceline.cli.simulate_cluster import cluster

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})


app.callback(invoke_without_command=True)(cluster)


@app.command("async")
def async_(
    context: typer.Context,
    workers: Annotated[int, typer.Option(help="How many machines train.")] = 4,
    task: Annotated[
        str, typer.Option(help="What is learnt: linear (least squares, quick), gpt (a tiny GPT on text).")
    ] = "linear",
    parameters: Annotated[
        str | None,
        typer.Option(help="Messages are as long as those of a model of so many: 20M; else the task's own."),
    ] = None,
    speeds: Annotated[
        str,
        typer.Option(
            help="Relative ones, repeated to as many as there are workers; 4 is the fastest of 1:1:2:4."
        ),
    ] = "1:1:2:4",
    spread: Annotated[
        float, typer.Option(help="Of steps' times beside: standard deviation of the logarithm, log-normal.")
    ] = 0.0,
    step: Annotated[str, typer.Option(help="Time of a step on the fastest machine.")] = "100ms",
    jitter: Annotated[
        str, typer.Option(help="Share by which steps differ at random, as a standard deviation.")
    ] = "10%",
    link: Annotated[str, typer.Option(help="Of each worker, in each direction.")] = "200Mbit/s",
    hub_link: Annotated[
        str | None, typer.Option(help="Of the hub, in each direction; else as a worker's.")
    ] = None,
    latency: Annotated[str, typer.Option(help="From one machine to another.")] = "0.1ms",
    steps: Annotated[
        int | None, typer.Option(help="Of each worker; ends when all have made them, or by --for.")
    ] = None,
    for_: Annotated[
        str | None,
        typer.Option("--for", help="Virtual time; else 300 steps of the slowest machine, unless --steps."),
    ] = None,
    every: Annotated[
        str, typer.Option(help="k, local steps between sendings; several by commas.")
    ] = "4,10,25",
    delay: Annotated[
        str, typer.Option(help="d, local steps from sending to taking in; several by commas.")
    ] = "0,5",
    fragments: Annotated[int, typer.Option(help="Parts of the model that are sent in turn.")] = 1,
    compression: Annotated[str, typer.Option(help="Of updates: int4, int8, bf16, fp16, none.")] = "int4",
    down: DownOption = "bf16",
    outer: OuterOption = "averaging",
    outer_lr: OuterLrOption = None,
    outer_momentum: OuterMomentumOption = 0.9,
    outer_warmup: OuterWarmupOption = 1,
    unstable: UnstableOption = False,
    staleness: StalenessOption = "accept",
    bound: BoundOption = 16.0,
    send: Annotated[str, typer.Option(help="What workers send, by score: all, better, best.")] = "all",
    receive: Annotated[str, typer.Option(help="What they take in, by score: all, better, best.")] = "all",
    population: PopulationOption = None,
    margin: MarginOption = 0.05,
    bad_lr: Annotated[
        str | None,
        typer.Option(
            metavar="WORKER:LR", help="Give a worker, counted from 1, another learning rate; by commas."
        ),
    ] = None,
    different: Annotated[
        bool, typer.Option("--different", help="Workers begin from different parameters.")
    ] = False,
    warmup: Annotated[
        int, typer.Option(help="Local steps at the beginning with an exchange at every other one.")
    ] = 0,
    churn: Annotated[
        str | None,
        typer.Option(
            help="Share of workers away at a time (5%), or who leaves and comes: 30s:-3,60s:+3,90s:-hub,95s:+hub."
        ),
    ] = None,
    spoil: Annotated[
        str, typer.Option(help="Share of messages that are lost, repeated, late or damaged.")
    ] = "0%",
    seed: Annotated[int, typer.Option(help="Of parameters, data, jitter and mishaps.")] = 0,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate of the task; else one that suits it.")
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="Loss to which the time is told; else what DDP ends with.")
    ] = None,
    beside: Annotated[
        bool, typer.Option("--beside/--no-beside", help="DDP on the same machines as the first row.")
    ] = True,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all of it.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Write table.csv, result.json and charts of loss and times there."
        ),
    ] = None,
) -> None:
    """Train asynchronously in virtual time: loss, bytes and time beside DDP, for machines and links you describe.

    Gradients are real, and so is the code of hub and workers; clocks and links are simulated. The same command gives
    the same numbers, to the bit.

    Examples: paceline simulate async --workers 8 --speeds 1:1:2:4 --link 200Mbit/s --parameters 20M

    paceline simulate async --task gpt --every 10 --delay 5 --for 2min --out results/

    paceline simulate async --churn 30s:-3,60s:+3,90s:-hub,95s:+hub --spoil 1%
    """
    from paceline.cli.simulate_asked import asked_of
    from paceline.cli.simulate_files import plan_files
    from paceline.cli.simulate_run import run
    from paceline.cli.simulate_show import show

    asked = asked_of(context.params)
    writer_of = plan_files(json_file, out)
    rows = run(asked)
    show(asked, rows)
    command = shlex.join(["paceline", *sys.argv[1:]])
    for path, write in writer_of.items():
        write(path, asked, rows, command)
        typer.echo(path)
