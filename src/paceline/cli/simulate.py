"""``paceline simulate`` and ``paceline simulate async``: what a job would do on machines and links elsewhere."""

from __future__ import annotations

import shlex
import sys

import typer

from paceline.cli.file_options import JsonOption
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
from paceline.cli.simulate_async_options import (
    BadLrOption,
    BesideOption,
    ChurnOption,
    CompressionOption,
    DelayOption,
    DifferentOption,
    EveryOption,
    ForOption,
    FragmentsOption,
    HubLinkOption,
    JitterOption,
    LatencyOption,
    LinkOption,
    LrOption,
    OutOption,
    ParametersOption,
    ReceiveOption,
    SeedOption,
    SendOption,
    SpeedsOption,
    SpoilOption,
    SpreadOption,
    StepOption,
    StepsOption,
    TargetOption,
    TaskOption,
    WarmupOption,
    WorkersOption,
)
from paceline.cli.simulate_cluster import cluster

__all__ = ["app"]

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
