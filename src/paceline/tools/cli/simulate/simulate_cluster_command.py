"""``paceline simulate``: analytic simulation of a training on many nodes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline._core.units import parse_list, parse_seconds, parse_share
from paceline.errors import UsageError
from paceline.parallel.strategy import ALIASES
from paceline.tools.cli.shared_options import JsonOption, parse_model_parameters
from paceline.tools.cli.simulate.simulate_options import recorded_options, write_results
from paceline.tools.command_options import own, shared

if TYPE_CHECKING:
    from paceline.tools.cli.simulate.simulate_cluster_request import ClusterRequest

__all__ = ["cluster"]

_TRAINING, _MACHINES, _NETWORK, _FAILURES, _JOBS = "Training", "Machines", "Network", "Failures", "Jobs"


def cluster(
    context: typer.Context,
    step: Annotated[
        str | None,
        shared("step", " on the fastest machine: 250ms, or a file of steps to sample", panel=_TRAINING),
    ] = None,
    parameters: Annotated[str | None, shared("parameters", panel=_TRAINING)] = None,
    model: Annotated[
        str | None, shared("model", ": tiny … 2.7b, xxl; instead of --parameters", panel=_TRAINING)
    ] = None,
    scaling: Annotated[
        str,
        own(
            "NAME",
            "Scaling: weak, --step is for a rank's own batch; strong, for the whole batch on one rank.",
            panel=_TRAINING,
        ),
    ] = "weak",
    strategy: Annotated[
        str, shared("strategy", ": flat, bucketed, sharded, full-shard", panel=_TRAINING)
    ] = "bucketed",
    bucket_mib: Annotated[float, shared("bucket-mib", panel=_TRAINING)] = 25.0,
    gradient_bytes: Annotated[int, shared("gradient-bytes", panel=_TRAINING)] = 4,
    every: Annotated[int, shared("every", "; 1: gradients in every step", panel=_TRAINING)] = 1,
    backward: Annotated[str, own("PERCENT", "Share of backward in computing.", panel=_TRAINING)] = "66.7%",
    nnodes: Annotated[
        str,
        shared(
            "nnodes", "; FIRST:LAST doubles, FIRST:LAST:x10 multiplies by 10", several=True, panel=_MACHINES
        ),
    ] = "1:1024",
    nproc_per_node: Annotated[int, shared("nproc-per-node", ", each with a device", panel=_MACHINES)] = 1,
    speeds: Annotated[str, shared("speeds", "; --step is for the fastest: 1:1:2:4", panel=_MACHINES)] = "1",
    balance: Annotated[
        str, own("NAME", "Balance of the work: equal, or by speed.", panel=_MACHINES)
    ] = "equal",
    spread: Annotated[str, shared("spread", panel=_MACHINES)] = "0%",
    jitter: Annotated[str, shared("jitter", ", log-normal", panel=_MACHINES)] = "0%",
    topology: Annotated[
        str, shared("topology", ": links between hosts as star (a switch), ring, tree", panel=_NETWORK)
    ] = "star",
    link: Annotated[
        str, shared("link", ": a rate (200Mbit/s) or a name (10gbe, ndr)", panel=_NETWORK)
    ] = "10gbe",
    latency: Annotated[str | None, shared("latency", "; default: of the link", panel=_NETWORK)] = None,
    inside: Annotated[str | None, shared("inside", ": nvlink4, pcie4, 12GB/s", panel=_NETWORK)] = None,
    inside_latency: Annotated[
        str | None, own("TIME", "Latency of a link inside a machine; default: of the link.", panel=_NETWORK)
    ] = None,
    switch: Annotated[str | None, shared("switch", "; default: unlimited", panel=_NETWORK)] = None,
    profile: Annotated[
        Path | None,
        shared("profile", " with measured all-reduce and contention, instead of links", panel=_NETWORK),
    ] = None,
    backend: Annotated[str, shared("backend", " of the profile", panel=_NETWORK)] = "gloo",
    network: Annotated[str | None, shared("network", panel=_NETWORK)] = None,
    algorithm: Annotated[
        str,
        own(
            "NAME",
            "Algorithm: auto (the fastest), ring, tree, doubling, halving-doubling, two-level, "
            "two-level-halving.",
            panel=_NETWORK,
        ),
    ] = "auto",
    contention: Annotated[
        str | None,
        own(
            "X:X",
            "Slowdown of computing during communication, and of communication during computing: 1.3:1.1; "
            "default: of the profile, or 1:1.",
            panel=_NETWORK,
        ),
    ] = None,
    mtbf: Annotated[
        str | None,
        shared("mtbf", ": 1000d; default: no failures", panel=_FAILURES),
    ] = None,
    checkpoint_time: Annotated[str, shared("checkpoint-time", ": 30s", panel=_FAILURES)] = "0s",
    checkpoint_interval: Annotated[
        str, shared("checkpoint-interval", ": a time, or auto (Daly's)", panel=_FAILURES)
    ] = "auto",
    restart_time: Annotated[str, shared("restart-time", ": 5min", panel=_FAILURES)] = "0s",
    recovery: Annotated[str, shared("recovery", "; or both, to compare them", panel=_FAILURES)] = "both",
    host_loss: Annotated[
        str,
        own("PERCENT", "Share of failures that take a host; the others take a process.", panel=_FAILURES),
    ] = "20%",
    notice_time: Annotated[
        str,
        own("TIME:TIME", "Time until survivors notice a lost process, and a lost host.", panel=_FAILURES),
    ] = "10ms:5s",
    rebuild_time: Annotated[
        str | None,
        own(
            "TIME",
            "Time in which survivors form a new world; default, as measured: 1s, on one host 0.5s.",
            panel=_FAILURES,
        ),
    ] = None,
    replacement_time: Annotated[
        str | None,
        own(
            "TIME",
            "Time from a failure until a replacement is ready; default: --restart-time.",
            panel=_FAILURES,
        ),
    ] = None,
    state_bytes: Annotated[
        int,
        own("N", "Bytes of state per parameter: 12 with Adam, 4 of them the parameter.", panel=_FAILURES),
    ] = 12,
    virtual_ranks: Annotated[
        int,
        shared(
            "virtual-ranks",
            " per rank, to keep the global batch while ranks are missing; 0: none",
            panel=_FAILURES,
        ),
    ] = 0,
    job_time: Annotated[
        str | None,
        own(
            "TIME",
            "Computing of the whole job on one host: 10000h; default: a week of all hosts.",
            panel=_JOBS,
        ),
    ] = None,
    price: Annotated[float | None, own("X", "Price of a host's hour.", panel=_JOBS)] = None,
    jobs: Annotated[int, own("N", "Jobs simulated per number of hosts.", panel=_JOBS)] = 32,
    seed: Annotated[int, shared("seed", panel=_JOBS)] = 0,
    json_file: JsonOption = None,
    out: Annotated[Path | None, shared("out", ": table.csv, result.json and a chart over hosts")] = None,
) -> None:
    """Simulate a training on 1 to 1,000,000 nodes: step time, efficiency and its losses, failures, cost.

    The same command gives bitwise identical results.

    Examples: paceline simulate --parameters 7B --step 1.2s --nnodes 1:10000 --nproc-per-node 8 --link ndr
    --inside nvlink4 --spread 2% --jitter 3% --mtbf 1800d --checkpoint-time 60s --restart-time 5min

    paceline simulate --parameters 20M --step 0.97s --link 200Mbit/s --scaling strong --nnodes 1:64 --strategy flat

    paceline simulate async trains real models in virtual time (paceline simulate async --help).
    """
    if context.invoked_subcommand is not None:
        _check_nothing_before(context, context.invoked_subcommand)
        return
    _check_network(context)
    _check_recovery(context)
    from paceline.cost_model.profile import Profile
    from paceline.tools.cli.simulate import simulate_cluster_request as request
    from paceline.tools.simulate.cluster.cluster_plan import ClusterPlan
    from paceline.tools.simulate.cluster.compute_times import ClusterMachines

    numbers, parameter_count = request.parse_nodes(nnodes), parse_model_parameters(model, parameters)
    step_seconds, measured = request.parse_step(step)
    if gradient_bytes not in (1, 2, 4):
        raise UsageError(f"--gradient-bytes {gradient_bytes}", remedy="pass 4, 2 or 1 bytes")
    if not 0 < bucket_mib < math.inf:
        raise UsageError(f"--bucket-mib {bucket_mib}", remedy="pass MiB above 0")
    loaded = None if profile is None else Profile.load(profile)
    ways = request.parse_recoveries(recovery, failing=mtbf is not None)
    cost = None if loaded is None else request.measured_network(loaded, backend, network)
    slowdowns = request.parse_contention(contention, loaded, backend, cost.network if cost else None)
    plan = ClusterPlan(
        network=request.parse_network(
            cost,
            topology=topology,
            link=link,
            latency=latency,
            ranks_per_node=nproc_per_node,
            inside=inside,
            inside_latency=inside_latency,
            switch=switch,
        ),
        step_seconds=step_seconds,
        nbytes=float(gradient_bytes * parameter_count),
        machines=ClusterMachines(
            parse_list("--speeds", speeds, float, example="1:1:2:4", separator=":"),
            parse_share(spread),
            parse_share(jitter),
            measured,
            balance,
        ),
        scaling=scaling,
        strategy=ALIASES.get(strategy, strategy),
        bucket_nbytes=bucket_mib * 2**20,
        backward=parse_share(backward),
        computing_slows=slowdowns[0],
        calls_slow=slowdowns[1],
        algorithm=algorithm,
        every=every,
        node_mtbf=math.inf if mtbf is None else request.parse_time("--mtbf", mtbf),
        write=parse_seconds(checkpoint_time),
        restart=parse_seconds(restart_time),
        interval=None
        if checkpoint_interval == "auto"
        else request.parse_time("--checkpoint-interval", checkpoint_interval),
        recovery=ways[-1],
        live=request.parse_live(
            strategy=ALIASES.get(strategy, strategy),
            parameters=parameter_count,
            host_loss=host_loss,
            notice_time=notice_time,
            rebuild_time=rebuild_time,
            replacement_time=replacement_time,
            state_bytes=state_bytes,
            virtual_ranks=virtual_ranks,
        ),
        work=None if job_time is None else request.parse_time("--job-time", job_time),
        price=price,
        jobs=jobs,
        seed=seed,
    )
    request.check_failures(plan, restart_time)
    simulation = request.ClusterRequest(plan, numbers, ways, parameter_count, recorded_options(context))
    _run(simulation, json_file, out)


def _run(simulation: ClusterRequest, json_file: Path | None, out: Path | None) -> None:
    """Simulate, show the rows, and write the files, which are checked before."""
    from paceline.tools.cli.simulate import simulate_cluster_output
    from paceline.tools.simulate.cluster.cluster_simulation import sweep_nodes

    writer_of = simulate_cluster_output.plan_files(json_file, out, len(simulation.nodes))
    rows = list(sweep_nodes(simulation.plan, simulation.nodes, simulation.recoveries))
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


_LIVE_OPTIONS = (
    "host_loss", "notice_time", "rebuild_time", "replacement_time", "state_bytes", "virtual_ranks",
)  # fmt: skip


def _check_recovery(context: typer.Context) -> None:
    """Reject options of recoveries that are not simulated."""
    failing = context.params["mtbf"] is not None
    for name in ("recovery", *_LIVE_OPTIONS):
        option = f"--{name.replace('_', '-')}"
        if not failing and _was_given(context, name):
            raise UsageError(f"{option} without failures", remedy=f"pass --mtbf, or omit {option}")
        if context.params["recovery"] == "restart" and name != "recovery" and _was_given(context, name):
            raise UsageError(
                f"{option} with --recovery restart", remedy=f"{option} is of live recovery: omit one of them"
            )


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
