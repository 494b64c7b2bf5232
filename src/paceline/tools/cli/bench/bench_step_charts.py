"""The charts of ``paceline bench step``: what the rows say, handed to the report's drawing functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from paceline._core.format import format_count
from paceline._core.units import MIB
from paceline.tools.bench.step.step_rows import Row
from paceline.tools.bench.step.step_strategies import DDP, NO_SYNC, TITLES
from paceline.tools.models.gpt_sizes import size_of
from paceline.tools.report.charts import training_charts

__all__ = ["breakdown", "buckets", "check", "fastest_of_each"]

_LINES = {
    "bucketed": ("bucketed",),
    "sharded": ("sharded",),
    "torch DDP": DDP,
    "torch DDP + ZeRO": ("ddp-zero",),
}


def check() -> None:
    """Raise a `UsageError` if charts can't be drawn here."""
    training_charts.require_matplotlib()


def breakdown(path: Path, rows: Sequence[Row]) -> None:
    """Draw where the time of a step goes: each strategy at its fastest bucket size, one panel per model."""
    panels = {}
    for model, group in _by_model(rows).items():
        panels[_title(model, group)] = [
            training_charts.StackedBar(row.entry.label, vars(row.split_ms), f"{row.ratio_to_ddp:.2f} × DDP")
            for row in fastest_of_each(group)
        ]
    training_charts.breakdown_chart(panels).save(path)


def buckets(path: Path, rows: Sequence[Row]) -> None:
    """Draw the time of a step against the bucket size, one panel per model; torch DDP with or without static graph."""
    panels = {}
    for model, group in _by_model(rows).items():
        lines = [training_charts.ChartLine(label, _points(group, names)) for label, names in _LINES.items()]
        lines = [line for line in lines if line.points]
        sizes = [size for line in lines for size, _ in line.points]
        bare = next(row.step_ms for row in group if row.entry.strategy == NO_SYNC)
        ends = [(min(sizes), bare), (max(sizes), bare)]
        panels[_title(model, group)] = [*lines, training_charts.ChartLine(TITLES[NO_SYNC], ends, faint=True)]
    training_charts.bucket_size_chart(panels).save(path)


def fastest_of_each(rows: Sequence[Row]) -> list[Row]:
    """Return the fastest row of each strategy, torch DDP with and without static graph being one."""
    fastest: dict[str, Row] = {}
    for row in rows:
        name = DDP[0] if row.entry.strategy in DDP else row.entry.strategy
        if name not in fastest or row.step_ms < fastest[name].step_ms:
            fastest[name] = row
    return list(fastest.values())


def _points(rows: Sequence[Row], strategies: Sequence[str]) -> list[tuple[float, float]]:
    """Return (bucket size in MiB, fastest step of the strategies in ms) in ascending order."""
    fastest: dict[float, float] = {}
    for row in rows:
        size = row.entry.bucket_mib
        if row.entry.strategy in strategies and size:
            size = size if math.isfinite(size) else 4 * size_of(row.model).parameters() / MIB
            fastest[size] = min(row.step_ms, fastest.get(size, math.inf))
    return sorted(fastest.items())


def _by_model(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {
        model: [row for row in rows if row.model == model] for model in dict.fromkeys(r.model for r in rows)
    }


def _title(model: str, rows: Sequence[Row]) -> str:
    return f"{model} ({format_count(size_of(model).parameters())} parameters), {rows[0].ranks} ranks"
