"""``paceline plan step``: what a training step takes for every way to synchronise gradients, before any is run.

What ``paceline plan step`` writes: all of it as JSON, and the two figures.

The table of ``paceline plan step``, and what it means in sentences.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline._core.files import write_json
from paceline._core.format import format_bytes, format_seconds
from paceline._core.units import MIB
from paceline.errors import UsageError
from paceline.tools.cli.shared_options import BucketsOption, JsonOption
from paceline.tools.result_files import checked_files

if TYPE_CHECKING:
    pass  # moved
    from rich.table import Table

    from paceline.cost_model.bucket_closed_form import Buckets
    from paceline.cost_model.bucket_layout import BestBucket
    from paceline.cost_model.step_costs import StepCosts
    from paceline.cost_model.step_strategy import StepStrategy
    from paceline.cost_model.step_time import StepTime
    from paceline.tools.plan.step_measured import MeasuredStep
    from paceline.tools.report.charts.plan_charts import PredictedBucketLine

__all__ = [
    "Writer",
    "draw_breakdown",
    "draw_buckets",
    "facts",
    "sentences",
    "step",
    "step_table",
    "write_facts",
]


def step(
    profile_file: Annotated[
        Path, typer.Option("--profile", metavar="FILE", help="What paceline bench parts measured.")
    ],
    model: Annotated[
        str | None, typer.Option(help="Its name; may be left out where there is one only.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="That train; else as many as were measured.")] = None,
    backend: Annotated[
        str | None, typer.Option(help="Of Paceline's exchanges; may be left out where there is one only.")
    ] = None,
    network: Annotated[str | None, typer.Option(help="May be left out where there is one only.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples of a rank, as measured.")] = None,
    shape: Annotated[str | None, typer.Option(help="What a sample is, as measured: 'context 64'.")] = None,
    threads: Annotated[int | None, typer.Option(help="Of a rank, as measured.")] = None,
    bucket_mib: BucketsOption = "1,5,25,100",
    compression: Annotated[
        str, typer.Option(help="Buckets in bf16, int8, int4 too, separated by commas.")
    ] = "",
    measured: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What paceline bench step measured: shown beside.")
    ] = None,
    json_file: JsonOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Draw where time goes, and time by bucket size.")
    ] = None,
) -> None:
    """Predict a training step for every strategy and bucket size, name the best, and set torch's default beside it.

    Example: paceline plan step --profile profile.json --ranks 4 --bucket-mib 1,5,25,100
    """
    pass  # moved
    from paceline.cost_model.profile import Profile
    from paceline.cost_model.step_costs import pick_step_costs
    from paceline.cost_model.step_time import predict_steps
    from paceline.tools.console_table import print_wide
    from paceline.tools.plan.step_measured import load_measured, ways_measured

    sizes, squeezed = _sizes(bucket_mib), _names(compression)
    writer_of = _writers(json_file, out)
    costs = pick_step_costs(
        Profile.load(profile_file),
        model,
        ranks=ranks,
        backend=backend,
        network=network,
        batch=batch_size,
        shape=shape,
        threads=threads,
    )
    seen = {} if measured is None else ways_measured(load_measured(measured), costs.step.model, costs.ranks)
    times = predict_steps(costs, _ways(costs, sizes, squeezed, seen))
    print_wide(step_table(costs, times, seen))
    typer.echo("\n".join(sentences(costs, times, seen)))
    for path, write in writer_of.items():
        write(path, costs, times, seen)
        typer.echo(path)


def _ways(
    costs: StepCosts,
    sizes: tuple[float, ...],
    compressions: tuple[str, ...],
    seen: dict[StepStrategy, MeasuredStep],
) -> list[StepStrategy]:
    """Return the ways to predict: the usual ones, and those that were measured; one bucket for all only once."""
    from paceline._core.units import MIB
    from paceline.cost_model.step_strategy import usual_strategies

    whole = costs.step.nbytes / MIB
    parts = [size for size in sizes if size < whole]
    kept = parts + ([math.inf] if len(parts) < len(sizes) else [])
    ways = usual_strategies(kept, torchs=costs.torchs is not None, compressions=compressions)
    there = [way for way in seen if costs.torchs is not None or not way.is_torchs]
    return list(dict.fromkeys([*ways, *there]))


def _writers(json_file: Path | None, out: Path | None) -> dict[Path, Writer]:
    """Return what will be written where, once it is clear that it can be.

    Raises:
        UsageError: a file can't be written, or there is nothing to draw charts with.
    """
    pass  # moved

    charts: dict[str, Writer] = {"step-breakdown": draw_breakdown, "step-buckets": draw_buckets}
    in_folder = {f"{name}{suffix}": draw for name, draw in charts.items() for suffix in (".png", ".svg")}
    return checked_files(json_file, write_facts, out, in_folder)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _sizes(text: str) -> tuple[float, ...]:
    """Return bucket sizes in MiB, ascending, each once."""
    try:
        sizes = {float(name) for name in _names(text)}
    except ValueError:
        sizes = set()
    if not sizes or not all(size > 0 for size in sizes):
        raise UsageError(f"--bucket-mib {text!r}", remedy="give MiB above 0, or inf, such as 1,5,25")
    return tuple(sorted(sizes))


Seen = Mapping["StepStrategy", "MeasuredStep"]


Writer = Callable[[Path, "StepCosts", "Sequence[StepTime]", Seen], None]


_CURVES = {"bucketed": "bucketed", "sharded": "sharded", "ddp": "torch DDP"}


_LEAST_MIB, _POINTS = 0.25, 17


def write_facts(path: Path, costs: StepCosts, times: Sequence[StepTime], measured: Seen) -> None:
    """Write all of a prediction, and the command that made it."""
    told = {"command": shlex.join(["paceline", *sys.argv[1:]]), **facts(costs, times, measured)}
    write_json(path, told)


def facts(costs: StepCosts, times: Sequence[StepTime], measured: Seen) -> dict[str, Any]:
    """Return a prediction for JSON, which has no infinity."""
    from paceline.cost_model.step_time import best_step, simulated_bucket

    step, buckets = costs.step, {}
    for op in ("all-reduce", "reduce-scatter"):
        if op in costs.engine:
            job, found = costs.equal_buckets(op), simulated_bucket(costs, op)
            buckets[op] = {
                "inputs": None if job is None else asdict(job),
                "closed_form": None if job is None else _told(job.best()),
                "simulated": {"nbytes": _finite(found.cap), "overhead": found.backward.exposed},
            }
    return {
        "kind": "plan-step",
        "schema": 1,
        "model": step.model,
        "fingerprint": step.fingerprint,
        "batch": step.batch,
        "shape": step.shape,
        "ranks": costs.ranks,
        "backend": costs.backend,
        "network": costs.network,
        "best": best_step(times).way.label,
        "buckets": buckets,
        "rows": [_row(time, measured.get(time.way)) for time in times],
    }


def _row(time: StepTime, seen: MeasuredStep | None) -> dict[str, Any]:
    way = _told(time.way)
    parts = {name: value for name, value in vars(time).items() if name != "way"}
    told = None if seen is None else {name: value for name, value in vars(seen).items() if name != "way"}
    return {"label": time.way.label, **way, "seconds": time.seconds, **parts, "measured": told}


def _told(entry: Buckets | StepStrategy) -> dict[str, Any]:
    return {name: _finite(value) for name, value in vars(entry).items()}


def _finite(value: Any) -> Any:
    return "inf" if value == math.inf else value


def draw_breakdown(path: Path, costs: StepCosts, times: Sequence[StepTime], measured: Seen) -> None:
    """Draw where the time of each way's step goes, measured bars below predicted ones."""
    from paceline.tools.report.charts.plan_charts import PredictedStepBar, step_chart

    bars = []
    for time in times:
        seen = measured.get(time.way)
        told = None if seen is None else (seen.forward, seen.backward, seen.exposed, seen.optimizer)
        bars.append(
            PredictedStepBar(
                time.way.label, (time.forward, time.backward, time.exposed, time.optimizer), told
            )
        )
    step_chart(bars, title=_title(costs)).save(path)


