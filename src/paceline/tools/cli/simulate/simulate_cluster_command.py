"""``paceline simulate``: a training on 1 to 100,000 nodes, in numbers.

Options of ``paceline simulate``.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import UsageError
from paceline.tools.cli.shared_options import JsonOption, NetworkOption

__all__ = [
    "AlgorithmOption",
    "BackendOption",
    "BackwardOption",
    "BatchOption",
    "BucketMibOption",
    "CheckpointOption",
    "ContentionOption",
    "EveryOption",
    "GradientsOption",
    "InsideLatencyOption",
    "InsideOption",
    "IntervalOption",
    "JitterOption",
    "JobOption",
    "JobsOption",
    "LatencyOption",
    "LinkOption",
    "ModelOption",
    "MtbfOption",
    "NodesOption",
    "OutOption",
    "ParametersOption",
    "PriceOption",
    "ProfileOption",
    "RanksPerNodeOption",
    "RestartOption",
    "SeedOption",
    "SharesOption",
    "SpeedsOption",
    "SpreadOption",
    "StepOption",
    "StrategyOption",
    "SwitchOption",
    "TopologyOption",
    "cluster",
]


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
    from paceline.tools.cli.simulate.simulate_cluster_output import plan_files, show
    from paceline.tools.cli.simulate.simulate_cluster_request import asked_of
    from paceline.tools.simulate.cluster.cluster_simulation import sweep_nodes

    asked = asked_of(context.params)
    writer_of = plan_files(json_file, out, len(asked.nodes))
    rows = list(sweep_nodes(asked.plan, asked.nodes))
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


StepOption = Annotated[
    str | None,
    typer.Option(help="Computing of a step: a time (250ms), or a file with measured steps, to draw from."),
]


ParametersOption = Annotated[str | None, typer.Option(help="Of the model: 20M, 7B.")]


ModelOption = Annotated[str | None, typer.Option(help="Or its name: tiny … 2.7b, xxl.")]


NodesOption = Annotated[
    str, typer.Option(help="By commas; FIRST:LAST doubles from one to the other, FIRST:LAST:x10 …")
]


RanksPerNodeOption = Annotated[int, typer.Option(help="Devices of a node.")]


BatchOption = Annotated[
    str,
    typer.Option(help="per-rank: --step is a rank's own batch; fixed: of the whole batch on one rank."),
]


SpeedsOption = Annotated[
    str, typer.Option(help="Of nodes, relative, repeated; --step is of the fastest: 1:1:2:4.")
]


SharesOption = Annotated[str, typer.Option(help="Who gets how much work: equal, or by speed.")]


SpreadOption = Annotated[str, typer.Option(help="Of nodes for good, as a standard deviation; log-normal.")]


JitterOption = Annotated[str, typer.Option(help="Of a rank's steps, the same.")]


TopologyOption = Annotated[str, typer.Option(help="Between nodes: star (a switch), ring, tree.")]


LinkOption = Annotated[
    str, typer.Option(help="Of a node, one way: a rate (200Mbit/s) or a name (10gbe, ndr).")
]


LatencyOption = Annotated[str | None, typer.Option(help="Of a message between nodes; else of that link.")]


InsideOption = Annotated[
    str | None, typer.Option(help="Link of a rank inside its node: nvlink4, pcie4, 12GB/s.")
]


InsideLatencyOption = Annotated[
    str | None, typer.Option(help="Of a message inside a node; else of that link.")
]


SwitchOption = Annotated[str | None, typer.Option(help="What the switch carries in all; else no limit.")]


ProfileOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="All-reduce and contention as measured, instead of links."),
]


BackendOption = Annotated[str, typer.Option(help="Of the profile.")]


AlgorithmOption = Annotated[
    str,
    typer.Option(
        help="auto: the cheapest; ring, tree, doubling, halving-doubling, two-level, two-level-halving."
    ),
]


StrategyOption = Annotated[str, typer.Option(help="flat, bucketed, sharded, full-shard.")]


BucketMibOption = Annotated[float, typer.Option(help="Of a bucket.")]


GradientsOption = Annotated[int, typer.Option(help="Bytes of one on the wire: 4, 2, 1.")]


BackwardOption = Annotated[str, typer.Option(help="Share of computing in which gradients become ready.")]


ContentionOption = Annotated[
    str | None,
    typer.Option(
        help="How many times as long computing takes beside exchanges, and they beside computing: 1.3:1.1; "
        "else as the profile has it, or 1:1."
    ),
]


EveryOption = Annotated[int, typer.Option(help="H, steps between two exchanges (of parameters, above 1).")]


MtbfOption = Annotated[
    str | None, typer.Option(help="Of a node, mean time between failures: 1000d; else none fails.")
]


CheckpointOption = Annotated[str, typer.Option(help="What training waits for one: 30s.")]


IntervalOption = Annotated[
    str, typer.Option(help="Of training between two checkpoints: a time, or auto (Daly's).")
]


RestartOption = Annotated[str, typer.Option(help="From a failure until training goes on: 5min.")]


JobOption = Annotated[
    str | None, typer.Option(help="Computing of the whole job on one node: 10000h; else a week of all.")
]


PriceOption = Annotated[float | None, typer.Option(help="Of an hour of a node.")]


JobsOption = Annotated[int, typer.Option(help="To simulate for each number of nodes.")]


SeedOption = Annotated[int, typer.Option(help="Of everything that is drawn.")]


OutOption = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Write table.csv, result.json and a chart by nodes there."),
]
