"""The table of ``paceline plan step``, and what it means in sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from paceline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.plan.bucket import Best
    from paceline.plan.step_costs import StepCosts
    from paceline.plan.step_measured import MeasuredStep
    from paceline.plan.step_time import StepTime
    from paceline.plan.step_way import Way

__all__ = ["sentences", "step_table"]

_FOOTER = (
    "forward, backward: computing, as without synchronisation; exposed: what synchronisation adds to it, waiting for\n"
    "parameters (gather) included; they and the optimizer add up. Range: exchanges as far off as nine in ten of those\n"
    "held out, computing as eight in ten steps. → the shortest step; DDP: torch's DistributedDataParallel as it comes."
)


def step_table(costs: StepCosts, times: Sequence[StepTime], measured: Mapping[Way, MeasuredStep]) -> Table:
    """Return a row for each way, the shortest step and torch's default marked."""
    from rich.table import Table

    from paceline.plan.step_time import best_of

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
    best = best_of(times)
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


def sentences(costs: StepCosts, times: Sequence[StepTime], measured: Mapping[Way, MeasuredStep]) -> list[str]:
    """Return what the table means: the best way, beside torch's default; the best bucket; how good predictions were."""
    from paceline.plan.step_measured import accuracy_of, beside
    from paceline.plan.step_time import best_of, simulated_bucket

    best = best_of(times)
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


def _bucket(costs: StepCosts, op: str, simulated: Best) -> str:
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
