"""``paceline simulate async``: asynchronous training in virtual time, compared with DDP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    hub_optimizer,
)
from paceline.tools.cli.simulate.simulate_options import parse_share_below_1, recorded_options, write_results

if TYPE_CHECKING:
    from paceline.tools.cli.simulate.simulate_async_request import AsyncRequest

__all__ = ["async_"]

_TASKS = ("linear", "gpt")
_COMPRESSIONS = ("int4", "int8", "bf16", "fp16", "none")


def async_(
    context: typer.Context,
    workers: Annotated[int, typer.Option(help="Number of machines that train.")] = 4,
    task: Annotated[
        str, typer.Option(help="linear (least squares, fast) or gpt (a tiny GPT on text).")
    ] = "linear",
    parameters: Annotated[
        str | None,
        typer.Option(help="Size messages for a model of so many: 20M; default: the task's model."),
    ] = None,
    speeds: Annotated[
        str, typer.Option(help="Relative speeds, repeated for all workers; 4 is the fastest of 1:1:2:4.")
    ] = "1:1:2:4",
    spread: Annotated[
        float, typer.Option(help="Log-normal σ of an additional factor of each worker's step time.")
    ] = 0.0,
    step: Annotated[str, typer.Option(help="Step time of the fastest machine.")] = "100ms",
    jitter: Annotated[str, typer.Option(help="Relative standard deviation of step times.")] = "10%",
    link: Annotated[str, typer.Option(help="Rate of each worker's link, per direction.")] = "200Mbit/s",
    hub_link: Annotated[
        str | None, typer.Option(help="Rate of the hub's link, per direction; default: as workers.")
    ] = None,
    latency: Annotated[str, typer.Option(help="Latency between two machines.")] = "0.1ms",
    steps: Annotated[
        int | None, typer.Option(help="Steps of each worker; ends when all are done, or by --for.")
    ] = None,
    for_: Annotated[
        str | None,
        typer.Option("--for", help="Virtual time; default: 300 steps of the slowest machine, or --steps."),
    ] = None,
    every: Annotated[
        str, typer.Option(help="k, local steps between updates; several separated by commas.")
    ] = "4,10,25",
    delay: Annotated[
        str, typer.Option(help="d, local steps from sending to merging; several separated by commas.")
    ] = "0,5",
    fragments: Annotated[int, typer.Option(help="Parts of the model that are sent in turn.")] = 1,
    compression: Annotated[
        str, typer.Option(help="Compression of updates: int4, int8, bf16, fp16, none.")
    ] = "int4",
    down: DownOption = "bf16",
    outer: OuterOption = "averaging",
    outer_lr: OuterLrOption = None,
    outer_momentum: OuterMomentumOption = 0.9,
    outer_warmup: OuterWarmupOption = 1,
    unstable: UnstableOption = False,
    staleness: StalenessOption = "accept",
    bound: BoundOption = 16.0,
    send: Annotated[
        str, typer.Option(help="Updates that workers send, by score: all, better, best.")
    ] = "all",
    receive: Annotated[
        str, typer.Option(help="Updates that workers merge, by score: all, better, best.")
    ] = "all",
    population: PopulationOption = None,
    margin: MarginOption = 0.05,
    bad_lr: Annotated[
        str | None,
        typer.Option(
            metavar="WORKER:LR", help="Learning rate of a worker, numbered from 1; several by commas."
        ),
    ] = None,
    different: Annotated[
        bool, typer.Option("--different", help="Start workers from different parameters.")
    ] = False,
    warmup: Annotated[
        int, typer.Option(help="Initial local steps with an exchange at every other step.")
    ] = 0,
    churn: Annotated[
        str | None,
        typer.Option(
            help="Share of workers absent at a time (5%), or events: 30s:-3,60s:+3,90s:-hub,95s:+hub."
        ),
    ] = None,
    spoil: Annotated[
        str, typer.Option(help="Share of messages that are lost, repeated, late or damaged.")
    ] = "0%",
    seed: Annotated[int, typer.Option(help="Seed of parameters, data, jitter and faults.")] = 0,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate of the task; default: a suitable one.")
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="Loss to which time is measured; default: DDP's final loss.")
    ] = None,
    beside: Annotated[
        bool, typer.Option("--beside/--no-beside", help="Simulate DDP on the same machines as the first row.")
    ] = True,
    json_file: JsonOption = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write table.csv, result.json and charts of loss and time."),
    ] = None,
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
    request.check_numbers(workers=workers, steps=steps, warmup=warmup, seed=seed, lr=lr, target=target)
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
            staleness=StalenessPolicy(staleness, bound),
            population=None if population is None else PopulationRules(population, margin, seed=seed),
            down=down,
        ),
        policy=SelectionPolicy(send, receive),
        compression=None if compression == "none" else compression,
        same_init=not different,
        warmup=warmup,
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
    notes = request.make_notes(
        workers,
        length,
        steps=steps if for_ is None else None,
        without_churn=beside and bool(churn or fault_share),
        without_bad_lr=beside and bool(bad_lr),
    )
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
        notes=notes,
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