def draw_buckets(path: Path, costs: StepCosts, times: Sequence[StepTime], measured: Seen) -> None:
    """Draw the time of a step against the bucket size, lines predicted, markers measured."""
    from paceline.tools.report.charts.plan_charts import bucket_chart

    job = costs.equal_buckets()
    formula = None if job is None else job.best()
    marked = [] if formula is None or math.isinf(formula.count) else [("closed form", formula.nbytes / MIB)]
    chart = bucket_chart(_lines(costs, measured), title=_title(costs), bare=costs.bare_seconds, marked=marked)
    chart.save(path)


def _title(costs: StepCosts) -> str:
    return f"{costs.step.model}, {costs.ranks} ranks, {costs.backend}, {costs.network}"


def _lines(costs: StepCosts, measured: Seen) -> list[PredictedBucketLine]:
    """Return a line for each way with buckets, from 1/4 MiB to the whole model; measured sizes beside."""
    from paceline.cost_model.step_strategy import StepStrategy
    from paceline.cost_model.step_time import predict_step
    from paceline.tools.report.charts.plan_charts import PredictedBucketLine

    whole = max(costs.step.nbytes / MIB, 2 * _LEAST_MIB)
    sizes = [_LEAST_MIB * (whole / _LEAST_MIB) ** (at / (_POINTS - 1)) for at in range(_POINTS)]
    lines = []
    for strategy, label in _CURVES.items():
        if strategy == "ddp" and costs.torchs is None:
            continue
        points = []
        for size in sizes:
            time = predict_step(costs, StepStrategy(strategy, size))
            points.append((size, time.seconds, time.low, time.high))
        seen = [
            (min(way.bucket_mib, whole), each.seconds)
            for way, each in measured.items()
            if way.strategy == strategy and way.bucket_mib is not None and way.compression == "none"
        ]
        lines.append(PredictedBucketLine(label, points, sorted(seen)))
    return lines


