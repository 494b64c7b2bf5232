"""What charts are drawn on and with: style, panels, lines with names at their ends, files.

The only file that needs matplotlib. A chart is drawn on light paper, made to be read at about 1000 px width,
with colours that stay apart for colour-blind eyes (Okabe & Ito's set); what can be labelled directly is.
`Chart.inline_svg` gives the same chart for an HTML page whose style sheet says the colours, so that it
follows the reader's choice of light or dark.

Where marks of a chart go: smoothing and labels that keep apart. Pure functions over numbers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import StringIO
from itertools import accumulate
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
    "running_mean",
    "set_log_ticks",
    "space_apart",
    "stacked_panels",
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


_CSS_OF_COLOUR = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    _GRID: "var(--line)",
    PAPER: "var(--paper)",
} | {colour: f"var(--{phase})" for phase, colour in COLOUR_OF_PHASE.items()}


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


LineEnd = tuple[float, float, str, str]  # x, y, label and colour of a line's last point


@dataclass(frozen=True)
class ChartLine:
    """A named row of points ``(x, y)``; `faint` draws it as a reference, dashed and without markers."""

    label: str
    points: Sequence[tuple[float, float]]
    faint: bool = False


@dataclass(frozen=True)
class Chart:
    """A drawn chart."""

    figure: Figure

    def save(self, path: Path) -> Path:
        """Write the chart to `path`, whole, as PNG or SVG by its suffix, on white paper.

        Raises:
            UsageError: another suffix.
        """
        if path.suffix not in (".png", ".svg"):
            raise UsageError(f"can't draw to {path.name!r}", remedy="name a .png or .svg file")
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        with _style(path.stem):
            write_atomic(
                path,
                lambda beside: self.figure.savefig(beside, dpi=200, facecolor=PAPER, metadata=metadata),
            )
        return path

    def inline_svg(self, name: str) -> str:
        """Return the chart as an ``<svg>`` element for a page; `name` keeps its ids apart from other charts'.

        Ink, grid and phases take the colours of the style sheet's variables ``--ink``, ``--muted``,
        ``--line``, ``--forward`` … .
        """
        buffer = StringIO()
        with _style(name):
            self.figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        svg = buffer.getvalue()
        svg = svg[svg.index("<svg") :]
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        svg = re.sub(r'\bid="', f'id="{name}-', svg)
        svg = re.sub(r'(href="#|url\(#)', rf"\1{name}-", svg)
        svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
        svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
        for colour, css in _CSS_OF_COLOUR.items():
            svg = svg.replace(colour, css)
        return svg


def _style(salt: str) -> AbstractContextManager[object]:
    """Return the context in which everything is drawn and written; `salt` makes ids of an SVG repeatable."""
    return require_matplotlib().rc_context({**_STYLE, "svg.hashsalt": salt})


def in_paceline_style(draw: Callable[P, Chart]) -> Callable[P, Chart]:
    """Let `draw` work in Paceline's style, and leave the caller's own settings as they are."""

    @functools.wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> Chart:
        with _style(draw.__name__):
            return draw(*args, **kwargs)

    return styled


def stacked_panels(
    width: float, height: float, heights: Sequence[float] = (1.0,)
) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure of `width` × `height` inches with panels below each other, as high as `heights` say."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(h_pad=0.1))
    grid = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": list(heights)})
    return figure, list(grid[:, 0])


def set_log_ticks(axes: Axes, subs: Sequence[float]) -> None:
    """Put the ticks of a logarithmic vertical axis at these multiples of every power of ten."""
    from matplotlib.ticker import LogLocator

    axes.yaxis.set_major_locator(LogLocator(subs=subs))


def legend_patch(label: str, colour: str) -> Patch:
    """Return the sample of a colour for a legend."""
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def label_line_ends(axes: Axes, ends: Sequence[LineEnd], wide: bool) -> None:
    """Write each line's name at its right end, apart from each other; on a phone, in a legend above."""
    if not wide and ends:
        handles = [
            axes.plot([], [], color=colour, linewidth=2, label=label)[0] for _, _, label, colour in ends
        ]
        axes.legend(
            handles=handles, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, frameon=False, fontsize=9
        )
        return
    inches = axes.bbox.height / axes.figure.dpi  # about: the layout follows
    axes.autoscale_view()  # else limits are settled too late
    to_fraction = axes.transScale + axes.transLimits
    heights = space_apart([to_fraction.transform(end[:2])[1] for end in ends], gap=0.2 / inches)
    above = max(0.0, max(heights, default=0.0) - 1)  # what would stand beside the title
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


def running_mean(values: Sequence[float], reach: int) -> list[float]:
    """Return for each value the mean of it and up to `reach` values on each side.

    Near an end both sides reach as far as the shorter one, so that a slope stays where it is.
    """
    sums = [0.0, *accumulate(values)]
    reaches = [min(reach, at, len(values) - 1 - at) for at in range(len(values))]
    return [(sums[at + r + 1] - sums[at - r]) / (2 * r + 1) for at, r in enumerate(reaches)]


def space_apart(positions: Sequence[float], gap: float) -> list[float]:
    """Return the positions, moved as little as needed for neighbours to be `gap` apart, in the same order.

    Positions that are too close become a group around their mean; groups that touch become one.
    """
    order = sorted(range(len(positions)), key=positions.__getitem__)
    groups: list[list[int]] = []
    middle: list[float] = []
    for index in order:
        groups.append([index])
        middle.append(positions[index])
        while len(groups) > 1 and middle[-1] - middle[-2] < gap * (len(groups[-1]) + len(groups[-2])) / 2:
            last, before = groups.pop(), groups.pop()
            groups.append(before + last)
            middle[-2:] = [sum(positions[member] for member in groups[-1]) / len(groups[-1])]
    spaced = [0.0] * len(positions)
    for group, centre in zip(groups, middle, strict=True):
        for place, index in enumerate(group):
            spaced[index] = centre + gap * (place - (len(group) - 1) / 2)
    return spaced
