"""Chart of memory over a step, stacked by category, with the peak marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline._core.format import format_bytes
from paceline.tools.report.charts.chart_style import (
    INK,
    MUTED,
    Chart,
    in_paceline_style,
    legend_patch,
    set_title,
    stacked_panels,
)

if TYPE_CHECKING:
    from paceline.tools.report.charts.chart_style import Axes

__all__ = ["MemoryCurve", "memory_over_step"]

_COLOURS = {
    "parameters": "#0072b2",
    "buffers": "#5c6370",
    "optimizer state": "#009e73",
    "buckets": "#e69f00",
    "gradients": "#f0c75e",
    "gathered units": "#56b4e9",
    "communication": "#a6d8f7",
    "inputs": "#a0a6b0",
    "activations": "#cc79a7",
    "autocast copies": "#e8bfd6",
    "recomputed": "#8c4f73",
    "temporaries": "#d55e00",
    "workspaces": "#7a3600",
}


@dataclass(frozen=True, kw_only=True)
class MemoryCurve:
    """Memory in use over a step.

    Attributes:
        held: bytes after each tick by category, bottom of the stack first; all rows have the same length.
        phases: (tick, name) of the beginning of each phase.
        peak_at: tick of the peak.
        peak_label: text next to the peak.
        capacity_nbytes: memory of the device; None draws no line.
        title: title of the chart.
    """

    held: Mapping[str, Sequence[int]]
    phases: Sequence[tuple[int, str]]
    peak_at: int
    peak_label: str
    capacity_nbytes: int | None
    title: str


@in_paceline_style
def memory_over_step(curve: MemoryCurve, wide: bool = True) -> Chart:
    """Return a stacked chart of the memory of a step; the x axis counts allocations and frees, not seconds."""
    figure, (axes,) = stacked_panels(10 if wide else 4.5, 5)
    rows = {name: row for name, row in curve.held.items() if max(row, default=0)}
    ticks = range(len(next(iter(rows.values()), ())))
    unit, name = _unit(max((sum(column) for column in zip(*rows.values(), strict=True)), default=1))
    axes.stackplot(
        list(ticks),
        [[value / unit for value in row] for row in rows.values()],
        colors=[_COLOURS[each] for each in rows],
        step="post",
        linewidth=0,
    )
    _mark_phases(axes, curve, len(ticks))
    _mark_peak(axes, curve, sum(row[curve.peak_at] for row in rows.values()) / unit, len(ticks))
    if curve.capacity_nbytes is not None and curve.capacity_nbytes / unit < 3 * axes.get_ylim()[1]:
        axes.axhline(curve.capacity_nbytes / unit, color=INK, linewidth=1, linestyle="--")
        label = f"device: {format_bytes(curve.capacity_nbytes)}"
        axes.annotate(
            label, (0, curve.capacity_nbytes / unit), (4, -12), textcoords="offset points", fontsize=9
        )
    axes.set_ylabel(f"memory, {name}")
    axes.set_xlabel("allocations and frees of two steps, in order")
    set_title(axes, curve.title)
    handles: list[Any] = [legend_patch(each, _COLOURS[each]) for each in reversed(rows)]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    return Chart(figure)


def _unit(nbytes: int) -> tuple[int, str]:
    return (1 << 30, "GiB") if nbytes >= 1 << 30 else (1 << 20, "MiB")


def _mark_phases(axes: Axes, curve: MemoryCurve, ticks: int) -> None:
    """Draw a line at the beginning of each phase, with its name where it fits."""
    top = axes.get_ylim()[1] * 1.18
    axes.set_ylim(0, top)
    axes.set_xlim(0, max(ticks - 1, 1))
    ends = [tick for tick, _ in curve.phases[1:]] + [ticks]
    for (tick, name), end in zip(curve.phases, ends, strict=True):
        axes.axvline(tick, color=MUTED, linewidth=0.6, linestyle=":")
        if end - tick > 0.07 * ticks:
            axes.text((tick + end) / 2, top * 0.985, name, ha="center", va="top", fontsize=9, color=MUTED)


def _mark_peak(axes: Axes, curve: MemoryCurve, height: float, ticks: int) -> None:
    left = curve.peak_at > ticks / 2
    axes.plot([curve.peak_at], [height], marker="v", color=INK, markersize=7, clip_on=False)
    axes.annotate(
        curve.peak_label,
        (curve.peak_at, height),
        (-8 if left else 8, 10),
        textcoords="offset points",
        ha="right" if left else "left",
        fontsize=9,
        color=INK,
    )
