"""Charts of training: step time by phase, time over bucket or message size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline._core.format import format_seconds, format_size
from paceline.tools.report.charts.chart_style import (
    COLOUR_OF_PHASE,
    COLOURS,
    INK,
    MARKERS,
    MUTED,
    PAPER,
    Chart,
    ChartLine,
    LineEnd,
    in_paceline_style,
    label_line_ends,
    legend_patch,
    set_log_ticks,
    set_title,
    stacked_panels,
)
from paceline.tools.result_files import require_matplotlib

if TYPE_CHECKING:
    from paceline.tools.report.charts.chart_style import Axes

__all__ = [
    "COLOUR_OF_PHASE",
    "Chart",
    "ChartLine",
    "StackedBar",
    "breakdown_chart",
    "bucket_size_chart",
    "require_matplotlib",
    "time_and_ratio_chart",
]

_NAME_OF_PHASE = {"backward": "backward (computing)", "exposed": "exposed communication"}
_LABEL_SHARE = 0.055  # of the longest bar: width of a number
_LIGHT_PHASES = {"forward", "data", "other"}  # too light for white numbers


@dataclass(frozen=True)
class StackedBar:
    """One stacked bar: milliseconds by phase in drawing order, and a remark after the total."""

    label: str
    milliseconds_of_phase: Mapping[str, float]
    remark: str = ""

    @property
    def total(self) -> float:
        """Sum of all phases in milliseconds."""
        return sum(self.milliseconds_of_phase.values())


@in_paceline_style
def breakdown_chart(panels: Mapping[str, Sequence[StackedBar]]) -> Chart:
    """Return a chart of step time by phase: one stacked horizontal bar per entry, one panel per title.

    Args:
        panels: bars from top to bottom by title of the panel; an empty title is omitted.
    """
    heights = [0.36 * len(bars) + 0.5 for bars in panels.values()]
    figure, all_axes = stacked_panels(width=10, height=sum(heights) + 0.75, heights=heights)
    every = [bar.milliseconds_of_phase for bars in panels.values() for bar in bars]
    phases = [phase for phase in COLOUR_OF_PHASE if any(parts.get(phase, 0.0) > 0 for parts in every)]
    for axes, (title, bars) in zip(all_axes, panels.items(), strict=True):
        _stack(axes, bars, phases)
        set_title(axes, title)
    all_axes[-1].set_xlabel("milliseconds of one step")
    handles = [legend_patch(_NAME_OF_PHASE.get(phase, phase), COLOUR_OF_PHASE[phase]) for phase in phases]
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=len(phases),
        fontsize=11,
        frameon=False,
        handlelength=1,
        borderpad=0,
    )
    return Chart(figure)


@in_paceline_style
def bucket_size_chart(panels: Mapping[str, Sequence[ChartLine]]) -> Chart:
    """Return a chart of step time over bucket size (logarithmic), one panel per title.

    Args:
        panels: lines by title; points are (MiB, milliseconds) with MiB above 0.
    """
    figure, all_axes = stacked_panels(width=10, height=3.3 * len(panels), heights=[1.0] * len(panels))
    for axes, (title, lines) in zip(all_axes, panels.items(), strict=True):
        ends: list[LineEnd] = []
        looks = zip(COLOURS * 2, MARKERS * 2, strict=True)
        for line in lines:
            colour, marker = (MUTED, "") if line.faint else next(looks)
            sizes, times = [size for size, _ in line.points], [time for _, time in line.points]
            style, width = ("--", 1.3) if line.faint else ("-", 2)
            axes.plot(sizes, times, style, color=colour, marker=marker, markersize=5, linewidth=width)
            ends.append((sizes[-1], times[-1], line.label, colour))
        _bucket_axis(axes, [size for line in lines for size, _ in line.points])
        set_title(axes, title)
        axes.set(xlabel="bucket size (MiB)", ylabel="milliseconds of one step")
        axes.grid(axis="y")
        label_line_ends(axes, ends, wide=True)
    return Chart(figure)


@in_paceline_style
def time_and_ratio_chart(
    times: Sequence[ChartLine], ratios: Sequence[ChartLine], *, title: str, ratio: str
) -> Chart:
    """Return a chart of call time over message size, with speedups in the lower panel; all axes are logarithmic.

    A label has the same colour in both panels.

    Args:
        times: points are (bytes, seconds).
        ratios: points are (bytes, speedup).
        title: the measurement and its machine.
        ratio: label of the lower y axis.
    """
    figure, (above, below) = stacked_panels(width=10, height=7.2, heights=(1.8, 1.0))
    looks = dict(zip([line.label for line in times], zip(COLOURS, MARKERS, strict=True), strict=False))
    below.axhline(1.0, color=MUTED, linewidth=1)
    for axes, lines in ((above, times), (below, ratios)):
        axes.set(xscale="log", yscale="log")
        ends: list[LineEnd] = []
        for line in lines:
            colour, marker = (MUTED, "") if line.faint else looks[line.label]
            style, width = ("--", 1.3) if line.faint else ("-", 2)
            sizes, values = zip(*line.points, strict=True)
            axes.plot(sizes, values, style, color=colour, marker=marker, markersize=5, linewidth=width)
            ends.append((sizes[-1], values[-1], line.label, colour))
        axes.xaxis.set_major_formatter(lambda nbytes, _: format_size(nbytes))
        axes.minorticks_off()
        axes.grid(axis="y")
        label_line_ends(axes, ends, wide=True)
    above.yaxis.set_major_formatter(lambda seconds, _: format_seconds(seconds))
    set_title(above, title)
    low, high = below.get_ylim()
    set_log_ticks(below, (1, 2, 5) if high > 5 * low else (1, 1.2, 1.5, 2, 3, 5))
    below.yaxis.set_major_formatter(lambda times, _: f"{times:g}×")
    below.set(xlabel="bytes", ylabel=ratio)
    return Chart(figure)


def _stack(axes: Axes, bars: Sequence[StackedBar], phases: Sequence[str]) -> None:
    """Draw the bars of one panel, with times inside wide enough parts and totals behind the bars."""
    longest = max((bar.total for bar in bars), default=0.0) or 1.0
    left = [0.0] * len(bars)
    for phase in phases:
        times = [bar.milliseconds_of_phase.get(phase, 0.0) for bar in bars]
        colour = COLOUR_OF_PHASE[phase]
        axes.barh(
            range(len(bars)), times, left=left, color=colour, height=0.72, edgecolor=PAPER, linewidth=0.6
        )
        for row, time in enumerate(times):
            if time > _LABEL_SHARE * longest:
                text, at = _short(time), left[row] + time / 2
                ink = "#10131a" if phase in _LIGHT_PHASES else "#ffffff"
                axes.text(at, row, text, ha="center", va="center", color=ink, fontsize=9)
        left = [start + time for start, time in zip(left, times, strict=True)]
    for row, bar in enumerate(bars):
        text = f"{_short(bar.total)} ms" + (f"  {bar.remark}" if bar.remark else "")
        axes.annotate(text, (bar.total, row), (5, 0), textcoords="offset points", va="center", fontsize=10)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_xlim(0, longest * 1.02)
    axes.spines["left"].set_visible(False)
    axes.invert_yaxis()


def _short(milliseconds: float) -> str:
    return f"{milliseconds:.0f}" if milliseconds >= 99.5 else f"{milliseconds:.3g}"


def _bucket_axis(axes: Axes, sizes: Sequence[float]) -> None:
    ticks = sorted(set(sizes))
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{size:.3g}" for size in ticks])
    axes.minorticks_off()
