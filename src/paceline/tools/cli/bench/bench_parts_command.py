"""``paceline bench parts``: what the parts of a training step take, for the plan's step-time model.

Options of ``paceline bench parts``.

The tables of ``paceline bench parts``.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline._core.format import format_bytes, format_seconds
from paceline._core.json_codec import encode
from paceline._core.units import MIB
from paceline.errors import UsageError
from paceline.tools.cli.shared_options import ThreadsOption

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.cost_model.profile import Profile
    from paceline.cost_model.profile_entries import Contention, ExchangeCost, ModelStep, Source
    from paceline.tools.bench.parts.parts_settings import PartsSettings
    from paceline.world import ProcessPlace

__all__ = [
    "FOOTER",
    "BackendOption",
    "BatchSizeOption",
    "ContextOption",
    "NetworkOption",
    "ProfileOption",
    "RanksOption",
    "RoundsOption",
    "SecondsOption",
    "SizeOption",
    "StepsOption",
    "TorchOption",
    "WorkloadOption",
    "beside_table",
    "model_line",
    "parts",
    "price_table",
]


def parts(
    profile_file: ProfileOption,
    ranks: RanksOption = None,
    size: SizeOption = None,
    workload: WorkloadOption = None,
    batch_size: BatchSizeOption = 2,
    context: ContextOption = 64,
    threads: ThreadsOption = 1,
    backend: BackendOption = None,
    network: NetworkOption = None,
    steps: StepsOption = 15,
    rounds: RoundsOption = 3,
    seconds: SecondsOption = 1.0,
    torch: TorchOption = True,
) -> None:
    """Measure the parts of a training step by themselves: computing, exchanges, and how much they slow each other.

    No whole step is run: that is what paceline plan step predicts. Starts its processes itself; under torchrun or
    paceline lab it takes part in theirs.

    Example: paceline bench parts --size mini --profile profile.json && paceline plan step --profile profile.json
    """
    from paceline.cost_model.profile import Profile
    from paceline.cost_model.profile_entries import Source
    from paceline.tools.bench.collectives.benchmarked_backends import check_backends
    from paceline.tools.bench.collectives.collectives_request import under_launcher
    from paceline.tools.bench.parts.parts_settings import PartsSettings
    from paceline.tools.cli.bench.profile_file import load_or_new, now
    from paceline.tools.result_files import machine_record, versions
    from paceline.world import read_environment

    place = read_environment(os.environ)
    between = under_launcher(place) and (place.nodes or 1) > 1
    settings = PartsSettings(
        ranks=_ranks(ranks, place, joined=under_launcher(place)),
        size=size if size or workload else "mini",
        workload=workload,
        batch_size=batch_size,
        context=context,
        threads=threads,
        backend=backend,
        network=network or ("between hosts" if between else "loopback"),
        steps=steps,
        rounds=rounds,
        seconds=seconds,
        torch=torch,
    )
    if backend is not None:
        check_backends((backend,), place.local_size or settings.ranks)
    earlier = load_or_new(profile_file) if place.rank == 0 else Profile()
    command = shlex.join(["paceline", *sys.argv[1:]])
    source = Source(command, now(), machine_record(), versions(["paceline", "torch"]))
    found = (_join if under_launcher(place) else _start)(settings, earlier, source)
    if found is not None:
        _show(found)
        earlier.merged(found).save(profile_file)
        typer.echo(profile_file)


def _ranks(asked: int | None, place: ProcessPlace, *, joined: bool) -> int:
    if not joined:
        return 2 if asked is None else asked
    if asked is not None and asked != place.size:
        raise UsageError(
            f"--ranks {asked}, but {place.source} started {place.size}",
            remedy="leave --ranks out under a launcher",
        )
    return place.size


def _join(settings: PartsSettings, earlier: Profile, source: Source) -> Profile | None:
    """Be the rank that a launcher started this process as."""
    from paceline.tools.bench.parts.parts_worker import measure_as_rank

    return measure_as_rank(settings, earlier, source)


def _start(settings: PartsSettings, earlier: Profile, source: Source) -> Profile | None:
    """Start the ranks and return what they found."""
    from paceline.cost_model.profile import Profile
    from paceline.launch.process.local_ranks import run_ranks

    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        job, out = Path(folder) / "job.json", Path(folder) / "found.json"
        description = {"settings": encode(settings), "source": vars(source), "earlier": earlier.to_json()}
        job.write_text(json.dumps(description | {"out": str(out)}), encoding="utf-8")
        env = {"OMP_NUM_THREADS": str(settings.threads)}
        run_ranks(["-m", "paceline.tools.bench.parts.parts_worker", str(job)], settings.ranks, env=env)
        return Profile.load(out)


def _show(found: Profile) -> None:
    """Print what was measured."""
    pass  # moved
    from paceline.tools.console_table import print_wide

    for step in found.models:
        typer.echo(model_line(step))
    print_wide(price_table(found.exchanges, found.models[0]))
    print_wide(beside_table(found.contentions))
    typer.echo(FOOTER)


ProfileOption = Annotated[
    Path,
    typer.Option("--profile", metavar="FILE", help="Add what is measured to this profile, or make it."),
]


RanksOption = Annotated[
    int | None, typer.Option(help="Processes on this machine; else 2, or as many as a launcher started.")
]


SizeOption = Annotated[str | None, typer.Option(help="Reference model; else mini.")]


WorkloadOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.py:FUNCTION",
        help="Your own model instead; the function returns (model, loss_of, samples in a batch).",
    ),
]


BatchSizeOption = Annotated[int, typer.Option(help="Windows of a rank's batch, of a reference model.")]


ContextOption = Annotated[int, typer.Option(help="Tokens of a window, of a reference model.")]


BackendOption = Annotated[
    str | None,
    typer.Option(help="What Paceline's exchanges run on: paceline, gloo or nccl; else what fits."),
]


NetworkOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="What is between the ranks, to be kept in the profile.")
]


StepsOption = Annotated[int, typer.Option(help="Steps of computing that are timed.")]


RoundsOption = Annotated[int, typer.Option(help="Repetitions of computing beside exchanges.")]


SecondsOption = Annotated[float, typer.Option(help="Time for an exchange of one size, at most about.")]


TorchOption = Annotated[bool, typer.Option(help="Measure the calls of torch's own DDP too.")]


FOOTER = (
    "Medians; the slowest rank counts. In a row: what one more exchange takes while others are under way. Error: the\n"
    "median of sizes that were held out, predicted from the others. × slower: computing and exchanges side by side."
)


_SIZES = (1024, MIB, 25 * MIB)


def model_line(step: ModelStep) -> str:
    """Return what a model's computing takes, in words."""
    parts = (("forward", step.forward), ("backward", step.backward), ("into buckets", step.buffered))
    told = ", ".join(
        f"{name} {format_seconds(seconds)}" for name, seconds in (*parts, ("update", step.optimizer))
    )
    return (
        f"{step.model}, {step.batch} samples a rank ({step.shape}), {len(step.parameters)} parameters of "
        f"{format_bytes(step.nbytes)}, {step.ranks} ranks: {told}"
    )


