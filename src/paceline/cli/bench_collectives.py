"""``paceline bench collectives``: options, and what happens in which order."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.bench.collectives.journal import Journal
    from paceline.bench.collectives.request import Request
    from paceline.cli.collective_files import Files

__all__ = ["collectives"]


def collectives(
    backends: Annotated[
        str | None,
        typer.Option(
            help="gloo, paceline, paceline:arena, mpi4py, nccl, schedule:ring …, by commas; else the usual ones."
        ),
    ] = None,
    ops: Annotated[
        str,
        typer.Option(
            help="all-reduce, reduce-scatter, all-gather, broadcast, all-to-all, send-recv, by commas."
        ),
    ] = "all-reduce",
    ranks: Annotated[
        str | None,
        typer.Option(help="Numbers of processes, by commas; else 2,4,6, or as many as a launcher started."),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            help="By commas, or a sweep 64KiB:64MiB:x2; else 1MB,10MB,100MB,1024MB as far as they fit."
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, float64, int32, int64, float16 or bfloat16.")
    ] = "float32",
    warmup: Annotated[int, typer.Option(help="Calls before the timed ones.")] = 2,
    iterations: Annotated[
        int | None,
        typer.Option(help="Timed calls of each backend at each size; else as many as --seconds hold."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Time for each backend at each size; 5 to 1000 calls.")
    ] = 2.0,
    rendezvous: Annotated[str, typer.Option(help="Where the ranks meet: file or tcp.")] = "file",
    network: Annotated[
        str | None, typer.Option(metavar="NAME", help="What is between the ranks, to be kept in the result.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write machine, settings and rows there.")
    ] = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write the table there.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write JSON, CSV and two charts per operation there."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with a measurement in --out or --json that was interrupted."),
    ] = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A.json B.json", help="Measure nothing; show two results beside each other."),
    ] = None,
) -> None:
    """Time collectives: backends in turn, by number of processes and size, every result checked.

    Starts its processes itself; under torchrun or paceline lab it takes part in theirs. Exits with 1 if a result is
    wrong or a rank is lost; the rows that are finished are kept.
    """
    if compare is not None:
        from paceline.cli.bench_compare import compare_results

        compare_results(*compare)
        return
    from paceline.bench.collectives.request import is_joined, make_request
    from paceline.cli.collective_files import plan_files
    from paceline.cli.starters import joined, starters
    from paceline.world import read_environment

    place = read_environment(os.environ)
    asked = make_request(
        place,
        joined(place) if is_joined(place) else starters(),
        backends=backends,
        ops=ops,
        ranks=ranks,
        sizes=sizes,
        network=network,
        dtype=dtype,
        warmup=warmup,
        iterations=iterations,
        seconds=seconds,
        rendezvous=rendezvous,
    )
    if place.rank != 0:
        _join(asked, None)
        return
    files = plan_files(asked.settings.ops, json_file, csv_file, out, resume=resume)
    with files.journal(asked.settings, resume=resume) as journal:
        run = (lambda: _join(asked, journal)) if is_joined(place) else (lambda: _start(asked, journal))
        _measure(asked, journal, files, run)


def _start(asked: Request, journal: Journal) -> None:
    """Start the ranks, of one number after another."""
    from paceline.bench.collectives.measure import measure
    from paceline.cli.starters import starters

    measure(asked.settings, asked.fitting, starters(), journal)


def _join(asked: Request, journal: Journal | None) -> None:
    """Be the rank that a launcher started this process as."""
    from paceline.bench.collectives.measure import finished
    from paceline.bench.collectives.worker import take_part

    there = {row.key for row in journal.rows()} if journal else set()
    wanted = [
        fits and not finished(case, asked.settings.dtype, there)
        for case, fits in zip(asked.cases, asked.fits, strict=True)
    ]
    take_part(asked.settings, asked.cases, wanted, journal)


def _measure(asked: Request, journal: Journal, files: Files, run: Callable[[], None]) -> None:
    """Run the measurement, and show and write what it found, however it ends."""
    for line in asked.left_out:
        typer.echo(f"left out: {line}", err=True)
    try:
        run()
    except (PacelineError, KeyboardInterrupt, SystemExit):
        _finish(asked, journal, files, complete=False)
        raise
    if not _finish(asked, journal, files, complete=True):
        raise typer.Exit(1)


def _finish(asked: Request, journal: Journal, files: Files, *, complete: bool) -> bool:
    """Show and write the rows that there are; return whether all of them are right."""
    from paceline.bench.collectives.measure import in_order
    from paceline.cli.collective_files import write_files
    from paceline.cli.wide_table import print_wide

    rows = in_order(asked.cases, asked.settings.dtype, journal.rows())
    if rows:
        from paceline.bench.collectives.table import FOOTER, tables

        for made in tables(rows):
            print_wide(made)
        typer.echo(FOOTER)
    command = shlex.join(["paceline", *sys.argv[1:]])
    for path in write_files(files, asked, rows, command, complete=complete):
        typer.echo(path)
    if not complete:
        typer.echo(files.how_to_go_on(len(rows)), err=True)
    return all(row.correct for row in rows)
