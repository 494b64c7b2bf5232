"""``paceline simulate``: a training on 1 to 100,000 nodes, in numbers."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import UsageError

__all__ = ["cluster"]


def cluster(
    context: typer.Context,
    step: Annotated[
        str | None,
        typer.Option(
            help="Computing of a step: a time (250ms), or a file with measured steps, to draw from."
        ),
    ] = None,
    parameters: Annotated[str | None, typer.Option(help="Of the model: 20M, 7B.")] = None,
    model: Annotated[str | None, typer.Option(help="Or its name: tiny … 2.7b, xxl.")] = None,
    nodes: Annotated[
        str, typer.Option(help="By commas; FIRST:LAST doubles from one to the other, FIRST:LAST:x10 …")
    ] = "1:1024",
    ranks_per_node: Annotated[int, typer.Option(help="Devices of a node.")] = 1,
    batch: Annotated[
        str,
        typer.Option(help="per-rank: --step is a rank's own batch; fixed: of the whole batch on one rank."),
    ] = "per-rank",
    speeds: Annotated[
        str, typer.Option(help="Of nodes, relative, repeated; --step is of the fastest: 1:1:2:4.")
    ] = "1",
    shares: Annotated[str, typer.Option(help="Who gets how much work: equal, or by speed.")] = "equal",
    spread: Annotated[
        str, typer.Option(help="Of nodes for good, as a standard deviation; log-normal.")
    ] = "0%",
    jitter: Annotated[str, typer.Option(help="Of a rank's steps, the same.")] = "0%",
    topology: Annotated[str, typer.Option(help="Between nodes: star (a switch), ring, tree.")] = "star",
    link: Annotated[
        str, typer.Option(help="Of a node, one way: a rate (200Mbit/s) or a name (10gbe, ndr).")
    ] = "10gbe",
    latency: Annotated[
        str | None, typer.Option(help="Of a message between nodes; else of that link.")
    ] = None,
    inside: Annotated[
        str | None, typer.Option(help="Link of a rank inside its node: nvlink4, pcie4, 12GB/s.")
    ] = None,
    inside_latency: Annotated[
        str | None, typer.Option(help="Of a message inside a node; else of that link.")
    ] = None,
    switch: Annotated[str | None, typer.Option(help="What the switch carries in all; else no limit.")] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="All-reduce and contention as measured, instead of links."),
    ] = None,
    backend: Annotated[str, typer.Option(help="Of the profile.")] = "gloo",
    network: Annotated[str | None, typer.Option(help="Of the profile: on which network.")] = None,
    algorithm: Annotated[
        str,
        typer.Option(
            help="auto: the cheapest; ring, tree, doubling, halving-doubling, two-level, two-level-halving."
        ),
    ] = "auto",
    strategy: Annotated[str, typer.Option(help="flat, bucketed, sharded, full-shard.")] = "bucketed",
    bucket_mib: Annotated[float, typer.Option(help="Of a bucket.")] = 25.0,
    gradients: Annotated[int, typer.Option(help="Bytes of one on the wire: 4, 2, 1.")] = 4,
    backward: Annotated[
        str, typer.Option(help="Share of computing in which gradients become ready.")
    ] = "66.7%",
    contention: Annotated[
        str | None,
        typer.Option(
            help="How many times as long computing takes beside exchanges, and they beside computing: 1.3:1.1; "
            "else as the profile has it, or 1:1."
        ),
    ] = None,
    every: Annotated[int, typer.Option(help="H, steps between two exchanges (of parameters, above 1).")] = 1,
    mtbf: Annotated[
        str | None, typer.Option(help="Of a node, mean time between failures: 1000d; else none fails.")
    ] = None,
    checkpoint: Annotated[str, typer.Option(help="What training waits for one: 30s.")] = "0s",
    interval: Annotated[
        str, typer.Option(help="Of training between two checkpoints: a time, or auto (Daly's).")
    ] = "auto",
    restart: Annotated[str, typer.Option(help="From a failure until training goes on: 5min.")] = "0s",
    job: Annotated[
        str | None, typer.Option(help="Computing of the whole job on one node: 10000h; else a week of all.")
    ] = None,
    price: Annotated[float | None, typer.Option(help="Of an hour of a node.")] = None,
    jobs: Annotated[int, typer.Option(help="To simulate for each number of nodes.")] = 32,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all of it.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write table.csv, result.json and a chart by nodes there."),
    ] = None,
) -> None:
    """Tell what a training would do on 1 to 100,000 nodes: step time, what is lost to what, failures, cost.

    The same command gives the same numbers, to the bit.

    Examples: paceline simulate --parameters 7B --step 1.2s --nodes 1:10000 --ranks-per-node 8 --link ndr
    --inside nvlink4 --spread 2% --jitter 3% --mtbf 1800d --checkpoint 60s --restart 5min

    paceline simulate --parameters 20M --step 0.97s --link 200Mbit/s --batch fixed --nodes 1:64 --strategy flat

    paceline simulate async trains real models in virtual time (paceline simulate async --help).
    """
    if context.invoked_subcommand is not None:
        given = [name for name in context.params if _was_given(context, name)]
        if given:
            raise UsageError(
                f"--{given[0].replace('_', '-')} stands before {context.invoked_subcommand}",
                remedy=f"options of paceline simulate {context.invoked_subcommand} stand behind its name",
            )
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
