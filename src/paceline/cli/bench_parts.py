"""``paceline bench parts``: what the parts of a training step take, for the plan's step-time model."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.cli.bench_parts_options import (
    BackendOption,
    BatchSizeOption,
    ContextOption,
    NetworkOption,
    ProfileOption,
    RanksOption,
    RoundsOption,
    SecondsOption,
    SizeOption,
    StepsOption,
    TorchOption,
    WorkloadOption,
)
from paceline.cli.training_options import ThreadsOption
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.bench.parts.settings import PartsSettings
    from paceline.plan.entries import Source
    from paceline.plan.profile import Profile
    from paceline.world import Place

__all__ = ["parts"]


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
    from paceline.bench.collectives.backends import check_backends
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
    if backend is not None:
        check_backends((backend,), place.local_size or settings.ranks)
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
