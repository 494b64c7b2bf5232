"""Two charts of collectives: time, and bandwidth, against the size of the message.

A colour stands for a backend, a marker and a dash for a number of processes, so that either can be followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.report.canvas import COLOURS, MARKERS, Chart, End, drawn, name_lines, stacked_panels
from paceline.units import format_seconds, format_size

if TYPE_CHECKING:
    from paceline.report.canvas import Axes

__all__ = ["SizeLine", "bandwidth_by_size", "time_by_size"]

_DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))


@dataclass(frozen=True)
class SizeLine:
    """What one backend did with one number of processes: points are (bytes, seconds) or (bytes, bytes per second)."""

    backend: str
    ranks: int
    points: Sequence[tuple[float, float]]

    @property
    def label(self) -> str:
        """The name at the line's end."""
        return f"{self.backend}, {self.ranks} ranks"


@drawn
def time_by_size(lines: Sequence[SizeLine], *, title: str) -> Chart:
    """Return the time of a call against the bytes of its message, both logarithmic.

    Args:
        lines: one for each backend and number of processes; points are (bytes, seconds).
        title: what is measured, and on what.
    """
    chart, axes = _chart(lines, title, scale="log")
    axes.yaxis.set_major_formatter(lambda seconds, _: format_seconds(seconds))
    axes.set(ylabel="time")
    return chart


@drawn
def bandwidth_by_size(lines: Sequence[SizeLine], *, title: str, bandwidth: str) -> Chart:
    """Return the bandwidth of a call against the bytes of its message, which are logarithmic.

    Args:
        lines: one for each backend and number of processes; points are (bytes, bytes per second).
        title: what is measured, and on what.
        bandwidth: which one it is, such as ``"busbw"``.
    """
    scaled = [
        SizeLine(line.backend, line.ranks, [(size, rate / 1e9) for size, rate in line.points])
        for line in lines
    ]
    chart, axes = _chart(scaled, title, scale="linear")
    axes.set(ylabel=f"{bandwidth} (GB/s)")
    return chart


def _chart(lines: Sequence[SizeLine], title: str, scale: str) -> tuple[Chart, Axes]:
    """Return the chart of the lines, and its axes."""
    figure, (axes,) = stacked_panels(width=10, height=max(4.2, 0.24 * len(lines) + 1.2))
    backends = list(dict.fromkeys(line.backend for line in lines))
    ranks = sorted({line.ranks for line in lines})
    axes.set(xscale="log", yscale=scale)
    ends: list[End] = []
    for line in lines:
        colour = COLOURS[backends.index(line.backend) % len(COLOURS)]
        at = ranks.index(line.ranks)
        sizes, values = zip(*line.points, strict=True)
        axes.plot(
            sizes,
            values,
            linestyle=_DASHES[at % len(_DASHES)],
            marker=MARKERS[at % len(MARKERS)],
            color=colour,
            markersize=5,
            linewidth=2,
        )
        ends.append((sizes[-1], values[-1], line.label, colour))
    if scale == "linear":
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(lambda nbytes, _: format_size(nbytes))
    axes.minorticks_off()
    axes.grid(axis="y")
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set(xlabel="bytes (S)")
    name_lines(axes, ends, wide=True)
    return Chart(figure), axes
