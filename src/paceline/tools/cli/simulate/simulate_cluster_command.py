"""``paceline simulate``: analytic simulation of a training on many nodes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline._core.units import parse_list, parse_seconds, parse_share
from paceline.errors import UsageError
from paceline.tools.cli.shared_options import JsonOption, NetworkOption, parse_model_parameters
from paceline.tools.cli.simulate.simulate_options import recorded_options, write_results

if TYPE_CHECKING:
    from paceline.tools.cli.simulate.simulate_cluster_request import ClusterRequest

__all__ = ["cluster"]


def cluster(
    context: typer.Context,
    step: Annotated[
        str | None,
        typer.Option(help="Computing time of a step: 250ms, or a file with measured steps to sample."),
    ] = None,
    parameters: Annotated[str | None, typer.Option(help="Parameters of the model: 20M, 7B.")] = None,
    model: Annotated[str | None, typer.Option(help="Or name of the model: tiny … 2.7b, xxl.")] = None,
    nodes: Annotated[
        str, typer.Option(help="Separated by commas; FIRST:LAST doubles, FIRST:LAST:x10 multiplies by 10.")
    ] = "1:1024",
    ranks_per_node: Annotated[int, typer.Option(help="Devices per node.")] = 1,
    batch: Annotated[
        str,
        typer.Option(
            help="per-rank: --step is for a rank's own batch; fixed: for the whole batch on one rank."
        ),
    ] = "per-rank",
    speeds: Annotated[
        str, typer.Option(help="Relative speeds of nodes, repeated; --step is for the fastest: 1:1:2:4.")
    ] = "1",
    shares: Annotated[str, typer.Option(help="Distribution of work: equal, or by speed.")] = "equal",
    spread: Annotated[str, typer.Option(help="Log-normal standard deviation of node speeds.")] = "0%",
    jitter: Annotated[str, typer.Option(help="Log-normal standard deviation of a rank's step times.")] = "0%",
    topology: Annotated[str, typer.Option(help="Links between nodes: star (a switch), ring, tree.")] = "star",
    link: Annotated[
        str, typer.Option(help="Link of a node, per direction: a rate (200Mbit/s) or a name (10gbe, ndr).")
    ] = "10gbe",
    latency: Annotated[str | None, typer.Option(help="Latency between nodes; default: of the link.")] = None,
    inside: Annotated[
        str | None, typer.Option(help="Link of a rank inside its node: nvlink4, pcie4, 12GB/s.")
    ] = None,
    inside_latency: Annotated[
        str | None, typer.Option(help="Latency inside a node; default: of the link.")
    ] = None,
    switch: Annotated[str | None, typer.Option(help="Total rate of the switch; default: unlimited.")] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measured all-reduce and contention, instead of links."),
    ] = None,
    backend: Annotated[str, typer.Option(help="Backend of the profile.")] = "gloo",
    network: NetworkOption = None,
    algorithm: Annotated[
        str,
        typer.Option(
            help="auto (the fastest), ring, tree, doubling, halving-doubling, two-level, two-level-halving."
        ),
    ] = "auto",
    strategy: Annotated[str, typer.Option(help="flat, bucketed, sharded, full-shard.")] = "bucketed",
    bucket_mib: Annotated[float, typer.Option(help="Size of a bucket in MiB.")] = 25.0,
    gradients: Annotated[int, typer.Option(help="Bytes per gradient on the wire: 4, 2, 1.")] = 4,
    backward: Annotated[str, typer.Option(help="Share of backward in computing.")] = "66.7%",
    contention: Annotated[
        str | None,
        typer.Option(
            help="Slowdown of computing during communication, and of communication during computing: 1.3:1.1; "
            "default: of the profile, or 1:1."
        ),
    ] = None,
    every: Annotated[int, typer.Option(help="H, steps between two exchanges (of parameters, above 1).")] = 1,
    mtbf: Annotated[
        str | None, typer.Option(help="Mean time between failures of a node: 1000d; default: no failures.")
    ] = None,
    checkpoint: Annotated[str, typer.Option(help="Time that training waits for a checkpoint: 30s.")] = "0s",
    interval: Annotated[
        str, typer.Option(help="Training between two checkpoints: a time, or auto (Daly's).")
    ] = "auto",
    restart: Annotated[str, typer.Option(help="Time from a failure until training resumes: 5min.")] = "0s",
    job: Annotated[
        str | None,
        typer.Option(help="Computing of the whole job on one node: 10000h; default: a week of all nodes."),
    ] = None,
    price: Annotated[float | None, typer.Option(help="Price of a node hour.")] = None,
    jobs: Annotated[int, typer.Option(help="Jobs simulated per number of nodes.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    json_file: JsonOption = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write table.csv, result.json and a chart over nodes."),
    ] = None,
) -> None:
    """Simulate a training on 1 to 1,000,000 nodes: step time, efficiency and its losses, failures, cost.

    The same command gives bitwise identical results.

    Examples: paceline simulate --parameters 7B --step 1.2s --nodes 1:10000 --ranks-per-node 8 --link ndr
    --inside nvlink4 --spread 2% --jitter 3% --mtbf 1800d --checkpoint 60s --restart 5min

    paceline simulate --parameters 20M --step 0.97s --link 200Mbit/s --batch fixed --nodes 1:64 --strategy flat

    paceline simulate async trains real models in virtual time (paceline simulate async --help).
    """
    if context.invoked_subcommand is not None:
        _check_nothing_before(context, context.invoked_subcommand)
        return
    _check_network(context)
    from paceline.cost_model.profile import Profile
    from paceline.tools.cli.simulate import simulate_cluster_request as request
    from paceline.tools.simulate.cluster.cluster_simulation import ClusterPlan
    from paceline.tools.simulate.cluster.compute_times import ClusterMachines

    numbers = request.parse_nodes(nodes)
    parameter_count = parse_model_parameters(model, parameters)
    step_seconds, measured = request.parse_step(step)
    if gradients not in (1, 2, 4):
        raise UsageError(f"--gradients {gradients}", remedy="pass 4, 2 or 1 bytes")
    if not 0 < bucket_mib < math.inf:
        raise UsageError(f"--bucket-mib {bucket_mib}", remedy="pass MiB above 0")
    loaded = None if profile is None else Profile.load(profile)
    cost = None if loaded is None else request.measured_network(loaded, backend, network)
    slowdowns = request.parse_contention(contention, loaded, backend, cost.network if cost else None)
    plan = ClusterPlan(
        network=request.parse_network(
            cost,
            topology=topology,
            link=link,
            latency=latency,
            ranks_per_node=ranks_per_node,
            inside=inside,
            inside_latency=inside_latency,
            switch=switch,
        ),
        step_seconds=step_seconds,
        nbytes=float(gradients * parameter_count),
        machines=ClusterMachines(
            parse_list("--speeds", speeds, float, example="1:1:2:4", separator=":"),
            parse_share(spread),
            parse_share(jitter),
            measured,
            shares,
        ),
        batch=batch,
        strategy=strategy,
        bucket_nbytes=bucket_mib * 2**20,
        backward=parse_share(backward),
        computing_slows=slowdowns[0],
        calls_slow=slowdowns[1],
        algorithm=algorithm,
        every=every,
        node_mtbf=math.inf if mtbf is None else request.parse_time("--mtbf", mtbf),
        write=parse_seconds(checkpoint),
        restart=parse_seconds(restart),
        interval=None if interval == "auto" else request.parse_time("--interval", interval),
        work=None if job is None else request.parse_time("--job", job),
        price=price,
        jobs=jobs,
        seed=seed,
    )
    request.check_failures(plan, restart)
    simulation = request.ClusterRequest(plan, numbers, parameter_count, recorded_options(context))
    _run(simulation, json_file, out)


def _run(simulation: ClusterRequest, json_file: Path | None, out: Path | None) -> None:
    """Simulate, show the rows, and write the files, which are checked before."""
    from paceline.tools.cli.simulate import simulate_cluster_output
    from paceline.tools.simulate.cluster.cluster_simulation import sweep_nodes

    writer_of = simulate_cluster_output.plan_files(json_file, out, len(simulation.nodes))
    rows = list(sweep_nodes(simulation.plan, simulation.nodes))
    simulate_cluster_output.show(simulation, rows)
    write_results(writer_of, simulation, rows)


def _check_nothing_before(context: typer.Context, subcommand: str) -> None:
    """Reject options before a subcommand, which would ignore them."""
    given = [name for name in context.params if _was_given(context, name)]
    if given:
        raise UsageError(
            f"--{given[0].replace('_', '-')} is before {subcommand}",
            remedy=f"pass options of paceline simulate {subcommand} after its name",
        )


def _check_network(context: typer.Context) -> None:
    """Reject described links together with a measured network."""
    if context.params["profile"] is None:
        return
    for name in ("topology", "link", "latency", "inside", "inside_latency", "switch"):
        if _was_given(context, name):
            raise UsageError(
                f"both --profile and --{name.replace('_', '-')}",
                remedy="a profile replaces the description of the network: omit one of them",
            )


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
