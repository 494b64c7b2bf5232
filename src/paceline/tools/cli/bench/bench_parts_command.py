"""``paceline bench parts``: the times of the parts of a training step, for the plan's step-time model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline._core.format import format_bytes, format_percent, format_seconds
from paceline._core.json_codec import encode
from paceline._core.units import MIB
from paceline.tools.bench.rank_jobs import check_launched_ranks, network_name, under_launcher
from paceline.tools.cli.bench.profile_file import load_or_new_profile, measurement_source
from paceline.tools.command_options import own, shared

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.cost_model.profile import Profile
    from paceline.cost_model.profile_entries import Contention, ExchangeCost, ModelStep, Source
    from paceline.tools.bench.step_parts.parts_settings import PartsSettings
    from paceline.world import ProcessPlace

__all__ = ["parts"]

_FOOTER = (
    "Medians; the slowest rank counts. Queued: time of one more exchange while others are pending. Error: the median\n"
    "of sizes that were held out, predicted from the others. × slower: computing and exchanges at the same time."
)
_SIZES = (1024, MIB, 25 * MIB)


def parts(
    profile_file: Annotated[Path, shared("profile", " to add the times to, or to create")],
    nproc_per_node: Annotated[int | None, shared("nproc-per-node", "; default 2, or the launcher's")] = None,
    model: Annotated[
        str,
        shared(
            "model",
            ": a size of the reference GPT, or FILE.py:FUNCTION, which returns (model, loss_of, samples in a batch)",
        ),
    ] = "mini",
    micro_batch_size: Annotated[int, shared("micro-batch-size", ", of a reference model")] = 2,
    context: Annotated[int, shared("context", ", of a reference model")] = 64,
    threads: Annotated[int, shared("threads")] = 1,
    backend: Annotated[
        str | None,
        shared(
            "backend", " of Paceline's exchanges: paceline, gloo, nccl or xccl; default: chosen by the device"
        ),
    ] = None,
    network: Annotated[str | None, shared("network", " to be written")] = None,
    steps: Annotated[int, shared("steps", " of computing")] = 15,
    rounds: Annotated[int, shared("rounds", " of computing during exchanges")] = 3,
    seconds: Annotated[float, shared("seconds", " for the exchanges of one size, about")] = 1.0,
    torch: Annotated[bool, own(None, "Measure the calls of torch's own DDP too.")] = True,
) -> None:
    """Measure the parts of a training step separately: computing, exchanges, and how much they slow each other.

    No whole step is run: paceline plan step predicts it. Starts its processes itself; under torchrun or paceline lab
    it takes part in theirs.

    Example: paceline bench parts --model mini --profile profile.json && paceline plan step --profile profile.json
    """
    from paceline.cost_model.profile import Profile
    from paceline.tools.bench.collectives.benchmarked_backends import check_backends
    from paceline.tools.bench.step_parts.parts_settings import PartsSettings
    from paceline.world import read_environment

    place = read_environment(os.environ)
    settings = PartsSettings(
        ranks=_number_of_ranks(nproc_per_node, place),
        size=None if ":" in model else model,
        workload=model if ":" in model else None,
        batch_size=micro_batch_size,
        context=context,
        threads=threads,
        backend=backend,
        network=network_name(network, place),
        steps=steps,
        rounds=rounds,
        seconds=seconds,
        torch=torch,
    )
    if backend is not None:
        check_backends((backend,), place.local_size or settings.ranks)
    earlier = load_or_new_profile(profile_file) if place.rank == 0 else Profile()
    measure = _measure_as_rank if under_launcher(place) else _measure_in_new_ranks
    found = measure(settings, earlier, measurement_source())
    if found is not None:
        _show(found)
        earlier.merged(found).save(profile_file)
        typer.echo(profile_file)


def _number_of_ranks(given: int | None, place: ProcessPlace) -> int:
    if not under_launcher(place):
        return 2 if given is None else given
    if given is not None:
        check_launched_ranks(str(given), {given}, place)
    return place.size


def _measure_as_rank(settings: PartsSettings, earlier: Profile, source: Source) -> Profile | None:
    """Take part as the rank that a launcher started."""
    from paceline.tools.bench.step_parts.parts_worker import measure_as_rank

    return measure_as_rank(settings, earlier, source)


def _measure_in_new_ranks(settings: PartsSettings, earlier: Profile, source: Source) -> Profile:
    """Start the ranks and return their measurements."""
    from paceline.cost_model.profile import Profile
    from paceline.launch.process.local_ranks import run_ranks
    from paceline.tools.bench.rank_jobs import run_rank_job

    job = {"settings": encode(settings), "source": vars(source), "earlier": earlier.to_json()}
    module, env = "paceline.tools.bench.step_parts.parts_worker", {"OMP_NUM_THREADS": str(settings.threads)}
    return Profile.from_json(run_rank_job(run_ranks, module, job, settings.ranks, env=env))


def _show(found: Profile) -> None:
    """Print the measurements."""
    from paceline.tools.console_table import print_wide

    for step in found.models:
        typer.echo(_model_line(step))
    print_wide(_exchange_table(found.exchanges, found.models[0]))
    print_wide(_contention_table(found.contentions))
    typer.echo(_FOOTER)


def _model_line(step: ModelStep) -> str:
    """Return the compute times of a model as one line."""
    parts = {
        "forward": step.forward,
        "backward": step.backward,
        "into buckets": step.buffered,
        "update": step.optimizer,
    }
    times = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts.items())
    return (
        f"{step.model}, {step.batch} samples a rank ({step.shape}), {len(step.parameters)} parameters of "
        f"{format_bytes(step.nbytes)}, {step.ranks} ranks: {times}"
    )


def _exchange_table(costs: Sequence[ExchangeCost], step: ModelStep) -> Table:
    """Return the times of exchanges at a few of the measured sizes, and the errors of the fits."""
    from paceline.tools.console_table import make_table

    sizes, rows = [*(size for size in _SIZES if size < step.nbytes), step.nbytes], []
    for cost in costs:
        times = [format_seconds(cost.fit.seconds(size, step.ranks)) for size in sizes]
        error = cost.fit.sizes_error
        share = "" if error is None else format_percent(error.median)
        manner = "queued" if cost.queued else "alone"
        rows.append([cost.fit.op, cost.caller, f"{cost.backend}, {cost.network}", manner, *times, share])
    return make_table(("exchange", "by", "on", "", *map(format_bytes, sizes), "error"), rows, left=4)


def _contention_table(costs: Sequence[Contention]) -> Table:
    """Return how much computing and exchanges slow each other."""
    from paceline.tools.console_table import make_table

    columns = ("during computing", "by", "on", "a launch", "computing × slower", "exchanges × slower")
    rows = []
    for cost in costs:
        ratios = [f"{ratio:.2f}" for ratio in (cost.computing_slows, cost.calls_slow)]
        on = f"{cost.backend}, {cost.network}"
        rows.append([cost.op, cost.caller, on, format_seconds(cost.launch_seconds), *ratios])
    return make_table(columns, rows, left=3)
