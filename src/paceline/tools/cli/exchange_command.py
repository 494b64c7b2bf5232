"""``paceline exchange``: messages between processes over MPI, checked at both ends, while work goes on.

The table of an exchange, a row for each rank.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from paceline._core.files import write_json
from paceline._core.format import format_count, format_seconds, format_size
from paceline._core.units import parse_bytes, parse_seconds
from paceline.errors import EnvelopeError, UsageError
from paceline.tools.cli.shared_options import JsonRowsOption
from paceline.tools.result_files import check_writable
from paceline.transport.envelope_faults import FAULTS, parse_fault
from paceline.transport.message_frames import FRAME_NBYTES
from paceline.transport.mpi_exchange.exchange_measurement import Measured, Row
from paceline.transport.mpi_exchange.exchange_settings import SHAPES, ExchangeSettings, check_memory

if TYPE_CHECKING:
    from paceline.transport.mpi_exchange.exchange_measurement import Measured
    from paceline.transport.mpi_exchange.ring_and_all_to_all import MpiCarrier

__all__ = ["FOOTER", "exchange", "exchange_table"]

SCHEMA = 1


_RANKS, _BYTES = 4, "100MB"


_INT_NBYTES = 4


_WRITING_SECONDS = 120.0  # for printing, and for the facts of the machine, which take an import of torch


_BEHIND_SECONDS = 0.2  # that rank 0 is to end first, so that one message says why


def exchange(
    shape: Annotated[str, typer.Argument(metavar="SHAPE", help=" or ".join(SHAPES) + ".")],
    ranks: Annotated[
        int | None,
        typer.Option(help=f"Processes to start; under mpiexec, all of its own (default {_RANKS})."),
    ] = None,
    nbytes: Annotated[
        str | None,
        typer.Option("--bytes", help=f"What each rank sends in a round, such as 400MB (default {_BYTES})."),
    ] = None,
    ints: Annotated[
        float | None, typer.Option(help="The same as a number of 4-byte integers, such as 1e8.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="How often.")] = 3,
    work: Annotated[str, typer.Option(help="Computing by each rank at the same time, such as 500ms.")] = "0s",
    timeout: Annotated[str, typer.Option(help="How long nothing may move, such as 60s.")] = "60s",
    frame: Annotated[str, typer.Option(help="Long messages go in frames of this size, at most 16MiB.")] = str(
        FRAME_NBYTES
    ),
    inject: Annotated[
        str | None, typer.Option(metavar="FAULT[@RANK]", help=f"Make a rank do wrong: {', '.join(FAULTS)}.")
    ] = None,
    json_file: JsonRowsOption = None,
) -> None:
    """Exchange messages over MPI: non-blocking, checked at both ends, while work goes on.

    ring: to the next rank and from the one before, all at once. all-to-all: an equal part of --bytes to every
    rank, itself included.

    It starts its own ranks; under mpiexec (mpiexec -n 4 paceline exchange ring) it takes part in those.
    Exits with 1, and names the rank at fault, if any message is damaged, repeated, foreign or missing.
    """
    from paceline.world.mpi_world import under_mpi

    settings = ExchangeSettings(
        shape,
        _nbytes(nbytes, ints),
        rounds,
        parse_seconds(work),
        parse_seconds(timeout),
        parse_bytes(frame),
        *(parse_fault(inject) if inject is not None else ("", 0)),
    )
    there = under_mpi(os.environ)
    if there is not None and ranks not in (None, there):
        raise UsageError(f"--ranks {ranks}, but mpiexec started {there}", remedy="leave --ranks out")
    settings.check(there or (_RANKS if ranks is None else ranks))
    if there is None:
        _start(settings, _RANKS if ranks is None else ranks, json_file)
    else:
        _take_part(settings, json_file)


def _nbytes(nbytes: str | None, ints: float | None) -> int:
    """Return what --bytes or --ints say."""
    if nbytes is not None and ints is not None:
        raise UsageError("--bytes and --ints exclude each other", remedy="give one of them")
    if ints is not None and (ints < 0 or ints != ints // 1):
        raise UsageError(f"--ints {ints:g} is no number of integers", remedy="for example --ints 1e8")
    return parse_bytes(nbytes or _BYTES) if ints is None else int(ints) * _INT_NBYTES


def _start(settings: ExchangeSettings, ranks: int, json_file: Path | None) -> None:
    from paceline.launch.targets.mpiexec_command import need_mpi, run_mpi
    from paceline.world.machine_facts import available_nbytes

    need_mpi()
    if json_file is not None:
        check_writable(json_file, "--json")
    check_memory(settings.nbytes_of_rank(ranks), ranks, available_nbytes())
    code = run_mpi(["-m", "paceline", *sys.argv[1:]], ranks)
    if code:
        raise typer.Exit(code if code in (1, 2) else 1)


def _take_part(settings: ExchangeSettings, json_file: Path | None) -> None:
    """Be a rank: rank 0 shows how far it is, and what came of it."""
    from paceline.tools.bench.progress_bar import TurnBar
    from paceline.transport.mpi_exchange.exchange_measurement import measure, turns
    from paceline.transport.mpi_exchange.ring_and_all_to_all import MpiCarrier
    from paceline.world.machine_facts import available_nbytes

    carrier = MpiCarrier()
    first = carrier.rank == 0
    try:
        if first and json_file is not None:
            check_writable(json_file, "--json")
        check_memory(settings.nbytes_of_rank(carrier.size), carrier.ranks_here(), available_nbytes())
        title = f"{settings.shape}, {carrier.size} ranks, {format_size(settings.nbytes)} each"
        with TurnBar(title, turns(settings), shown=first) as tick:
            measured = measure(settings, carrier, tick)
    except BaseException as error:  # a rank that is gone would leave the others waiting
        _end_all(carrier, error)
        raise
    if first:
        _show(settings, measured)
        if json_file is not None:
            _write(json_file, settings, measured)
    _after_rank_0(carrier)
    if not measured.closed:
        carrier.abort(1)  # messages are under way for ever, so MPI can't be left in order
    if measured.problems or not all(row.right for row in measured.rows):
        raise typer.Exit(1)


def _after_rank_0(carrier: MpiCarrier) -> None:
    """Wait until rank 0 has printed and written all: mpiexec ends it when another one fails."""
    from paceline.transport.mpi_exchange.polled_agreement import ExchangeAgreement, agree

    agree(carrier, ExchangeAgreement(carrier.rank), _WRITING_SECONDS)
    if carrier.rank > 0:
        time.sleep(_BEHIND_SECONDS)


def _end_all(carrier: MpiCarrier, error: BaseException) -> None:
    """End all ranks for an error of this one, which is told."""
    from paceline.tools.cli.app import print_error

    if isinstance(error, EnvelopeError | UsageError):
        print_error(error)
    elif not isinstance(error, KeyboardInterrupt):
        traceback.print_exception(error)
    carrier.abort(2 if isinstance(error, UsageError) else 1)


def _show(settings: ExchangeSettings, measured: Measured) -> None:
    """Print the table, and in red what was wrong."""
    from rich.console import Console

    pass  # moved
    from paceline.tools.console_table import print_wide

    print_wide(exchange_table(settings, measured))
    console = Console(highlight=False, soft_wrap=True)
    console.print(FOOTER, style="dim")
    for problem in measured.problems:
        console.print(f"WRONG: {problem}", style="bold red", markup=False)


def _write(path: Path, settings: ExchangeSettings, measured: Measured) -> None:
    from paceline.tools.result_files import machine_record, versions

    result = {
        "kind": "exchange",
        "schema": SCHEMA,
        "command": shlex.join(["paceline", *sys.argv[1:]]),
        "machine": machine_record(),
        "versions": versions(["paceline", "mpi4py", "mpich", "numpy", "xxhash"]),
        "settings": asdict(settings) | {"ranks": len(measured.rows)},
        "rows": [asdict(row) | {"right": row.right} for row in measured.rows],
        "problems": [asdict(problem) for problem in measured.problems],
        "rounds": measured.rounds,
    }
    write_json(path, result)
    typer.echo(path)


FOOTER = (
    "Checksums: what the senders told of their messages, and what was found of those received.\n"
    "Seconds: median round without work. Overlap: part of the shorter of work and exchange that is hidden\n"
    "behind the longer (1: all of it, 0: none). Under way: share of the work done while messages were."
)


def exchange_table(settings: ExchangeSettings, measured: Measured) -> Table:
    """Return the rows as a table; a rank that did not get what was sent to it is red."""
    size = format_size(measured.rows[0].nbytes)
    rounds = f"{measured.rounds} round{'s' * (measured.rounds > 1)}"
    title = f"{settings.shape}, {len(measured.rows)} ranks, {size} each, {rounds}"
    made = Table(title=title, title_justify="left", pad_edge=False, box=None)
    for name in ("rank", "to", "from"):
        made.add_column(name, no_wrap=True)
    for name in ("bytes", "told by senders", "received", "seconds", "rate", "overlap", "under way"):
        made.add_column(name, justify="right", no_wrap=True)
    for row in measured.rows:
        made.add_row(*_cells(row), style="" if row.right else "bold red")
    return made


def _cells(row: Row) -> list[str]:
    return [
        str(row.rank),
        _ranks(row.sent_to),
        _ranks(row.received_from),
        str(row.nbytes),
        row.told_checksum,
        row.received_checksum,
        format_seconds(row.seconds),
        f"{format_count(row.nbytes_per_second)}B/s",
        "" if row.overlap is None else f"{row.overlap:.2f}",
        "" if row.under_way is None else f"{row.under_way:.0%}",
    ]


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words: one by its number, all of several as "all"."""
    return str(ranks[0]) if len(ranks) == 1 else "all"
