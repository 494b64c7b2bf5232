"""``paceline exchange``: messages between processes over MPI, checked at both ends, overlapped with computation."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument

from paceline._core.files import write_json
from paceline._core.format import format_count, format_percent, format_seconds, format_size, plural
from paceline._core.units import parse_bytes, parse_seconds
from paceline.errors import EnvelopeError, UsageError
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.command_options import own, shared
from paceline.tools.result_files import check_writable
from paceline.transport.message_frames import FRAME_NBYTES
from paceline.transport.mpi_exchange.exchange_settings import EXCHANGE_SHAPES, ExchangeSettings, check_memory
from paceline.transport.mpi_exchange.outgoing_messages import ENVELOPE_FAULTS, parse_envelope_fault

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.transport.mpi_exchange.exchange_measurement import ExchangeMeasurement, RankMeasurement
    from paceline.transport.mpi_exchange.message_carrier import MpiCarrier

__all__ = ["exchange"]

SCHEMA = 1
_RANKS, _BYTES = 4, "100MB"
_INT_NBYTES = 4
_WRITING_SECONDS = 120.0  # to print and write results; machine facts import torch
_EXIT_DELAY_SECONDS = 0.2  # rank 0 exits first, so that mpiexec reports only its exit code


def exchange(
    shape: Annotated[str, Argument(metavar="SHAPE", help=" or ".join(EXCHANGE_SHAPES) + ".")],
    nproc_per_node: Annotated[
        int | None, shared("nproc-per-node", f"; default {_RANKS}, or those of mpiexec")
    ] = None,
    nbytes: Annotated[
        str | None, shared("bytes", f" sent per rank and round, such as 400MB; default {_BYTES}")
    ] = None,
    ints: Annotated[float | None, own("X", "--bytes in 4-byte integers, such as 1e8.")] = None,
    rounds: Annotated[int, shared("rounds")] = 3,
    compute: Annotated[str, own("TIME", "Concurrent computation per rank, such as 500ms.")] = "0s",
    timeout: Annotated[str, shared("timeout", " without a transfer, such as 60s")] = "60s",
    frame: Annotated[str, own("SIZE", "Frame size of long messages, at most 16MiB.")] = str(FRAME_NBYTES),
    inject: Annotated[
        str | None, own("FAULT[@RANK]", f"Inject a fault at a rank: {', '.join(ENVELOPE_FAULTS)}.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Exchange messages over MPI: non-blocking, checked at both ends, during computation.

    ring: to the next rank and from the previous one, all at once. all-to-all: an equal part of --bytes to every
    rank, itself included.

    It starts its own ranks; under mpiexec (mpiexec -n 4 paceline exchange ring) it joins that world. Exits with 1, and
    names the rank at fault, if any message is damaged, repeated, foreign or missing.
    """
    from paceline.world.mpi_world import mpi_launcher_size

    fault, faulty_rank = parse_envelope_fault(inject) if inject is not None else ("", 0)
    settings = ExchangeSettings(
        shape,
        nbytes=_parse_nbytes(nbytes, ints),
        rounds=rounds,
        work_seconds=parse_seconds(compute),
        timeout=parse_seconds(timeout),
        frame_nbytes=parse_bytes(frame),
        fault=fault,
        faulty_rank=faulty_rank,
    )
    mpi_ranks = mpi_launcher_size(os.environ)
    if mpi_ranks is not None and nproc_per_node not in (None, mpi_ranks):
        raise UsageError(
            f"--nproc-per-node {nproc_per_node}, but mpiexec started {mpi_ranks}",
            remedy="leave --nproc-per-node out",
        )
    ranks = mpi_ranks or (_RANKS if nproc_per_node is None else nproc_per_node)
    settings.check(ranks)
    if mpi_ranks is None:
        _start_ranks(settings, ranks, json_file)
    else:
        _run_rank(settings, json_file)


