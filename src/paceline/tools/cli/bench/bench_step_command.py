"""``paceline bench``: measurements that end in a table, JSON, CSV and charts.

Options of ``paceline bench step``.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline._core.files import write_json
from paceline.errors import UsageError
from paceline.tools.cli.bench.bench_collectives_command import collectives, compare
from paceline.tools.cli.bench.bench_fit_command import fit
from paceline.tools.cli.bench.bench_machine_command import machine
from paceline.tools.cli.bench.bench_parts_command import parts
from paceline.tools.cli.shared_options import BucketsOption, CsvOption, JsonOption, ThreadsOption
from paceline.tools.result_files import check_writable

if TYPE_CHECKING:
    from paceline.tools.bench.step.step_rows import Row

__all__ = [
    "BackendOption",
    "BatchSizeOption",
    "ContextOption",
    "MemoryOption",
    "OutOption",
    "RanksOption",
    "RoundsOption",
    "SeedOption",
    "SizeOption",
    "StepsOption",
    "StrategiesOption",
    "app",
]

app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})


@app.callback()
def bench() -> None:
    """Measure, with torch in the same table."""


app.command()(collectives)


app.command()(compare)


app.command()(machine)


app.command()(fit)


app.command()(parts)


@app.command()
def step(
    ranks: RanksOption = 2,
    size: SizeOption = "tiny,mini",
    batch_size: BatchSizeOption = 2,
    context: ContextOption = 64,
    steps: StepsOption = 10,
    rounds: RoundsOption = 15,
    bucket_mib: BucketsOption = "0.25,1,5,25,inf",
    threads: ThreadsOption = 1,
    strategies: StrategiesOption = None,
    backend: BackendOption = None,
    memory: MemoryOption = True,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    csv_file: CsvOption = None,
    out: OutOption = None,
) -> None:
    """Time training steps: every strategy and bucket size, no synchronisation, and torch DDP at its best.

    Exits with 1 if a strategy's parameters differ from those of torch DDP.
    """
    from paceline.launch.process.local_ranks import run_ranks
    from paceline.tools.bench.collectives.benchmarked_backends import check_backends
    from paceline.tools.bench.collectives.collectives_settings import parse_names
    from paceline.tools.bench.step.step_benchmark import StepSettings, measure_steps, result
    from paceline.tools.bench.step.step_strategies import parse_bucket

    chosen = {} if strategies is None else {"strategies": parse_names(strategies, "--strategies")}
    settings = StepSettings(
        ranks=ranks,
        sizes=parse_names(size, "--size"),
        batch_size=batch_size,
        context=context,
        steps=steps,
        rounds=rounds,
        bucket_mib=tuple(parse_bucket(text) for text in parse_names(bucket_mib, "--bucket-mib")),
        threads=threads,
        backend=backend,
        memory=memory,
        seed=seed,
        **chosen,
    )
    if backend is not None:
        check_backends((backend,), ranks)
    writer_of = _writers(json_file, csv_file, out)
    rows = measure_steps(settings, run_ranks)
    _show(rows)
    measured = result(settings, rows, shlex.join(["paceline", *sys.argv[1:]]))
    for path, write in writer_of.items():
        write(path, rows, measured)
        typer.echo(path)
    if any(row.exact is False for row in rows):
        raise typer.Exit(1)


_Writer = Callable[[Path, "list[Row]", Mapping[str, object]], None]


def _writers(json_file: Path | None, csv_file: Path | None, out: Path | None) -> dict[Path, _Writer]:
    """Return what will be written where, once it is clear that it can be: no measurement shall be lost.

    Raises:
        UsageError: a file can't be written or is named twice, or there is nothing to draw charts with.
    """
    from paceline.tools.cli.bench import bench_step_charts

    writer_of: dict[Path, _Writer] = {}
    if json_file is not None:
        writer_of[json_file] = _write_json
    if csv_file is not None:
        if csv_file == json_file:
            raise UsageError(f"--json and --csv both name {csv_file}", remedy="name two files")
        writer_of[csv_file] = _write_csv
    if out is not None:
        bench_step_charts.check()
        writer_of |= {out / "step.json": _write_json, out / "step.csv": _write_csv}
        for suffix in (".png", ".svg"):
            writer_of[out / f"step-breakdown{suffix}"] = lambda path, rows, _: bench_step_charts.breakdown(
                path, rows
            )
            writer_of[out / f"step-buckets{suffix}"] = lambda path, rows, _: bench_step_charts.buckets(
                path, rows
            )
    for path in writer_of:
        check_writable(path, make_folder=True)
    return writer_of


def _write_json(path: Path, rows: list[Row], measured: Mapping[str, object]) -> None:
    write_json(path, measured)


def _write_csv(path: Path, rows: list[Row], measured: Mapping[str, object]) -> None:
    from paceline.tools.bench.step.step_rows import write_csv

    write_csv(path, rows)


def _show(rows: list[Row]) -> None:
    """Print one table per model, as wide as it needs to be."""
    from paceline.tools.bench.step.step_rows import FOOTER, table
    from paceline.tools.console_table import print_wide

    for model in dict.fromkeys(row.model for row in rows):
        print_wide(table([row for row in rows if row.model == model]))
    typer.echo(FOOTER)


RanksOption = Annotated[int, typer.Option(help="Processes on this machine.")]


SizeOption = Annotated[str, typer.Option(help="Reference models, separated by commas.")]


BatchSizeOption = Annotated[int, typer.Option(help="Windows of a rank's batch.")]


ContextOption = Annotated[int, typer.Option(help="Tokens of a window.")]


StepsOption = Annotated[int, typer.Option(help="Steps of a contestant's turn.")]


RoundsOption = Annotated[int, typer.Option(help="Turns of each contestant.")]


StrategiesOption = Annotated[
    str | None, typer.Option(help="Who takes part, separated by commas; torch DDP always does.")
]


BackendOption = Annotated[
    str | None,
    typer.Option(help="What our strategies run on: paceline, gloo, nccl; torch's on gloo or nccl."),
]


MemoryOption = Annotated[
    bool, typer.Option(help="Measure peak memory too, each contestant in processes of its own.")
]


SeedOption = Annotated[int, typer.Option(help="Decides initial weights and batches.")]


OutOption = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Write step.json, step.csv and charts there.")
]
