"""Charts of ``paceline bench step``: the parts of a step, and its time against the bucket size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from paceline._core.format import format_count
from paceline._core.units import MIB
from paceline.tools.bench.step.step_rows import StepRow
from paceline.tools.bench.step.step_strategies import DDP_STRATEGIES, NO_SYNC, STRATEGY_TITLES
from paceline.tools.models.gpt_sizes import gpt_size
from paceline.tools.report.charts import training_charts

__all__ = ["draw_bucket_curve", "draw_step_breakdown", "fastest_of_each"]

_LINES = {
    "bucketed": ("bucketed",),
    "sharded": ("sharded",),
    "torch DDP": DDP_STRATEGIES,
    "torch DDP + ZeRO": ("ddp-zero",),
}


def draw_step_breakdown(path: Path, rows: Sequence[StepRow]) -> None:
    """Draw the parts of a step's time: each strategy at its fastest bucket size, one panel per model."""
    panels = {}
    for model, group in _by_model(rows).items():
        panels[_title(model, group)] = [
            training_charts.StackedBar(
                row.variant.label, vars(row.breakdown_ms), f"{row.ratio_to_ddp:.2f} × DDP"
            )
            for row in fastest_of_each(group)
        ]
    training_charts.breakdown_chart(panels).save(path)


def draw_bucket_curve(path: Path, rows: Sequence[StepRow]) -> None:
    """Draw the time of a step against the bucket size, one panel per model; torch DDP with or without static graph."""
    panels = {}
    for model, group in _by_model(rows).items():
        lines = [training_charts.ChartLine(label, _points(group, names)) for label, names in _LINES.items()]
        lines = [line for line in lines if line.points]
        sizes = [size for line in lines for size, _ in line.points]
        bare = next(row.step_ms for row in group if row.variant.strategy == NO_SYNC)
        ends = [(min(sizes), bare), (max(sizes), bare)]
        panels[_title(model, group)] = [
            *lines,
            training_charts.ChartLine(STRATEGY_TITLES[NO_SYNC], ends, faint=True),
        ]
    training_charts.bucket_size_chart(panels).save(path)


def fastest_of_each(rows: Sequence[StepRow]) -> list[StepRow]:
    """Return the fastest row of each strategy; torch DDP with and without static graph counts as one."""
    fastest: dict[str, StepRow] = {}
    for row in rows:
        name = DDP_STRATEGIES[0] if row.variant.strategy in DDP_STRATEGIES else row.variant.strategy
        if name not in fastest or row.step_ms < fastest[name].step_ms:
            fastest[name] = row
    return list(fastest.values())


def _points(rows: Sequence[StepRow], strategies: Sequence[str]) -> list[tuple[float, float]]:
    """Return (bucket size in MiB, fastest step of the strategies in ms) in ascending order."""
    fastest: dict[float, float] = {}
    for row in rows:
        size = row.variant.bucket_mib
        if row.variant.strategy in strategies and size:
            size = size if math.isfinite(size) else 4 * gpt_size(row.model).parameters() / MIB
            fastest[size] = min(row.step_ms, fastest.get(size, math.inf))
    return sorted(fastest.items())


def _by_model(rows: Sequence[StepRow]) -> dict[str, list[StepRow]]:
    return {
        model: [row for row in rows if row.model == model] for model in dict.fromkeys(r.model for r in rows)
    }


def _title(model: str, rows: Sequence[StepRow]) -> str:
    return f"{model} ({format_count(gpt_size(model).parameters())} parameters), {rows[0].ranks} ranks"
