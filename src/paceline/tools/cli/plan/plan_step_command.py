"""``paceline plan step``: predicted time of a training step for every way to synchronise gradients."""

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
from paceline._core.units import MIB, parse_list
from paceline.errors import UsageError
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.command_options import own, shared
from paceline.tools.result_files import checked_files

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.cost_model.backward_simulation import BestBucket
    from paceline.cost_model.step_costs import StepCosts
    from paceline.cost_model.step_strategy import StepStrategy
    from paceline.cost_model.step_time import StepTime
    from paceline.tools.bench.bench_result_reader import MeasuredStep
    from paceline.tools.report.charts.plan_charts import PredictedBucketLine

__all__ = ["draw_breakdown", "draw_buckets", "step"]

Measured = Mapping["StepStrategy", "MeasuredStep"]
_Writer = Callable[[Path, "StepCosts", "Sequence[StepTime]", Measured], None]

_CURVES = {"bucketed": "bucketed", "sharded": "sharded", "ddp": "torch DDP"}
_MIN_MIB, _POINTS = 0.25, 17

_FOOTER = (
    "forward, backward: computing, as without synchronisation; exposed: what synchronisation adds to it, waiting for\n"
    "parameters (gather) included; they and the optimizer add up. Range: exchanges off by the error of 90 % of those\n"
    "held out, computing by the spread of 80 % of the steps. → the shortest step; DDP: torch's\n"
    "DistributedDataParallel with default settings."
)


def step(
    profile_file: Annotated[Path, shared("profile", " by paceline bench parts")],
    model: Annotated[str | None, shared("model", " of the profile; optional if it has one")] = None,
    world_size: Annotated[int | None, shared("world-size", "; default: as measured")] = None,
    backend: Annotated[
        str | None, shared("backend", " of Paceline's exchanges; optional if the profile has one")
    ] = None,
    network: Annotated[str | None, shared("network", "; optional if it has one")] = None,
    micro_batch_size: Annotated[int | None, shared("micro-batch-size", ", as measured")] = None,
    shape: Annotated[str | None, own("TEXT", "Shape of a sample, as measured: 'context 64'.")] = None,
    threads: Annotated[int | None, shared("threads", ", as measured")] = None,
    bucket_mib: Annotated[str, shared("bucket-mib", "; inf: one bucket", several=True)] = "1,5,25,100",
    compression: Annotated[
        str, shared("compression", ": bf16, int8, int4: compressed buckets too", several=True)
    ] = "",
    measured: Annotated[Path | None, own("FILE", "Result of paceline bench step, to compare with.")] = None,
    json_file: JsonOption = None,
    out: Annotated[
        Path | None, shared("out", ": charts of a step's parts, and of its time by bucket size")
    ] = None,
) -> None:
    """Predict a training step for every strategy and bucket size; compare the best with torch's default.

    Example: paceline plan step --profile profile.json --world-size 4 --bucket-mib 1,5,25,100
    """
    from paceline.cost_model.profile import Profile
    from paceline.cost_model.step_costs import pick_step_costs
    from paceline.cost_model.step_time import predict_steps
    from paceline.tools.bench.bench_result_reader import load_measured_steps, measured_by_strategy
    from paceline.tools.console_table import print_wide

    sizes = sorted(set(parse_list("--bucket-mib", bucket_mib, float, example="1,5,25")))
    if not all(size > 0 for size in sizes):
        raise UsageError(f"--bucket-mib {bucket_mib!r}", remedy="give MiB above 0, or inf, such as 1,5,25")
    compressions = [name.strip() for name in compression.split(",") if name.strip()]
    charts: dict[str, _Writer] = {"step-breakdown": draw_breakdown, "step-buckets": draw_buckets}
    in_folder = {f"{name}{suffix}": draw for name, draw in charts.items() for suffix in (".png", ".svg")}
    writer_of = checked_files(json_file, _write_facts, out, in_folder)
    costs = pick_step_costs(
        Profile.load(profile_file),
        model,
        ranks=world_size,
        backend=backend,
        network=network,
        batch=micro_batch_size,
        shape=shape,
        threads=threads,
    )
    steps: dict[StepStrategy, MeasuredStep] = {}
    if measured is not None:
        steps = measured_by_strategy(load_measured_steps(measured), costs.step.model, costs.ranks)
    times = predict_steps(costs, _strategies(costs, sizes, compressions, steps))
    print_wide(_step_table(costs, times, steps))
    typer.echo("\n".join(_sentences(costs, times, steps)))
    for path, write in writer_of.items():
        write(path, costs, times, steps)
        typer.echo(path)


