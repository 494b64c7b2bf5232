"""``paceline simulate async``: asynchronous training in virtual time, compared with DDP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.tools.cli.shared_options import JsonOption, hub_optimizer, merge_rules
from paceline.tools.cli.simulate.simulate_options import parse_share_below_1, recorded_options, write_results
from paceline.tools.command_options import own, shared

if TYPE_CHECKING:
    from paceline.tools.cli.simulate.simulate_async_request import AsyncRequest

__all__ = ["async_"]

_TRAINING, _SCHEDULE, _MERGING = "Training", "Workers' updates", "Merging"
_MACHINES, _NETWORK = "Machines", "Network"
_TASKS = ("linear", "gpt")
_COMPRESSIONS = ("int4", "int2", "topk-int2", "int8", "bf16", "fp16", "none")


def async_(
    context: typer.Context,
    task: Annotated[
        str, own("NAME", "Task: linear (least squares, fast) or gpt (a tiny GPT on text).", panel=_TRAINING)
    ] = "linear",
    parameters: Annotated[
        str | None, shared("parameters", ": that size messages; default: of the task", panel=_TRAINING)
    ] = None,
    lr: Annotated[
        float | None, shared("lr", " of the task; default: a suitable one", panel=_TRAINING)
    ] = None,
    bad_lr: Annotated[
        str | None, own("WORKER:LR,…", "Learning rate of a worker, numbered from 1.", panel=_TRAINING)
    ] = None,
    different: Annotated[
        bool, own(None, "Start workers from different parameters.", "--different", panel=_TRAINING)
    ] = False,
    steps: Annotated[
        int | None, shared("steps", " of each worker; ends when all are done, or by --for", panel=_TRAINING)
    ] = None,
    for_: Annotated[
        str | None,
        own(
            "TIME",
            "Virtual time; default: 300 steps of the slowest machine, or --steps.",
            "--for",
            panel=_TRAINING,
        ),
    ] = None,
    target: Annotated[
        float | None, own("X", "Loss to which time is measured; default: DDP's final loss.", panel=_TRAINING)
    ] = None,
    seed: Annotated[int, shared("seed", panel=_TRAINING)] = 0,
    beside: Annotated[
        bool,
        own(
            None,
            "Simulate DDP on the same machines as the first row.",
            "--beside/--no-beside",
            panel=_TRAINING,
        ),
    ] = True,
    every: Annotated[str, shared("every", " (k)", several=True, panel=_SCHEDULE)] = "4,10,25",
    delay: Annotated[str, shared("delay", " (d)", several=True, panel=_SCHEDULE)] = "0,5",
    fragments: Annotated[int, shared("fragments", panel=_SCHEDULE)] = 1,
    warmup_steps: Annotated[
        int, own("STEPS", "Initial local steps with an exchange at every other step.", panel=_SCHEDULE)
    ] = 0,
    compression: Annotated[
        str,
        shared("compression", " of updates: int4, int2, topk-int2, int8, bf16, fp16, none", panel=_SCHEDULE),
    ] = "int4",
    down: Annotated[str, shared("down", panel=_SCHEDULE)] = "bf16",
    send: Annotated[
        str, own("POLICY", "Updates that workers send, by score: all, better, best.", panel=_SCHEDULE)
    ] = "all",
    receive: Annotated[
        str, own("POLICY", "Updates that workers merge, by score: all, better, best.", panel=_SCHEDULE)
    ] = "all",
    merge: Annotated[str, shared("merge", panel=_MERGING)] = "arrival",
    quorum: Annotated[str | None, shared("quorum", "; default 50%", panel=_MERGING)] = None,
    outer: Annotated[
        str, shared("outer", ": averaging, delayed-nesterov, nesterov", panel=_MERGING)
    ] = "averaging",
    outer_lr: Annotated[
        float | None, shared("outer-lr", "; default 1 (averaging), else 0.7", panel=_MERGING)
    ] = None,
    outer_momentum: Annotated[float, shared("outer-momentum", panel=_MERGING)] = 0.9,
    outer_warmup: Annotated[int, shared("outer-warmup", panel=_MERGING)] = 1,
    unstable: Annotated[bool, shared("unstable", panel=_MERGING)] = False,
    staleness: Annotated[str, shared("staleness", panel=_MERGING)] = "accept",
    bound: Annotated[float, shared("bound", panel=_MERGING)] = 16.0,
    population: Annotated[int | None, shared("population", panel=_MERGING)] = None,
    margin: Annotated[float, shared("margin", panel=_MERGING)] = 0.05,
    workers: Annotated[int, own("N", "Number of machines that train.", panel=_MACHINES)] = 4,
    speeds: Annotated[str, shared("speeds", "; 4 is the fastest of 1:1:2:4", panel=_MACHINES)] = "1:1:2:4",
    spread: Annotated[str, shared("spread", ", besides --speeds", panel=_MACHINES)] = "0%",
    step: Annotated[str, shared("step", " on the fastest machine", panel=_MACHINES)] = "100ms",
    jitter: Annotated[str, shared("jitter", ", relative", panel=_MACHINES)] = "10%",
    churn: Annotated[
        str | None,
        own(
            "PERCENT",
            "Share of workers absent at a time (5%), or events: 30s:-3,60s:+3,90s:-hub,95s:+hub.",
            panel=_MACHINES,
        ),
    ] = None,
    link: Annotated[str, shared("link", ": that of each worker", panel=_NETWORK)] = "200Mbit/s",
    hub_link: Annotated[
        str | None,
        own("RATE", "Bandwidth of the hub's link, each direction; default: as workers.", panel=_NETWORK),
    ] = None,
    latency: Annotated[str, shared("latency", panel=_NETWORK)] = "0.1ms",
    spoil: Annotated[
        str, own("PERCENT", "Share of messages that are lost, repeated, late or damaged.", panel=_NETWORK)
    ] = "0%",
    json_file: JsonOption = None,
    out: Annotated[Path | None, shared("out", ": table.csv, result.json and charts of loss and time")] = None,
) -> None:
    """Simulate asynchronous training in virtual time: loss, bytes and time compared with DDP.

    Gradients are real, and so is the code of hub and workers; clocks and links are simulated. The same command gives
    bitwise identical results.

    Examples: paceline simulate async --workers 8 --speeds 1:1:2:4 --link 200Mbit/s --parameters 20M

    paceline simulate async --task gpt --every 10 --delay 5 --for 2min --out results/

    paceline simulate async --churn 30s:-3,60s:+3,90s:-hub,95s:+hub --spoil 1%
    """
    from paceline.tools.cli.simulate import simulate_async_request as request

    request.check_choices(task=(task, _TASKS), compression=(compression, _COMPRESSIONS))
    request.check_numbers(workers=workers, steps=steps, warmup=warmup_steps, seed=seed, lr=lr, target=target)
    from paceline.async_dp.hub.hub_settings import HubRules, PopulationRules
    from paceline.async_dp.hub.staleness_policy import StalenessPolicy
    from paceline.async_dp.worker.score_based_selection import SelectionPolicy
    from paceline.tools.simulate.async_settings import AsyncPlan

    machines = request.parse_machines(
        workers, speeds=speeds, spread=spread, step=step, jitter=jitter, link=link, bad_lr=bad_lr
    )
    seconds, length = request.parse_length(for_, steps, max(each.step_seconds for each in machines))
    schedules, left_out = request.parse_schedules(every, delay, fragments)
    hub_rate = request.parse_hub_link(hub_link, machines[0].up)
    plan = AsyncPlan(
        machines=machines,
        seconds=seconds,
        steps=steps,
        rules=HubRules(
            outer=hub_optimizer(outer, outer_lr, outer_momentum, outer_warmup, unstable),
            merge=merge_rules(merge, quorum),
            staleness=StalenessPolicy(staleness, bound),
            population=None if population is None else PopulationRules(population, margin, seed=seed),
            down=down,
        ),
        policy=SelectionPolicy(send, receive),
        compression=None if compression == "none" else compression,
        same_init=not different,
        warmup=warmup_steps,
        hub_up=hub_rate,
        hub_down=hub_rate,
        latency=request.parse_latency(latency),
        score_every=length / request.POINTS,
        parameters=request.parse_message_parameters(parameters),
        churn=request.parse_churn(churn, workers, length, seed),
        seed=seed,
    )
    plan.policy.check(True, fragments)
    fault_share = parse_share_below_1("--spoil", spoil, "1%")
    simulation = request.AsyncRequest(
        plan=plan,
        schedules=schedules,
        left_out=left_out,
        task=task,
        lr=lr,
        seed=seed,
        with_ddp=beside,
        fault_share=fault_share,
        target=target,
        notes=request.make_notes(
            workers,
            length,
            steps=steps if for_ is None else None,
            without_churn=beside and bool(churn or fault_share),
            without_bad_lr=beside and bool(bad_lr),
        ),
        settings=recorded_options(context),
    )
    _run(simulation, json_file, out)


def _run(simulation: AsyncRequest, json_file: Path | None, out: Path | None) -> None:
    """Simulate, show the rows, and write the files, which are checked before."""
    from paceline.tools.cli.simulate import simulate_async_output

    writer_of = simulate_async_output.plan_files(json_file, out)
    from paceline.tools.cli.simulate.simulate_async_run import simulate_rows

    rows = simulate_rows(simulation)
    simulate_async_output.show(simulation, rows)
    write_results(writer_of, simulation, rows)
