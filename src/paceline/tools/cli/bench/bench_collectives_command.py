"""``paceline bench collectives``: options, and what happens in which order.

Options of ``paceline bench collectives``.

``paceline bench compare``: two results of ``bench collectives`` beside each other.

What can start the ranks of ``paceline bench collectives`` here, by the name that backends ask for.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline._core.cpu_cores import usable_cores
from paceline.errors import PacelineError, RankFailed
from paceline.launch.process.local_ranks import run_ranks
from paceline.launch.targets.mpiexec_command import find_mpiexec, mpich_settings, run_mpi
from paceline.tools.bench.collectives.benchmarked_backends import MPI, RANKS
from paceline.tools.bench.step.step_benchmark import StartRanks
from paceline.tools.cli.shared_options import CsvOption, JsonOption
from paceline.world import ProcessPlace
from paceline.world.mpi_world import under_mpi

if TYPE_CHECKING:
    from paceline.tools.bench.collectives.collectives_request import Request
    from paceline.tools.bench.collectives.measurement_journal import Journal
    from paceline.tools.cli.bench.bench_collectives_files import Files

__all__ = [
    "BackendsOption",
    "CompareOption",
    "DtypeOption",
    "IterationsOption",
    "NetworkOption",
    "OpsOption",
    "OutOption",
    "RanksOption",
    "RendezvousOption",
    "ResumeOption",
    "SecondsOption",
    "SizesOption",
    "WarmupOption",
    "collectives",
    "compare",
    "compare_results",
    "joined",
    "starters",
]


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
    json_file: JsonOption = None,
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
        pass  # moved

        compare_results(*compare)
        return
    from paceline.tools.bench.collectives.collectives_request import is_joined, make_request
    from paceline.tools.cli.bench.bench_collectives_files import plan_files

    pass  # moved
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
    from paceline.tools.bench.collectives.collectives_benchmark import measure

    pass  # moved

    measure(asked.settings, asked.fitting, starters(), journal)


def _join(asked: Request, journal: Journal | None) -> None:
    """Be the rank that a launcher started this process as."""
    from paceline.tools.bench.collectives.collectives_benchmark import finished
    from paceline.tools.bench.collectives.collectives_worker import take_part

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
    from paceline.tools.bench.collectives.collectives_benchmark import in_order
    from paceline.tools.cli.bench.bench_collectives_files import write_files
    from paceline.tools.console_table import print_wide

    rows = in_order(asked.cases, asked.settings.dtype, journal.rows())
    if rows:
        from paceline.tools.bench.collectives.collectives_rows import FOOTER, tables

        for made in tables(rows):
            print_wide(made)
        typer.echo(FOOTER)
    command = shlex.join(["paceline", *sys.argv[1:]])
    for path in write_files(files, asked, rows, command, complete=complete):
        typer.echo(path)
    if not complete:
        typer.echo(files.how_to_go_on(len(rows)), err=True)
    return all(row.correct for row in rows)


BackendsOption = Annotated[
    str | None,
    typer.Option(
        help="gloo, paceline, paceline:arena, mpi4py, nccl, schedule:ring …, by commas; else the usual ones."
    ),
]


OpsOption = Annotated[
    str,
    typer.Option(help="all-reduce, reduce-scatter, all-gather, broadcast, all-to-all, send-recv, by commas."),
]


RanksOption = Annotated[
    str | None,
    typer.Option(help="Numbers of processes, by commas; else 2,4,6, or as many as a launcher started."),
]


SizesOption = Annotated[
    str | None,
    typer.Option(help="By commas, or a sweep 64KiB:64MiB:x2; else 1MB,10MB,100MB,1024MB as far as they fit."),
]


DtypeOption = Annotated[str, typer.Option(help="float32, float64, int32, int64, float16 or bfloat16.")]


WarmupOption = Annotated[int, typer.Option(help="Calls before the timed ones.")]


IterationsOption = Annotated[
    int | None,
    typer.Option(help="Timed calls of each backend at each size; else as many as --seconds hold."),
]


SecondsOption = Annotated[float, typer.Option(help="Time for each backend at each size; 5 to 1000 calls.")]


RendezvousOption = Annotated[str, typer.Option(help="Where the ranks meet: file or tcp.")]


NetworkOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="What is between the ranks, to be kept in the result.")
]


OutOption = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Write JSON, CSV and two charts per operation there."),
]


ResumeOption = Annotated[
    bool,
    typer.Option("--resume", help="Go on with a measurement in --out or --json that was interrupted."),
]


CompareOption = Annotated[
    tuple[Path, Path] | None,
    typer.Option(metavar="A.json B.json", help="Measure nothing; show two results beside each other."),
]


def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="What to compare with.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="What is compared.")],
) -> None:
    """Compare two results of bench collectives: the ratio of times, case by case, and what else differs."""
    compare_results(first, second)


def compare_results(first: Path, second: Path) -> None:
    """Print the comparison of two result files.

    Raises:
        UsageError: one can't be read, or holds something else.
    """
    from paceline.tools.bench.collectives.collectives_rows import read_result
    from paceline.tools.bench.collectives.result_comparison import compare as compared
    from paceline.tools.bench.collectives.result_comparison import in_words, table
    from paceline.tools.console_table import print_wide

    found = compared(read_result(first), read_result(second))
    for line in found.differing:
        typer.echo(f"differs: {line}")
    for name, rows in ((first, found.only_first), (second, found.only_second)):
        for row in rows:
            typer.echo(f"only in {name}: {in_words(row)}")
    if found.pairs:
        print_wide(table(found.pairs))
    else:
        typer.echo("no case is in both")


def starters() -> dict[str, StartRanks]:
    """Return what starts ranks here: as Python processes, and where there is mpiexec, under it."""
    return {RANKS: run_ranks} | ({MPI: _start_under_mpi} if find_mpiexec() else {})


def joined(place: ProcessPlace) -> set[str]:
    """Return whose ranks those are that a launcher started: MPI's too, if it was a launcher of MPI."""
    return {RANKS} | ({MPI} if under_mpi(os.environ) == place.size else set())


def _start_under_mpi(argv: Sequence[str], ranks: int, *, env: Mapping[str, str]) -> None:
    """Start ranks under mpiexec, with the settings that suit MPICH best; what the user has set stays."""
    best = {"OMP_NUM_THREADS": str(max(1, int(usable_cores() / ranks)))} | mpich_settings(
        ranks > usable_cores()
    )
    unset = {name: value for name, value in best.items() if name not in os.environ}
    code = run_mpi(argv, ranks, env={**unset, **env})
    if code:
        raise RankFailed(
            f"the {ranks} ranks under mpiexec ended with exit code {code}",
            remedy="what they and mpiexec wrote above says which rank was first, and why",
        )
