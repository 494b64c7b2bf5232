"""``paceline plan step``: what a training step takes for every way to synchronise gradients, before any is run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.file_options import JsonOption
from paceline.cli.training_options import BucketsOption
from paceline.cli.writable import checked_files
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.cli.step_files import Writer
    from paceline.plan.step_costs import StepCosts
    from paceline.plan.step_measured import MeasuredStep
    from paceline.plan.step_way import Way

__all__ = ["step"]


def step(
    profile_file: Annotated[
        Path, typer.Option("--profile", metavar="FILE", help="What paceline bench parts measured.")
    ],
    model: Annotated[
        str | None, typer.Option(help="Its name; may be left out where there is one only.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="That train; else as many as were measured.")] = None,
    backend: Annotated[
        str | None, typer.Option(help="Of Paceline's exchanges; may be left out where there is one only.")
    ] = None,
    network: Annotated[str | None, typer.Option(help="May be left out where there is one only.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples of a rank, as measured.")] = None,
    shape: Annotated[str | None, typer.Option(help="What a sample is, as measured: 'context 64'.")] = None,
    threads: Annotated[int | None, typer.Option(help="Of a rank, as measured.")] = None,
    bucket_mib: BucketsOption = "1,5,25,100",
    compression: Annotated[
        str, typer.Option(help="Buckets in bf16, int8, int4 too, separated by commas.")
    ] = "",
    measured: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What paceline bench step measured: shown beside.")
    ] = None,
    json_file: JsonOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Draw where time goes, and time by bucket size.")
    ] = None,
) -> None:
    """Predict a training step for every strategy and bucket size, name the best, and set torch's default beside it.

    Example: paceline plan step --profile profile.json --ranks 4 --bucket-mib 1,5,25,100
    """
    from paceline.cli.step_table import sentences, step_table
    from paceline.cli.wide_table import print_wide
    from paceline.plan.profile import Profile
    from paceline.plan.step_costs import pick
    from paceline.plan.step_measured import load_measured, ways_measured
    from paceline.plan.step_time import predict_all

    sizes, squeezed = _sizes(bucket_mib), _names(compression)
    writer_of = _writers(json_file, out)
    costs = pick(
        Profile.load(profile_file),
        model,
        ranks=ranks,
        backend=backend,
        network=network,
        batch=batch_size,
        shape=shape,
        threads=threads,
    )
    seen = {} if measured is None else ways_measured(load_measured(measured), costs.step.model, costs.ranks)
    times = predict_all(costs, _ways(costs, sizes, squeezed, seen))
    print_wide(step_table(costs, times, seen))
    typer.echo("\n".join(sentences(costs, times, seen)))
    for path, write in writer_of.items():
        write(path, costs, times, seen)
        typer.echo(path)


def _ways(
    costs: StepCosts, sizes: tuple[float, ...], compressions: tuple[str, ...], seen: dict[Way, MeasuredStep]
) -> list[Way]:
    """Return the ways to predict: the usual ones, and those that were measured; one bucket for all only once."""
    from paceline.plan.step_way import usual_ways
    from paceline.units import MIB

    whole = costs.step.nbytes / MIB
    parts = [size for size in sizes if size < whole]
    kept = parts + ([math.inf] if len(parts) < len(sizes) else [])
    ways = usual_ways(kept, torchs=costs.torchs is not None, compressions=compressions)
    there = [way for way in seen if costs.torchs is not None or not way.is_torchs]
    return list(dict.fromkeys([*ways, *there]))


def _writers(json_file: Path | None, out: Path | None) -> dict[Path, Writer]:
    """Return what will be written where, once it is clear that it can be.

    Raises:
        UsageError: a file can't be written, or there is nothing to draw charts with.
    """
    from paceline.cli.step_files import draw_breakdown, draw_buckets, write_facts

    charts: dict[str, Writer] = {"step-breakdown": draw_breakdown, "step-buckets": draw_buckets}
    in_folder = {f"{name}{suffix}": draw for name, draw in charts.items() for suffix in (".png", ".svg")}
    return checked_files(json_file, write_facts, out, in_folder)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _sizes(text: str) -> tuple[float, ...]:
    """Return bucket sizes in MiB, ascending, each once."""
    try:
        sizes = {float(name) for name in _names(text)}
    except ValueError:
        sizes = set()
    if not sizes or not all(size > 0 for size in sizes):
        raise UsageError(f"--bucket-mib {text!r}", remedy="give MiB above 0, or inf, such as 1,5,25")
    return tuple(sorted(sizes))