def price_table(costs: Sequence[ExchangeCost], step: ModelStep) -> Table:
    """Return what exchanges cost at a few sizes within what was measured, and the error of the fits."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("exchange", "by", "on", ""):
        table.add_column(name, no_wrap=True)
    sizes = [size for size in _SIZES if size < step.nbytes] + [step.nbytes]
    for title in (*map(format_bytes, sizes), "error"):
        table.add_column(title, justify="right", no_wrap=True)
    for cost in costs:
        times = [format_seconds(cost.fit.seconds(size, step.ranks)) for size in sizes]
        error = cost.fit.sizes_error
        told = "" if error is None else f"{100 * error.median:.1f} %"
        how = "in a row" if cost.queued else "alone"
        table.add_row(cost.fit.op, cost.caller, f"{cost.backend}, {cost.network}", how, *times, told)
    return table


def beside_table(costs: Sequence[Contention]) -> Table:
    """Return what computing and exchanges do to each other."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("beside computing", "by", "on"):
        table.add_column(name, no_wrap=True)
    for title in ("a launch", "computing × slower", "exchanges × slower"):
        table.add_column(title, justify="right", no_wrap=True)
    for cost in costs:
        values = (
            format_seconds(cost.launch_seconds),
            f"{cost.computing_slows:.2f}",
            f"{cost.calls_slow:.2f}",
        )
        table.add_row(cost.op, cost.caller, f"{cost.backend}, {cost.network}", *values)
    return table
