"""``paceline bench collectives``, and ``paceline bench compare`` for two of its results."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline._core.cpu_cores import usable_cores
from paceline.errors import PacelineError, RankFailed
from paceline.launch.process.local_ranks import run_ranks
from paceline.launch.targets.mpiexec_command import find_mpiexec, mpich_settings, run_mpi
from paceline.tools.bench.collectives.benchmarked_backends import LOCAL_RANKS, MPIEXEC
from paceline.tools.bench.rank_jobs import StartRanks
from paceline.tools.cli.shared_options import CsvOption, JsonOption
from paceline.tools.command_options import own, shared
from paceline.world import ProcessPlace
from paceline.world.mpi_world import mpi_launcher_size

if TYPE_CHECKING:
    from paceline.tools.bench.collectives.collectives_request import CollectivesRequest
    from paceline.tools.bench.collectives.resume_journal import RowJournal
    from paceline.tools.cli.bench.bench_collectives_files import CollectivesFiles

__all__ = ["collectives", "compare"]


def collectives(
    backend: Annotated[
        str | None,
        shared(
            "backend",
            ": gloo, paceline, paceline:arena, mpi4py, nccl, schedule:ring …; default: gloo, paceline, and mpi4py and "
            "nccl where they can run",
            several=True,
        ),
    ] = None,
    op: Annotated[
        str,
        shared(
            "op",
            ": all_reduce, reduce_scatter, all_gather, broadcast, all_to_all, send_recv, also with dashes",
            several=True,
        ),
    ] = "all-reduce",
    nproc_per_node: Annotated[
        str | None, shared("nproc-per-node", "; default: 2,4,6, or the launcher's", several=True)
    ] = None,
    nbytes: Annotated[
        str | None,
        shared(
            "bytes",
            " per call, or a sweep 64KiB:64MiB:x2; default: 1MB,10MB,100MB,1024MB as far as they fit",
            several=True,
        ),
    ] = None,
    dtype: Annotated[
        str, shared("dtype", ": float32, float64, int32, int64, float16 or bfloat16")
    ] = "float32",
    warmup: Annotated[int, shared("warmup")] = 2,
    iterations: Annotated[
        int | None,
        shared("iterations", " of each backend at each size; default: as many as fit into --seconds"),
    ] = None,
    seconds: Annotated[float, shared("seconds", " for each backend at each size; 5 to 1000 calls")] = 2.0,
    init_method: Annotated[str, own("NAME", "Init method of the process groups: file or tcp.")] = "file",
    network: Annotated[str | None, shared("network", " to be written")] = None,
    json_file: JsonOption = None,
    csv_file: CsvOption = None,
    out: Annotated[Path | None, shared("out", ": JSON, CSV and two charts per operation")] = None,
    resume: Annotated[bool, shared("resume", " or --json")] = False,
) -> None:
    """Time collectives: interleaved backends, by number of processes and size, every result checked.

    Starts its processes itself; under torchrun or paceline lab it takes part in theirs. Exits with 1 if a result is
    wrong or a rank is lost; finished rows are kept.
    """
    from paceline.tools.bench.collectives.collectives_request import make_request
    from paceline.tools.bench.rank_jobs import under_launcher
    from paceline.tools.cli.bench.bench_collectives_files import plan_files
    from paceline.world import read_environment

    place = read_environment(os.environ)
    launched = under_launcher(place)
    request = make_request(
        place,
        _launchers_of(place) if launched else _rank_starters(),
        backends=backend,
        ops=op,
        ranks=nproc_per_node,
        sizes=nbytes,
        network=network,
        dtype=dtype,
        warmup=warmup,
        iterations=iterations,
        seconds=seconds,
        rendezvous=init_method,
    )
    if place.rank != 0:
        _measure_as_rank(request, None)
        return
    files = plan_files(request.settings.ops, json_file, csv_file, out, resume=resume)
    with files.journal(request.settings, resume=resume) as journal:
        _measure(request, journal, files, _measure_as_rank if launched else _measure_in_new_ranks)


def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="Baseline.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="Result to compare with it.")],
) -> None:
    """Compare two results of bench collectives: the ratio of times, case by case, and what else differs."""
    from paceline.tools.bench.collectives.collectives_rows import read_collectives
    from paceline.tools.bench.collectives.collectives_tables import (
        comparison_table,
        describe_row,
        match_results,
    )
    from paceline.tools.console_table import print_wide

    found = match_results(read_collectives(first), read_collectives(second))
    for line in found.differing:
        typer.echo(f"differs: {line}")
    for name, rows in ((first, found.only_first), (second, found.only_second)):
        for row in rows:
            typer.echo(f"only in {name}: {describe_row(row)}")
    if found.pairs:
        print_wide(comparison_table(found.pairs))
    else:
        typer.echo("no case is in both")


def _measure_in_new_ranks(request: CollectivesRequest, journal: RowJournal | None) -> None:
    """Start the ranks, of one number after another."""
    from paceline.tools.bench.collectives.collectives_benchmark import measure_collectives

    assert journal is not None, "this process is rank 0"
    measure_collectives(request.settings, request.fitting, _rank_starters(), journal)


def _measure_as_rank(request: CollectivesRequest, journal: RowJournal | None) -> None:
    """Take part as the rank that a launcher started; `journal` is that of rank 0."""
    from paceline.tools.bench.collectives.collectives_worker import measure_under_launcher
    from paceline.tools.bench.collectives.resume_journal import is_finished

    kept = {row.key for row in journal.rows()} if journal else set()
    wanted = [
        fits and not is_finished(case, request.settings.dtype, kept)
        for case, fits in zip(request.cases, request.fits, strict=True)
    ]
    measure_under_launcher(request.settings, request.cases, wanted, journal)


def _measure(
    request: CollectivesRequest,
    journal: RowJournal,
    files: CollectivesFiles,
    run: Callable[[CollectivesRequest, RowJournal], None],
) -> None:
    """Run the measurement; show and write its rows, however it ends."""
    for line in request.left_out:
        typer.echo(f"left out: {line}", err=True)
    try:
        run(request, journal)
    except (PacelineError, KeyboardInterrupt, SystemExit):
        _finish(request, journal, files, complete=False)
        raise
    if not _finish(request, journal, files, complete=True):
        raise typer.Exit(1)


def _finish(
    request: CollectivesRequest, journal: RowJournal, files: CollectivesFiles, *, complete: bool
) -> bool:
    """Show and write the finished rows; return whether all of them are correct."""
    from paceline.tools.bench.collectives.collectives_tables import COLLECTIVES_FOOTER, operation_tables
    from paceline.tools.bench.collectives.resume_journal import ordered_rows
    from paceline.tools.console_table import print_wide

    rows = ordered_rows(request.cases, request.settings.dtype, journal.rows())
    if rows:
        for table in operation_tables(rows):
            print_wide(table)
        typer.echo(COLLECTIVES_FOOTER)
        for path in files.write(request, rows, complete=complete):
            typer.echo(path)
    if not complete:
        typer.echo(files.interruption(len(rows)), err=True)
    return all(row.correct for row in rows)


def _rank_starters() -> dict[str, StartRanks]:
    """Return the launchers that can start ranks here: as Python processes and, if installed, under mpiexec."""
    return {LOCAL_RANKS: run_ranks} | ({MPIEXEC: _start_under_mpi} if find_mpiexec() else {})


def _launchers_of(place: ProcessPlace) -> set[str]:
    """Return the launchers whose ranks these can be: MPI's too, if MPI started them."""
    return {LOCAL_RANKS} | ({MPIEXEC} if mpi_launcher_size(os.environ) == place.size else set())


def _start_under_mpi(argv: Sequence[str], ranks: int, *, env: Mapping[str, str]) -> None:
    """Start ranks under mpiexec with the settings that suit MPICH best; those that the user has set stay."""
    cores = usable_cores()
    best = {"OMP_NUM_THREADS": str(max(1, int(cores / ranks)))} | mpich_settings(ranks > cores)
    unset = {name: value for name, value in best.items() if name not in os.environ}
    code = run_mpi(argv, ranks, env={**unset, **env})
    if code:
        raise RankFailed(
            f"the {ranks} ranks under mpiexec ended with exit code {code}",
            remedy="their output and that of mpiexec, above, says which rank was first, and why",
        )
