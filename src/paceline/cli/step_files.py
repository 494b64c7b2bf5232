"""What ``paceline plan step`` writes: all of it as JSON, and the two figures."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.durable import write_json
from paceline.units import MIB

if TYPE_CHECKING:
    from paceline.plan.bucket_formula import Buckets
    from paceline.plan.step_costs import StepCosts
    from paceline.plan.step_measured import MeasuredStep
    from paceline.plan.step_time import StepTime
    from paceline.plan.step_way import Way
    from paceline.report.step_chart import BucketLine

__all__ = ["Writer", "draw_breakdown", "draw_buckets", "facts", "write_facts"]

Seen = Mapping["Way", "MeasuredStep"]
Writer = Callable[[Path, "StepCosts", "Sequence[StepTime]", Seen], None]

_CURVES = {"bucketed": "bucketed", "sharded": "sharded", "ddp": "torch DDP"}
_LEAST_MIB, _POINTS = 0.25, 17


def write_facts(path: Path, costs: StepCosts, times: Sequence[StepTime], measured: Seen) -> None:
    """Write all of a prediction, and the command that made it."""
    told = {"command": shlex.join(["paceline", *sys.argv[1:]]), **facts(costs, times, measured)}
    write_json(path, told)


def facts(costs: StepCosts, times: Sequence[StepTime], measured: Seen) -> dict[str, Any]:
    """Return a prediction for JSON, which has no infinity."""
    from paceline.plan.step_time import best_of, simulated_bucket

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
        "best": best_of(times).way.label,
        "buckets": buckets,
        "rows": [_row(time, measured.get(time.way)) for time in times],
    }


def _row(time: StepTime, seen: MeasuredStep | None) -> dict[str, Any]:
    way = _told(time.way)
    parts = {name: value for name, value in vars(time).items() if name != "way"}
    told = None if seen is None else {name: value for name, value in vars(seen).items() if name != "way"}
    return {"label": time.way.label, **way, "seconds": time.seconds, **parts, "measured": told}


def _told(entry: Buckets | Way) -> dict[str, Any]:
    return {name: _finite(value) for name, value in vars(entry).items()}


def _finite(value: Any) -> Any:
    return "inf" if value == math.inf else value


def draw_breakdown(path: Path, costs: StepCosts, times: Sequence[StepTime], measured: Seen) -> None:
    """Draw where the time of each way's step goes, measured bars below predicted ones."""
    from paceline.report.step_chart import StepBar, step_chart

    bars = []
    for time in times:
        seen = measured.get(time.way)
        told = None if seen is None else (seen.forward, seen.backward, seen.exposed, seen.optimizer)
        bars.append(
            StepBar(time.way.label, (time.forward, time.backward, time.exposed, time.optimizer), told)
        )
    step_chart(bars, title=_title(costs)).save(path)


def draw_buckets(path: Path, costs: StepCosts, times: Sequence[StepTime], measured: Seen) -> None:
    """Draw the time of a step against the bucket size, lines predicted, markers measured."""
    from paceline.report.step_chart import bucket_chart

    job = costs.equal_buckets()
    formula = None if job is None else job.best()
    marked = [] if formula is None or math.isinf(formula.count) else [("closed form", formula.nbytes / MIB)]
    chart = bucket_chart(_lines(costs, measured), title=_title(costs), bare=costs.bare_seconds, marked=marked)
    chart.save(path)


def _title(costs: StepCosts) -> str:
    return f"{costs.step.model}, {costs.ranks} ranks, {costs.backend}, {costs.network}"


def _lines(costs: StepCosts, measured: Seen) -> list[BucketLine]:
    """Return a line for each way with buckets, from 1/4 MiB to the whole model; measured sizes beside."""
    from paceline.plan.step_time import predict
    from paceline.plan.step_way import Way
    from paceline.report.step_chart import BucketLine

    whole = max(costs.step.nbytes / MIB, 2 * _LEAST_MIB)
    sizes = [_LEAST_MIB * (whole / _LEAST_MIB) ** (at / (_POINTS - 1)) for at in range(_POINTS)]
    lines = []
    for strategy, label in _CURVES.items():
        if strategy == "ddp" and costs.torchs is None:
            continue
        points = []
        for size in sizes:
            time = predict(costs, Way(strategy, size))
            points.append((size, time.seconds, time.low, time.high))
        seen = [
            (min(way.bucket_mib, whole), each.seconds)
            for way, each in measured.items()
            if way.strategy == strategy and way.bucket_mib is not None and way.compression == "none"
        ]
        lines.append(BucketLine(label, points, sorted(seen)))
    return lines
