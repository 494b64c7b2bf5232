"""``paceline simulate``: a training on 1 to 100,000 nodes, in numbers."""

from __future__ import annotations

import shlex
import sys

import typer

from paceline.cli.file_options import JsonOption
from paceline.cli.simulate_cluster_options import (
    AlgorithmOption,
    BackendOption,
    BackwardOption,
    BatchOption,
    BucketMibOption,
    CheckpointOption,
    ContentionOption,
    EveryOption,
    GradientsOption,
    InsideLatencyOption,
    InsideOption,
    IntervalOption,
    JitterOption,
    JobOption,
    JobsOption,
    LatencyOption,
    LinkOption,
    ModelOption,
    MtbfOption,
    NodesOption,
    OutOption,
    ParametersOption,
    PriceOption,
    ProfileOption,
    RanksPerNodeOption,
    RestartOption,
    SeedOption,
    SharesOption,
    SpeedsOption,
    SpreadOption,
    StepOption,
    StrategyOption,
    SwitchOption,
    TopologyOption,
)
from paceline.cli.training_options import NetworkOption
from paceline.errors import UsageError

__all__ = ["cluster"]


def cluster(
    context: typer.Context,
    step: StepOption = None,
    parameters: ParametersOption = None,
    model: ModelOption = None,
    nodes: NodesOption = "1:1024",
    ranks_per_node: RanksPerNodeOption = 1,
    batch: BatchOption = "per-rank",
    speeds: SpeedsOption = "1",
    shares: SharesOption = "equal",
    spread: SpreadOption = "0%",
    jitter: JitterOption = "0%",
    topology: TopologyOption = "star",
    link: LinkOption = "10gbe",
    latency: LatencyOption = None,
    inside: InsideOption = None,
    inside_latency: InsideLatencyOption = None,
    switch: SwitchOption = None,
    profile: ProfileOption = None,
    backend: BackendOption = "gloo",
    network: NetworkOption = None,
    algorithm: AlgorithmOption = "auto",
    strategy: StrategyOption = "bucketed",
    bucket_mib: BucketMibOption = 25.0,
    gradients: GradientsOption = 4,
    backward: BackwardOption = "66.7%",
    contention: ContentionOption = None,
    every: EveryOption = 1,
    mtbf: MtbfOption = None,
    checkpoint: CheckpointOption = "0s",
    interval: IntervalOption = "auto",
    restart: RestartOption = "0s",
    job: JobOption = None,
    price: PriceOption = None,
    jobs: JobsOption = 32,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    out: OutOption = None,
) -> None:
    """Tell what a training would do on 1 to 100,000 nodes: step time, what is lost to what, failures, cost.

    The same command gives the same numbers, to the bit.

    Examples: paceline simulate --parameters 7B --step 1.2s --nodes 1:10000 --ranks-per-node 8 --link ndr
    --inside nvlink4 --spread 2% --jitter 3% --mtbf 1800d --checkpoint 60s --restart 5min

    paceline simulate --parameters 20M --step 0.97s --link 200Mbit/s --batch fixed --nodes 1:64 --strategy flat

    paceline simulate async trains real models in virtual time (paceline simulate async --help).
    """
    if context.invoked_subcommand is not None:
        _check_nothing_before(context, context.invoked_subcommand)
        return
    _check_network(context)
    from paceline.cli.simulate_cluster_asked import asked_of
    from paceline.cli.simulate_cluster_files import plan_files
    from paceline.cli.simulate_cluster_show import show
    from paceline.simulate.cluster.run import sweep

    asked = asked_of(context.params)
    writer_of = plan_files(json_file, out, len(asked.nodes))
    rows = list(sweep(asked.plan, asked.nodes))
    show(asked, rows)
    command = shlex.join(["paceline", *sys.argv[1:]])
    for path, write in writer_of.items():
        write(path, asked, rows, command)
        typer.echo(path)


def _check_nothing_before(context: typer.Context, subcommand: str) -> None:
    """Refuse options that stand before a subcommand, which would not see them."""
    given = [name for name in context.params if _was_given(context, name)]
    if given:
        raise UsageError(
            f"--{given[0].replace('_', '-')} stands before {subcommand}",
            remedy=f"options of paceline simulate {subcommand} stand behind its name",
        )


def _check_network(context: typer.Context) -> None:
    """Refuse links that are described beside a network that was measured."""
    if context.params["profile"] is None:
        return
    for name in ("topology", "link", "latency", "inside", "inside_latency", "switch"):
        if _was_given(context, name):
            raise UsageError(
                f"both --profile and --{name.replace('_', '-')}",
                remedy="a profile is the network as it was measured: leave one of them out",
            )


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
