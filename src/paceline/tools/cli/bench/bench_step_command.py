"""``paceline bench step``: training steps of all strategies, with torch DDP in the same table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline._core.files import write_json
from paceline._core.units import parse_list
from paceline.parallel.strategy import ALIASES
from paceline.tools.cli.shared_options import CsvOption, JsonOption
from paceline.tools.command_options import own, shared
from paceline.tools.result_files import checked_files, paceline_command

if TYPE_CHECKING:
    from paceline.tools.bench.step.step_benchmark import StepSettings
    from paceline.tools.bench.step.step_rows import StepRow

__all__ = ["step"]


def step(
    nproc_per_node: Annotated[int, shared("nproc-per-node")] = 2,
    model: Annotated[str, shared("model", ": sizes of the reference GPT", several=True)] = "tiny,mini",
    micro_batch_size: Annotated[int, shared("micro-batch-size")] = 2,
    context: Annotated[int, shared("context")] = 64,
    steps: Annotated[int, shared("steps", " of a strategy in a round")] = 10,
    rounds: Annotated[int, shared("rounds", " of all strategies")] = 15,
    bucket_mib: Annotated[str, shared("bucket-mib", "; inf: one bucket", several=True)] = "0.25,1,5,25,inf",
    threads: Annotated[int, shared("threads")] = 1,
    strategy: Annotated[
        str | None,
        shared(
            "strategy",
            ": Paceline's, and torch's ddp-static, ddp-zero, fully-shard; torch DDP (ddp) is always timed",
            several=True,
        ),
    ] = None,
    backend: Annotated[
        str | None,
        shared(
            "backend",
            " of Paceline's strategies: paceline, gloo, nccl, xccl; torch's run on all but paceline",
        ),
    ] = None,
    peak_memory: Annotated[
        bool, own(None, "Measure peak memory too, each strategy in processes of its own.")
    ] = True,
    seed: Annotated[int, shared("seed", ": of initial weights and batches")] = 0,
    json_file: JsonOption = None,
    csv_file: CsvOption = None,
    out: Annotated[Path | None, shared("out", ": step.json, step.csv and charts")] = None,
) -> None:
    """Time training steps: every strategy and bucket size, no synchronisation, and torch DDP at its best.

    Exits with 1 if a strategy's parameters differ from those of torch DDP.
    """
    from paceline.launch.process.local_ranks import run_ranks
    from paceline.tools.bench.collectives.benchmarked_backends import check_backends
    from paceline.tools.bench.step.step_benchmark import StepSettings, measure_steps

    chosen = {}
    if strategy is not None:
        names = parse_list("--strategy", strategy, str, example="bucketed,sharded", unique=True)
        # ddp is torch's here, which is always timed
        chosen["strategies"] = tuple(name if name == "ddp" else ALIASES.get(name, name) for name in names)
    settings = StepSettings(
        ranks=nproc_per_node,
        sizes=parse_list("--model", model, str, example="tiny,mini", unique=True),
        batch_size=micro_batch_size,
        context=context,
        steps=steps,
        rounds=rounds,
        bucket_mib=parse_list("--bucket-mib", bucket_mib, float, example="0.25,1,inf"),
        threads=threads,
        backend=backend,
        memory=peak_memory,
        seed=seed,
        **chosen,
    )
    if backend is not None:
        check_backends((backend,), nproc_per_node)
    writer_of = _writers(settings, json_file, csv_file, out)
    rows = measure_steps(settings, run_ranks)
    _show(rows)
    for path, write in writer_of.items():
        write(path, rows)
        typer.echo(path)
    if any(row.exact is False for row in rows):
        raise typer.Exit(1)


def _writers(
    settings: StepSettings, json_file: Path | None, csv_file: Path | None, out: Path | None
) -> dict[Path, Callable[[Path, list[StepRow]], object]]:
    """Return the writer of each file, checked before anything is measured."""
    from paceline.tools.bench.step.step_benchmark import step_result
    from paceline.tools.bench.step.step_rows import write_step_csv
    from paceline.tools.cli.bench.bench_step_charts import draw_bucket_curve, draw_step_breakdown

    def write_step_json(path: Path, rows: list[StepRow]) -> None:
        write_json(path, step_result(settings, rows, paceline_command()))

    in_folder = {"step.json": write_step_json, "step.csv": write_step_csv}
    for suffix in (".png", ".svg"):
        in_folder |= {
            f"step-breakdown{suffix}": draw_step_breakdown,
            f"step-buckets{suffix}": draw_bucket_curve,
        }
    return checked_files(
        json_file,
        write_step_json,
        out,
        in_folder,
        csv_file=csv_file,
        write_csv=write_step_csv,
        make_folders=True,
    )


def _show(rows: list[StepRow]) -> None:
    """Print one table per model."""
    from paceline.tools.bench.step.step_rows import STEP_FOOTER, step_table
    from paceline.tools.console_table import print_wide

    for model in dict.fromkeys(row.model for row in rows):
        print_wide(step_table([row for row in rows if row.model == model]))
    typer.echo(STEP_FOOTER)
