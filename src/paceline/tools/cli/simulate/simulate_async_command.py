"""``paceline simulate`` and ``paceline simulate async``: what a job would do on machines and links elsewhere.

Options of ``paceline simulate async``, beside those that it shares with the hub.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.tools.cli.shared_options import (
    BoundOption,
    DownOption,
    JsonOption,
    MarginOption,
    OuterLrOption,
    OuterMomentumOption,
    OuterOption,
    OuterWarmupOption,
    PopulationOption,
    StalenessOption,
    UnstableOption,
)
from paceline.tools.cli.simulate.simulate_cluster_command import cluster

__all__ = [
    "BadLrOption",
    "BesideOption",
    "ChurnOption",
    "CompressionOption",
    "DelayOption",
    "DifferentOption",
    "EveryOption",
    "ForOption",
    "FragmentsOption",
    "HubLinkOption",
    "JitterOption",
    "LatencyOption",
    "LinkOption",
    "LrOption",
    "OutOption",
    "ParametersOption",
    "ReceiveOption",
    "SeedOption",
    "SendOption",
    "SpeedsOption",
    "SpoilOption",
    "SpreadOption",
    "StepOption",
    "StepsOption",
    "TargetOption",
    "TaskOption",
    "WarmupOption",
    "WorkersOption",
    "app",
]

app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})


app.callback(invoke_without_command=True)(cluster)


@app.command("async")
def async_(
    context: typer.Context,
    workers: WorkersOption = 4,
    task: TaskOption = "linear",
    parameters: ParametersOption = None,
    speeds: SpeedsOption = "1:1:2:4",
    spread: SpreadOption = 0.0,
    step: StepOption = "100ms",
    jitter: JitterOption = "10%",
    link: LinkOption = "200Mbit/s",
    hub_link: HubLinkOption = None,
    latency: LatencyOption = "0.1ms",
    steps: StepsOption = None,
    for_: ForOption = None,
    every: EveryOption = "4,10,25",
    delay: DelayOption = "0,5",
    fragments: FragmentsOption = 1,
    compression: CompressionOption = "int4",
    down: DownOption = "bf16",
    outer: OuterOption = "averaging",
    outer_lr: OuterLrOption = None,
    outer_momentum: OuterMomentumOption = 0.9,
    outer_warmup: OuterWarmupOption = 1,
    unstable: UnstableOption = False,
    staleness: StalenessOption = "accept",
    bound: BoundOption = 16.0,
    send: SendOption = "all",
    receive: ReceiveOption = "all",
    population: PopulationOption = None,
    margin: MarginOption = 0.05,
    bad_lr: BadLrOption = None,
    different: DifferentOption = False,
    warmup: WarmupOption = 0,
    churn: ChurnOption = None,
    spoil: SpoilOption = "0%",
    seed: SeedOption = 0,
    lr: LrOption = None,
    target: TargetOption = None,
    beside: BesideOption = True,
    json_file: JsonOption = None,
    out: OutOption = None,
) -> None:
    """Train asynchronously in virtual time: loss, bytes and time beside DDP, for machines and links you describe.

    Gradients are real, and so is the code of hub and workers; clocks and links are simulated. The same command gives
    the same numbers, to the bit.

    Examples: paceline simulate async --workers 8 --speeds 1:1:2:4 --link 200Mbit/s --parameters 20M

    paceline simulate async --task gpt --every 10 --delay 5 --for 2min --out results/

    paceline simulate async --churn 30s:-3,60s:+3,90s:-hub,95s:+hub --spoil 1%
    """
    from paceline.tools.cli.simulate.simulate_async_output import plan_files, show
    from paceline.tools.cli.simulate.simulate_async_request import asked_of
    from paceline.tools.cli.simulate.simulate_async_run import run

    asked = asked_of(context.params)
    writer_of = plan_files(json_file, out)
    rows = run(asked)
    show(asked, rows)
    command = shlex.join(["paceline", *sys.argv[1:]])
    for path, write in writer_of.items():
        write(path, asked, rows, command)
        typer.echo(path)


WorkersOption = Annotated[int, typer.Option(help="How many machines train.")]


TaskOption = Annotated[
    str, typer.Option(help="What is learnt: linear (least squares, quick), gpt (a tiny GPT on text).")
]


ParametersOption = Annotated[
    str | None,
    typer.Option(help="Messages are as long as those of a model of so many: 20M; else the task's own."),
]


SpeedsOption = Annotated[
    str,
    typer.Option(
        help="Relative ones, repeated to as many as there are workers; 4 is the fastest of 1:1:2:4."
    ),
]


SpreadOption = Annotated[
    float, typer.Option(help="Of steps' times beside: standard deviation of the logarithm, log-normal.")
]


StepOption = Annotated[str, typer.Option(help="Time of a step on the fastest machine.")]


JitterOption = Annotated[
    str, typer.Option(help="Share by which steps differ at random, as a standard deviation.")
]


LinkOption = Annotated[str, typer.Option(help="Of each worker, in each direction.")]


HubLinkOption = Annotated[str | None, typer.Option(help="Of the hub, in each direction; else as a worker's.")]


LatencyOption = Annotated[str, typer.Option(help="From one machine to another.")]


StepsOption = Annotated[
    int | None, typer.Option(help="Of each worker; ends when all have made them, or by --for.")
]


ForOption = Annotated[
    str | None,
    typer.Option("--for", help="Virtual time; else 300 steps of the slowest machine, unless --steps."),
]


EveryOption = Annotated[str, typer.Option(help="k, local steps between sendings; several by commas.")]


DelayOption = Annotated[
    str, typer.Option(help="d, local steps from sending to taking in; several by commas.")
]


FragmentsOption = Annotated[int, typer.Option(help="Parts of the model that are sent in turn.")]


CompressionOption = Annotated[str, typer.Option(help="Of updates: int4, int8, bf16, fp16, none.")]


SendOption = Annotated[str, typer.Option(help="What workers send, by score: all, better, best.")]


ReceiveOption = Annotated[str, typer.Option(help="What they take in, by score: all, better, best.")]


BadLrOption = Annotated[
    str | None,
    typer.Option(
        metavar="WORKER:LR", help="Give a worker, counted from 1, another learning rate; by commas."
    ),
]


DifferentOption = Annotated[
    bool, typer.Option("--different", help="Workers begin from different parameters.")
]


WarmupOption = Annotated[
    int, typer.Option(help="Local steps at the beginning with an exchange at every other one.")
]


ChurnOption = Annotated[
    str | None,
    typer.Option(
        help="Share of workers away at a time (5%), or who leaves and comes: 30s:-3,60s:+3,90s:-hub,95s:+hub."
    ),
]


SpoilOption = Annotated[str, typer.Option(help="Share of messages that are lost, repeated, late or damaged.")]


SeedOption = Annotated[int, typer.Option(help="Of parameters, data, jitter and mishaps.")]


LrOption = Annotated[float | None, typer.Option(help="Learning rate of the task; else one that suits it.")]


TargetOption = Annotated[
    float | None, typer.Option(help="Loss to which the time is told; else what DDP ends with.")
]


BesideOption = Annotated[
    bool, typer.Option("--beside/--no-beside", help="DDP on the same machines as the first row.")
]


OutOption = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Write table.csv, result.json and charts of loss and times there."),
]
