"""Style, panels, line labels and output files shared by all charts.

Charts are drawn on a light background for a width of about 1000 px, in a palette for colour-blind readers (Okabe &
Ito), with direct labels instead of legends where possible. The report's page draws its own charts
(`paceline.tools.report.page`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from paceline._core.files import write_atomic
from paceline.errors import UsageError
from paceline.tools.result_files import require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

__all__ = [
    "COLOURS",
    "COLOUR_OF_PHASE",
    "INK",
    "MARKERS",
    "MUTED",
    "PAPER",
    "Chart",
    "ChartLine",
    "LineEnd",
    "in_paceline_style",
    "label_line_ends",
    "legend_patch",
    "set_log_ticks",
    "set_title",
    "space_apart",
    "stacked_panels",
    "time_unit",
]

INK, MUTED, _GRID, PAPER = "#1f2430", "#5c6370", "#e4e7eb", "#fefefe"


COLOUR_OF_PHASE = {
    "data": "#cc79a7",
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "exposed": "#d55e00",
    "optimizer": "#009e73",
    "other": "#a0a6b0",
}


COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]


MARKERS = "osD^vP"


_STYLE: dict[str, Any] = {
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 11,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "grid.color": _GRID,
    "svg.fonttype": "none",
}


P = ParamSpec("P")


LineEnd = tuple[float, float, str, str]
"""x, y, label and colour of a line's last point."""


@dataclass(frozen=True)
class ChartLine:
    """A labelled line through points ``(x, y)``; `faint` draws a reference line, dashed and without markers."""

    label: str
    points: Sequence[tuple[float, float]]
    faint: bool = False


@dataclass(frozen=True)
class Chart:
    """A drawn chart."""

    figure: Figure

    def save(self, path: Path) -> Path:
        """Write the chart atomically to `path`, as PNG or SVG by its suffix.

        Raises:
            UsageError: the suffix is neither ``.png`` nor ``.svg``.
        """
        if path.suffix not in (".png", ".svg"):
            raise UsageError(f"can't draw to {path.name!r}", remedy="name a .png or .svg file")
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        with _style(path.stem):
            write_atomic(
                path,
                lambda file: self.figure.savefig(file, dpi=200, facecolor=PAPER, metadata=metadata),
            )
        return path


def _style(salt: str) -> AbstractContextManager[object]:
    """Return the matplotlib settings to draw and save with; `salt` makes the ids of an SVG reproducible."""
    return require_matplotlib().rc_context({**_STYLE, "svg.hashsalt": salt})


def in_paceline_style(draw: Callable[P, Chart]) -> Callable[P, Chart]:
    """Decorate a drawing function to use Paceline's style without changing the caller's matplotlib settings."""

    @functools.wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> Chart:
        with _style(draw.__name__):
            return draw(*args, **kwargs)

    return styled


def stacked_panels(
    width: float, height: float, heights: Sequence[float] = (1.0,)
) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure of `width` × `height` inches with panels on top of each other, of relative `heights`."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(h_pad=0.1))
    grid = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": list(heights)})
    return figure, list(grid[:, 0])


def set_title(axes: Axes, title: str, *, pad: float | None = None) -> None:
    """Write the title of a panel, bold and flush left."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=pad)


def set_log_ticks(axes: Axes, subs: Sequence[float]) -> None:
    """Set the ticks of a logarithmic y axis to these multiples of every power of ten."""
    from matplotlib.ticker import LogLocator

    axes.yaxis.set_major_locator(LogLocator(subs=subs))


def legend_patch(label: str, colour: str) -> Patch:
    """Return a legend entry for a colour."""
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def label_line_ends(axes: Axes, ends: Sequence[LineEnd], wide: bool) -> None:
    """Label each line at its right end without overlaps; in a narrow chart, use a legend above instead."""
    if not wide and ends:
        handles = [
            axes.plot([], [], color=colour, linewidth=2, label=label)[0] for _, _, label, colour in ends
        ]
        axes.legend(
            handles=handles, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, frameon=False, fontsize=9
        )
        return
    inches = axes.bbox.height / axes.figure.dpi  # approximate: the layout runs later
    axes.autoscale_view()  # otherwise the limits are still unknown
    to_fraction = axes.transScale + axes.transLimits
    heights = space_apart([to_fraction.transform(end[:2])[1] for end in ends], gap=0.2 / inches)
    above = max(0.0, max(heights, default=0.0) - 1)  # would overlap the title
    heights = [height - above for height in heights]
    for (at, value, label, colour), height in zip(ends, heights, strict=True):
        axes.annotate(
            label,
            (at, value),
            (1.01, height),
            textcoords="axes fraction",
            color=colour,
            va="center",
            fontsize=10,
            annotation_clip=False,
        )


def space_apart(positions: Sequence[float], gap: float) -> list[float]:
    """Return the positions in the same order, moved as little as needed for neighbours to be `gap` apart.

    Positions that are too close form a group around their mean; groups that touch are merged.
    """
    order = sorted(range(len(positions)), key=positions.__getitem__)
    groups: list[list[int]] = []
    centres: list[float] = []
    for index in order:
        groups.append([index])
        centres.append(positions[index])
        while len(groups) > 1 and centres[-1] - centres[-2] < gap * (len(groups[-1]) + len(groups[-2])) / 2:
            last, before = groups.pop(), groups.pop()
            groups.append(before + last)
            centres[-2:] = [sum(positions[member] for member in groups[-1]) / len(groups[-1])]
    spaced = [0.0] * len(positions)
    for group, centre in zip(groups, centres, strict=True):
        for place, index in enumerate(group):
            spaced[index] = centre + gap * (place - (len(group) - 1) / 2)
    return spaced


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit for an axis that covers so many seconds, and the unit's length in seconds.

    Example:
        >>> time_unit(90.0), time_unit(7200.0)
        (('s', 1.0), ('min', 60.0))
    """
    for unit, scale, least in (("days", 86400.0, 4.0), ("h", 3600.0, 3.0), ("min", 60.0, 3.0)):
        if seconds >= least * scale:
            return unit, scale
    return "s", 1.0
