"""``paceline bench parts``: what the parts of a training step take, for the plan's step-time model."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.bench.parts.settings import PartsSettings
    from paceline.plan.entries import Source
    from paceline.plan.profile import Profile
    from paceline.world import Place

__all__ = ["parts"]


def parts(
    profile_file: Annotated[
        Path,
        typer.Option("--profile", metavar="FILE", help="Add what is measured to this profile, or make it."),
    ],
    ranks: Annotated[
        int | None, typer.Option(help="Processes on this machine; else 2, or as many as a launcher started.")
    ] = None,
    size: Annotated[str | None, typer.Option(help="Reference model; else mini.")] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="Your own model instead; the function returns (model, loss_of, samples in a batch).",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Windows of a rank's batch, of a reference model.")] = 2,
    context: Annotated[int, typer.Option(help="Tokens of a window, of a reference model.")] = 64,
    threads: Annotated[int, typer.Option(help="Threads of a rank.")] = 1,
    backend: Annotated[
        str | None,
        typer.Option(help="What Paceline's exchanges run on: paceline, gloo or nccl; else what fits."),
    ] = None,
    network: Annotated[
        str | None, typer.Option(metavar="NAME", help="What is between the ranks, to be kept in the profile.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of computing that are timed.")] = 15,
    rounds: Annotated[int, typer.Option(help="Repetitions of computing beside exchanges.")] = 3,
    seconds: Annotated[float, typer.Option(help="Time for an exchange of one size, at most about.")] = 1.0,
    torch: Annotated[bool, typer.Option(help="Measure the calls of torch's own DDP too.")] = True,
) -> None:
    """Measure the parts of a training step by themselves: computing, exchanges, and how much they slow each other.

    No whole step is run: that is what paceline plan step predicts. Starts its processes itself; under torchrun or
    paceline lab it takes part in theirs.

    Example: paceline bench parts --size mini --profile profile.json && paceline plan step --profile profile.json
    """
    from paceline.bench.collectives.request import is_joined
    from paceline.bench.facts import machine_record, versions
    from paceline.bench.parts.settings import PartsSettings
    from paceline.cli.profiles import load_or_new, now
    from paceline.plan.entries import Source
    from paceline.plan.profile import Profile
    from paceline.world import read_environment

    place = read_environment(os.environ)
    between = is_joined(place) and (place.nodes or 1) > 1
    settings = PartsSettings(
        ranks=_ranks(ranks, place, joined=is_joined(place)),
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
    earlier = load_or_new(profile_file) if place.rank == 0 else Profile()
    command = shlex.join(["paceline", *sys.argv[1:]])
    source = Source(command, now(), machine_record(), versions(["paceline", "torch"]))
    found = (_join if is_joined(place) else _start)(settings, earlier, source)
    if found is not None:
        _show(found)
        earlier.merged(found).save(profile_file)
        typer.echo(profile_file)


def _ranks(asked: int | None, place: Place, *, joined: bool) -> int:
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
    from paceline.bench.parts.worker import take_part

    return take_part(settings, earlier, source)


def _start(settings: PartsSettings, earlier: Profile, source: Source) -> Profile | None:
    """Start the ranks and return what they found."""
    from paceline.launch.local import run_ranks
    from paceline.plan.profile import Profile

    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        job, out = Path(folder) / "job.json", Path(folder) / "found.json"
        description = {"settings": settings.to_json(), "source": vars(source), "earlier": earlier.to_json()}
        job.write_text(json.dumps(description | {"out": str(out)}), encoding="utf-8")
        env = {"OMP_NUM_THREADS": str(settings.threads)}
        run_ranks(["-m", "paceline.bench.parts.worker", str(job)], settings.ranks, env=env)
        return Profile.load(out)


def _show(found: Profile) -> None:
    """Print what was measured."""
    from paceline.cli.parts_table import FOOTER, beside_table, model_line, price_table
    from paceline.cli.wide_table import print_wide

    for step in found.models:
        typer.echo(model_line(step))
    print_wide(price_table(found.exchanges, found.models[0]))
    print_wide(beside_table(found.contentions))
    typer.echo(FOOTER)