def _strategies(
    costs: StepCosts, sizes: Sequence[float], compressions: Sequence[str], measured: Measured
) -> list[StepStrategy]:
    """Return the standard strategies and the measured ones; sizes of at least the model become one bucket."""
    from paceline.cost_model.step_strategy import standard_strategies

    kept = [size for size in sizes if size < costs.step.nbytes / MIB]
    if len(kept) < len(sizes):
        kept.append(math.inf)
    with_ddp = costs.torch_ddp is not None
    standard = standard_strategies(kept, torch_ddp=with_ddp, compressions=compressions)
    return list(dict.fromkeys([*standard, *(each for each in measured if with_ddp or not each.is_torch_ddp)]))


# ---------------------------------------------------------------------- table and sentences


def _title(costs: StepCosts) -> str:
    return f"{costs.step.model}, {costs.ranks} ranks, {costs.backend}, {costs.network}"


def _step_table(costs: StepCosts, times: Sequence[StepTime], measured: Measured) -> Table:
    """Return a row per strategy; the shortest step and torch's default are marked."""
    from paceline.cost_model.step_time import fastest_step
    from paceline.tools.console_table import make_table

    columns = ["", "", "a step", "range", "forward", "backward", "exposed", "gather", "optimizer", "calls"]
    columns += ["measured", "off"] if measured else []
    best, rows = fastest_step(times), []
    for time in times:
        parts = (time.forward, time.backward, time.exposed, time.gather, time.optimizer)
        row = [
            "→" if time is best else "DDP" if time.strategy.is_default_ddp else "",
            time.strategy.label,
            format_seconds(time.seconds),
            f"{format_seconds(time.low)} – {format_seconds(time.high)}",
            *map(format_seconds, parts),
            str(time.calls),
        ]
        if measured:
            seen = measured.get(time.strategy)
            off = "" if seen is None else f"{100 * (time.seconds / seen.seconds - 1):+.1f} %"
            row += ["" if seen is None else format_seconds(seen.seconds), off]
        rows.append(row)
    place = f"{costs.ranks} ranks, {costs.backend}, {costs.network}"
    title = f"{costs.step.model}, {costs.step.batch} samples per rank ({costs.step.shape}), {place}"
    return make_table(columns, rows, left=2, title=title)


def _sentences(costs: StepCosts, times: Sequence[StepTime], measured: Measured) -> list[str]:
    """Return the best strategy compared with torch's default, the best buckets, and the prediction errors."""
    from paceline.cost_model.step_time import best_simulated_bucket, fastest_step
    from paceline.tools.bench.bench_result_reader import pair_with_measured, step_prediction_error

    best = fastest_step(times)
    default = next((each for each in times if each.strategy.is_default_ddp), None)
    first = f"The shortest step: {best.strategy.label}, {format_seconds(best.seconds)}"
    if default is not None:
        first += f", {default.seconds / best.seconds:.2f}× faster than torch DDP's default"
    lines = [_FOOTER, "", f"{first}."]
    reducing = [op for op in ("all-reduce", "reduce-scatter") if op in costs.engine]
    lines += [_describe_bucket(costs, op, best_simulated_bucket(costs, op)) for op in reducing]
    error = (
        step_prediction_error(pair_with_measured(times, dict(measured)), costs.ranks) if measured else None
    )
    if error is not None:
        lines.append(f"Predicted steps compared with measured ones: off by {error}.")
    beyond = dict.fromkeys(each.beyond for each in times if each.beyond)
    lines += [f"Beyond what was measured: {note}." for note in beyond]
    if any(each.strategy.name == "full-shard" for each in times):
        lines.append(
            "full-shard is a lower bound: FSDP2's copies into and out of its buffers are not counted."
        )
    if any(each.strategy.compression != "none" for each in times):
        lines.append("Compressed buckets are lower bounds: the time of compressing is not counted.")
    return lines


def _describe_bucket(costs: StepCosts, op: str, simulated: BestBucket) -> str:
    """Return the best bucket size of an operation: simulated with the model's gradients, and in closed form."""
    cap = simulated.cap
    size = "one per parameter" if cap == 0 else "one for all" if cap == math.inf else format_bytes(cap)
    text = (
        f"Best bucket for {op}: {size}, which adds {format_seconds(simulated.backward.exposed)} to backward, "
        "simulated with this model's gradients"
    )
    job = costs.equal_buckets(op)
    if job is None:
        return f"{text}."
    formula = job.best()
    count = "unlimited" if formula.count == math.inf else f"n = {formula.count:g}"
    inputs = (
        f"o = {format_seconds(job.call_seconds)} per call, s/w = {format_seconds(job.wire_seconds)}, backward "
        f"{format_seconds(job.backward_seconds)}, so {'computing' if job.compute_bound else 'the network'} decides"
    )
    closed = f"{format_bytes(formula.nbytes)}, {count}, {format_seconds(formula.overhead)}"
    return f"{text};\n  closed form: {closed} ({inputs})."


