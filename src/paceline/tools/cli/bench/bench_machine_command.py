"""``paceline bench machine``: rates of this machine without a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline._core.files import write_json
from paceline._core.format import format_count
from paceline._core.json_codec import encode
from paceline._core.units import parse_bytes, parse_list
from paceline.errors import UsageError
from paceline.tools.cli.bench.profile_file import load_or_new_profile, measurement_source
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.command_options import own, shared
from paceline.tools.result_files import check_writable

if TYPE_CHECKING:
    from paceline.cost_model.profile_entries import Rate, Source
    from paceline.tools.bench.machine_rates import MachineSettings

__all__ = ["machine"]

_TITLES = {"copy": "memory, copy", "add": "memory, a += b", "matmul": "matrix product"}


def machine(
    device: Annotated[str, shared("device", ", or auto: all that are usable")] = "auto",
    nbytes: Annotated[str, shared("bytes", " of each tensor for the memory bandwidth")] = "256MiB",
    matrix_sizes: Annotated[str, own("N,…", "Matrix sizes: n of n × n matrices.")] = "512,1024,2048,4096",
    dtype: Annotated[str, shared("dtype", " of the matrices", several=True)] = "float32,bfloat16",
    iterations: Annotated[int, shared("iterations", " of each rate, at most")] = 15,
    seconds: Annotated[float, shared("seconds", " for a rate, about")] = 3.0,
    json_file: JsonOption = None,
    profile_file: Annotated[Path | None, shared("profile", " to add the rates to, or to create")] = None,
) -> None:
    """Measure memory bandwidth and matrix rate, for the plan's cost model."""
    from paceline.tools.bench.machine_rates import MachineSettings, measure_machine_rate, rate_jobs
    from paceline.tools.bench.progress_bar import ProgressBar

    settings = MachineSettings(
        device,
        parse_bytes(nbytes),
        tuple(sorted(parse_list("--matrix-sizes", matrix_sizes, int, example="512,1024"))),
        parse_list("--dtype", dtype, str, example="float32,bfloat16", unique=True),
        repetitions=iterations,
        seconds=seconds,
    )
    if json_file is not None:
        if json_file == profile_file:
            raise UsageError(f"--json and --profile both name {json_file}", remedy="name two files")
        check_writable(json_file, "--json", make_folder=True)
    profile = None if profile_file is None else load_or_new_profile(profile_file)
    planned, source = rate_jobs(settings), measurement_source()
    rates = []
    with ProgressBar("this machine", len(planned)) as advance:
        for job in planned:
            rates.append(measure_machine_rate(job, settings, source))
            advance()
    _show(rates)
    if json_file is not None:
        write_json(json_file, _result(settings, rates, source))
        typer.echo(json_file)
    if profile is not None and profile_file is not None:
        profile.with_entries(rates=rates).save(profile_file)
        typer.echo(profile_file)


def _result(settings: MachineSettings, rates: Sequence[Rate], source: Source) -> dict[str, Any]:
    """Return the measurement for JSON."""
    from paceline.cost_model.profile_entries import RATES

    rows = [vars(rate) | {"unit": RATES[rate.kind]} for rate in rates]
    for row in rows:
        del row["source"]
    head = {"kind": "bench-machine", "schema": 1, **asdict(source)}
    return head | {"settings": encode(settings), "rows": rows}


def _show(rates: Sequence[Rate]) -> None:
    """Print the rates as a table."""
    from paceline.cost_model.profile_entries import RATES
    from paceline.tools.console_table import make_table, print_wide

    rows = []
    for rate in rates:
        values = [f"{format_count(value)}{RATES[rate.kind]}" for value in (rate.value, rate.low, rate.high)]
        threads = str(rate.threads) if rate.threads else ""
        rows.append([_TITLES[rate.kind], rate.device, rate.dtype, threads, *values, rate.shape])
    columns = ("", "on", "type", "threads", "rate", "slowest", "fastest", "of")
    print_wide(make_table(columns, rows, left=3))
    typer.echo("Medians of repetitions. Bytes are those read and written; a product of n × n is 2n³ FLOP.")