_FOOTER = (
    "forward, backward: computing, as without synchronisation; exposed: what synchronisation adds to it, waiting for\n"
    "parameters (gather) included; they and the optimizer add up. Range: exchanges as far off as nine in ten of those\n"
    "held out, computing as eight in ten steps. → the shortest step; DDP: torch's DistributedDataParallel as it comes."
)


def step_table(
    costs: StepCosts, times: Sequence[StepTime], measured: Mapping[StepStrategy, MeasuredStep]
) -> Table:
    """Return a row for each way, the shortest step and torch's default marked."""
    from rich.table import Table

    from paceline.cost_model.step_time import best_step

    step, where = costs.step, f"{costs.backend}, {costs.network}"
    title = f"{step.model}, {step.batch} samples a rank ({step.shape}), {costs.ranks} ranks, {where}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name in ("a step", "range", "forward", "backward", "exposed", "gather", "optimizer", "calls"):
        table.add_column(name, justify="right", no_wrap=True)
    if measured:
        table.add_column("measured", justify="right", no_wrap=True)
        table.add_column("off", justify="right", no_wrap=True)
    best = best_step(times)
    for time in times:
        mark = "→" if time is best else "DDP" if time.way.default_ddp else ""
        told = f"{format_seconds(time.low)} – {format_seconds(time.high)}"
        parts = (time.forward, time.backward, time.exposed, time.gather, time.optimizer)
        cells = [
            mark,
            time.way.label,
            format_seconds(time.seconds),
            told,
            *map(format_seconds, parts),
            str(time.calls),
        ]
        seen = measured.get(time.way)
        if measured:
            off = "" if seen is None else f"{100 * (time.seconds / seen.seconds - 1):+.1f} %"
            cells += ["" if seen is None else format_seconds(seen.seconds), off]
        table.add_row(*cells)
    return table


def sentences(
    costs: StepCosts, times: Sequence[StepTime], measured: Mapping[StepStrategy, MeasuredStep]
) -> list[str]:
    """Return what the table means: the best way, beside torch's default; the best bucket; how good predictions were."""
    from paceline.cost_model.step_time import best_step, simulated_bucket
    from paceline.tools.plan.step_measured import accuracy_of, beside

    best = best_step(times)
    default = next((each for each in times if each.way.default_ddp), None)
    told = [_FOOTER, "", f"The shortest step: {best.way.label}, {format_seconds(best.seconds)}."]
    if default is not None:
        times_ddp = default.seconds / best.seconds
        told[-1] = told[-1][:-1] + f"; torch DDP as it comes takes {times_ddp:.2f} times as long."
    reducing = [op for op in ("all-reduce", "reduce-scatter") if op in costs.engine]
    told += [_bucket(costs, op, simulated_bucket(costs, op)) for op in reducing]
    accuracy = accuracy_of(beside(times, dict(measured)), costs.ranks) if measured else None
    if accuracy is not None:
        told.append(f"Predicted steps beside measured ones: off by {accuracy}.")
    beyond = dict.fromkeys(each.beyond for each in times if each.beyond)
    told += [f"Beyond what was measured: {note}." for note in beyond if note]
    if any(each.way.strategy == "full-shard" for each in times):
        told.append(
            "full-shard is a lower bound: what FSDP2 copies into and out of its buffers is not counted."
        )
    if any(each.way.compression != "none" for each in times):
        told.append("Compressed buckets are lower bounds: making packets is not counted.")
    return told


def _bucket(costs: StepCosts, op: str, simulated: BestBucket) -> str:
    """Return the best bucket for an exchange: simulated with the model's gradients, and by the closed form."""
    told = (
        f"Best bucket for {op}: {_size(simulated.cap)}, which adds {format_seconds(simulated.backward.exposed)} to "
        "backward, simulated with this model's gradients"
    )
    job = costs.equal_buckets(op)
    if job is None:
        return f"{told}."
    formula = job.best()
    count = "without end" if formula.count == math.inf else f"n = {formula.count:g}"
    bound = "computing" if job.compute_bound else "the network"
    inputs = (
        f"o = {format_seconds(job.call_seconds)} a call, s/w = {format_seconds(job.wire_seconds)}, "
        f"backward {format_seconds(job.backward_seconds)}, so {bound} decides"
    )
    closed = f"{format_bytes(formula.nbytes)}, {count}, {format_seconds(formula.overhead)}"
    return f"{told};\n  closed form: {closed} ({inputs})."


def _size(cap: float) -> str:
    if cap == 0:
        return "one parameter each"
    return "one for all" if cap == math.inf else format_bytes(cap)