def _parse_nbytes(nbytes: str | None, ints: float | None) -> int:
    if nbytes is not None and ints is not None:
        raise UsageError("--bytes and --ints exclude each other", remedy="give one of them")
    if ints is not None and (ints < 0 or ints != ints // 1):
        raise UsageError(f"--ints {ints:g} is not a whole number", remedy="for example --ints 1e8")
    return parse_bytes(nbytes or _BYTES) if ints is None else int(ints) * _INT_NBYTES


def _start_ranks(settings: ExchangeSettings, ranks: int, json_file: Path | None) -> None:
    from paceline.launch.targets.mpiexec_command import require_mpi, run_mpi
    from paceline.world.machine_facts import available_nbytes

    require_mpi()
    if json_file is not None:
        check_writable(json_file, "--json")
    check_memory(settings.nbytes_of_rank(ranks), ranks, available_nbytes())
    code = run_mpi(["-m", "paceline", *sys.argv[1:]], ranks)
    if code:
        raise typer.Exit(code if code in (1, 2) else 1)


def _run_rank(settings: ExchangeSettings, json_file: Path | None) -> None:
    """Run this rank; rank 0 shows progress and results."""
    from paceline.tools.bench.progress_bar import ProgressBar
    from paceline.transport.mpi_exchange.exchange_measurement import measure_exchange, tick_count
    from paceline.transport.mpi_exchange.message_carrier import MpiCarrier
    from paceline.world.machine_facts import available_nbytes

    carrier = MpiCarrier()
    is_first = carrier.rank == 0
    try:
        if is_first and json_file is not None:
            check_writable(json_file, "--json")
        check_memory(settings.nbytes_of_rank(carrier.size), carrier.local_size(), available_nbytes())
        title = f"{settings.shape}, {carrier.size} ranks, {format_size(settings.nbytes)} each"
        with ProgressBar(title, tick_count(settings), shown=is_first) as tick:
            measured = measure_exchange(settings, carrier, tick)
    except BaseException as error:  # else the other ranks would wait for this one
        _abort(carrier, error)
        raise
    if is_first:
        _print_results(settings, measured)
        if json_file is not None:
            _write_results(json_file, settings, measured)
    _wait_for_rank_0(carrier)
    if not measured.closed:
        carrier.abort(1)  # pending messages never complete, so MPI can't finalise
    if measured.problems or not all(row.correct for row in measured.rows):
        raise typer.Exit(1)


def _wait_for_rank_0(carrier: MpiCarrier) -> None:
    """Wait until rank 0 has printed and written everything: mpiexec kills it when another rank fails."""
    from paceline.transport.mpi_exchange.round_reports import RoundReport, gather_reports

    gather_reports(carrier, RoundReport(carrier.rank), _WRITING_SECONDS)
    if carrier.rank > 0:
        time.sleep(_EXIT_DELAY_SECONDS)


def _abort(carrier: MpiCarrier, error: BaseException) -> None:
    """Print an error of this rank and abort all ranks."""
    from paceline.tools.cli.app import print_error

    if isinstance(error, EnvelopeError | UsageError):
        print_error(error)
    elif not isinstance(error, KeyboardInterrupt):
        traceback.print_exception(error)
    carrier.abort(2 if isinstance(error, UsageError) else 1)


def _print_results(settings: ExchangeSettings, measured: ExchangeMeasurement) -> None:
    """Print the table, and problems in red."""
    from rich.console import Console

    from paceline.tools.console_table import print_wide

    print_wide(_table(settings, measured))
    console = Console(highlight=False, soft_wrap=True)
    console.print(_FOOTER, style="dim")
    for problem in measured.problems:
        console.print(f"WRONG: {problem}", style="bold red", markup=False)


def _write_results(path: Path, settings: ExchangeSettings, measured: ExchangeMeasurement) -> None:
    from paceline.tools.result_files import paceline_command, result_head

    packages = ("paceline", "mpi4py", "mpich", "numpy", "xxhash")
    result = result_head("exchange", packages, SCHEMA, command=paceline_command()) | {
        "settings": asdict(settings) | {"ranks": len(measured.rows)},
        "rows": [asdict(row) | {"right": row.correct} for row in measured.rows],
        "problems": [asdict(problem) for problem in measured.problems],
        "rounds": measured.rounds,
    }
    write_json(path, result)
    typer.echo(path)


_FOOTER = (
    "Checksums: of sent messages, as reported by their senders, and of received ones.\n"
    "Seconds: median round without work. Overlap: part of the shorter of work and exchange that is hidden\n"
    "behind the longer (1: all of it, 0: none). In flight: share of the work done while messages were."
)


def _table(settings: ExchangeSettings, measured: ExchangeMeasurement) -> Table:
    """Return one row per rank; ranks that received something else than was sent are red."""
    from paceline.tools.console_table import make_table

    size, rounds = format_size(measured.rows[0].nbytes), plural(measured.rounds, "round")
    columns = ("rank", "to", "from", "bytes", "sent", "received", "seconds", "rate", "overlap", "in flight")
    table = make_table(
        columns, [], left=3, title=f"{settings.shape}, {len(measured.rows)} ranks, {size} each, {rounds}"
    )
    for row in measured.rows:
        table.add_row(*_cells(row), style="" if row.correct else "bold red")
    return table


def _cells(row: RankMeasurement) -> list[str]:
    return [
        str(row.rank),
        _ranks_text(row.sent_to),
        _ranks_text(row.received_from),
        str(row.nbytes),
        row.told_checksum,
        row.received_checksum,
        format_seconds(row.seconds),
        f"{format_count(row.nbytes_per_second)}B/s",
        "" if row.overlap is None else f"{row.overlap:.2f}",
        "" if row.under_way is None else format_percent(row.under_way),
    ]


def _ranks_text(ranks: Sequence[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else "all"
