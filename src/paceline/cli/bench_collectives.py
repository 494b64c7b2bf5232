"""``paceline bench collectives``: options, and what happens in which order."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from paceline.cli.bench_collectives_options import (
    BackendsOption,
    CompareOption,
    DtypeOption,
    IterationsOption,
    NetworkOption,
    OpsOption,
    OutOption,
    RanksOption,
    RendezvousOption,
    ResumeOption,
    SecondsOption,
    SizesOption,
    WarmupOption,
)
from paceline.cli.file_options import CsvOption, JsonRowsOption
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.bench.collectives.journal import Journal
    from paceline.bench.collectives.request import Request
    from paceline.cli.collective_files import Files

__all__ = ["collectives"]


def collectives(
    backends: BackendsOption = None,
    ops: OpsOption = "all-reduce",
    ranks: RanksOption = None,
    sizes: SizesOption = None,
    dtype: DtypeOption = "float32",
    warmup: WarmupOption = 2,
    iterations: IterationsOption = None,
    seconds: SecondsOption = 2.0,
    rendezvous: RendezvousOption = "file",
    network: NetworkOption = None,
    json_file: JsonRowsOption = None,
    csv_file: CsvOption = None,
    out: OutOption = None,
    resume: ResumeOption = False,
    compare: CompareOption = None,
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