# ---------------------------------------------------------------------- files


def _write_facts(path: Path, costs: StepCosts, times: Sequence[StepTime], measured: Measured) -> None:
    """Write the prediction as JSON, which has no infinity."""
    from paceline.cost_model.step_time import best_simulated_bucket, fastest_step

    step, buckets = costs.step, {}
    for op in ("all-reduce", "reduce-scatter"):
        if op in costs.engine:
            job, found = costs.equal_buckets(op), best_simulated_bucket(costs, op)
            closed = None
            if job is not None:
                closed = {name: _finite(value) for name, value in vars(job.best()).items()}
            buckets[op] = {
                "inputs": None if job is None else asdict(job),
                "closed_form": closed,
                "simulated": {"nbytes": _finite(found.cap), "overhead": found.backward.exposed},
            }
    record = {
        "command": shlex.join(["paceline", *sys.argv[1:]]),
        "kind": "plan-step",
        "schema": 1,
        "model": step.model,
        "fingerprint": step.fingerprint,
        "batch": step.batch,
        "shape": step.shape,
        "ranks": costs.ranks,
        "backend": costs.backend,
        "network": costs.network,
        "best": fastest_step(times).strategy.label,
        "buckets": buckets,
        "rows": [_row(time, measured.get(time.strategy)) for time in times],
    }
    write_json(path, record)


def _row(time: StepTime, measured: MeasuredStep | None) -> dict[str, Any]:
    def numbers(of: object) -> dict[str, Any]:
        return {name: value for name, value in vars(of).items() if name != "strategy"}

    return {
        "label": time.strategy.label,
        "strategy": time.strategy.name,
        "bucket_mib": _finite(time.strategy.bucket_mib),
        "compression": time.strategy.compression,
        "seconds": time.seconds,
        **numbers(time),
        "measured": None if measured is None else numbers(measured),
    }


def _finite(value: Any) -> Any:
    return "inf" if value == math.inf else value


def draw_breakdown(path: Path, costs: StepCosts, times: Sequence[StepTime], measured: Measured) -> None:
    """Draw the parts of each strategy's step, measured bars below predicted ones."""
    from paceline.tools.report.charts.plan_charts import PredictedStepBar, step_chart

    def parts(each: StepTime | MeasuredStep) -> tuple[float, float, float, float]:
        return each.forward, each.backward, each.exposed, each.optimizer

    bars = []
    for time in times:
        seen = measured.get(time.strategy)
        bars.append(PredictedStepBar(time.strategy.label, parts(time), None if seen is None else parts(seen)))
    step_chart(bars, title=_title(costs)).save(path)


def draw_buckets(path: Path, costs: StepCosts, times: Sequence[StepTime], measured: Measured) -> None:
    """Draw the time of a step against the bucket size: predicted lines, measured markers."""
    from paceline.tools.report.charts.plan_charts import bucket_chart

    job = costs.equal_buckets()
    formula = None if job is None else job.best()
    marked = [] if formula is None or math.isinf(formula.count) else [("closed form", formula.nbytes / MIB)]
    lines = [_bucket_line(costs, name, measured) for name in _CURVES if name != "ddp" or costs.torch_ddp]
    bucket_chart(lines, title=_title(costs), bare=costs.bare_seconds, marked=marked).save(path)


def _bucket_line(costs: StepCosts, name: str, measured: Measured) -> PredictedBucketLine:
    """Return the line of a strategy from 1/4 MiB to the whole model, with its measured sizes."""
    from paceline.cost_model.step_strategy import StepStrategy
    from paceline.cost_model.step_time import predict_step
    from paceline.tools.report.charts.plan_charts import PredictedBucketLine

    whole = max(costs.step.nbytes / MIB, 2 * _MIN_MIB)
    points = []
    for number in range(_POINTS):
        size = _MIN_MIB * (whole / _MIN_MIB) ** (number / (_POINTS - 1))
        time = predict_step(costs, StepStrategy(name, size))
        points.append((size, time.seconds, time.low, time.high))
    seen = [
        (min(strategy.bucket_mib, whole), each.seconds)
        for strategy, each in measured.items()
        if strategy.name == name and strategy.bucket_mib is not None and strategy.compression == "none"
    ]
    return PredictedBucketLine(_CURVES[name], points, sorted(seen))
