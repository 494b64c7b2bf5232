"""Charts: a curve over steps, where the time of a step goes, time against the size of a bucket or a message.

The only file that needs matplotlib. A chart is drawn on light paper, made to be read at about 1000 px width,
with colours that stay apart for colour-blind eyes (Okabe & Ito's set); what can be labelled directly is.
`Chart.inline_svg` gives the same chart for an HTML page whose style sheet says the colours, so that it
follows the reader's choice of light or dark.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from paceline.errors import UsageError
from paceline.report.layout import running_mean, spread
from paceline.units import format_count, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

__all__ = [
    "COLOUR_OF_PHASE",
    "Bar",
    "Chart",
    "Line",
    "against_size",
    "breakdown",
    "bucket_curve",
    "curve",
    "require_matplotlib",
]

_INK, _MUTED, _GRID, _PAPER = "#1f2430", "#5c6370", "#e4e7eb", "#fefefe"
COLOUR_OF_PHASE = {
    "data": "#cc79a7",
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "exposed": "#d55e00",
    "optimizer": "#009e73",
    "other": "#a0a6b0",
}
_NAME_OF_PHASE = {"backward": "backward (computing)", "exposed": "exposed communication"}
_LIGHT_PHASES = {"forward", "data", "other"}  # too light for white numbers
_COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]
_MARKERS = "osD^vP"
_CSS_OF_COLOUR = {
    _INK: "var(--ink)",
    _MUTED: "var(--muted)",
    _GRID: "var(--line)",
    _PAPER: "var(--paper)",
} | {colour: f"var(--{phase})" for phase, colour in COLOUR_OF_PHASE.items()}
_STYLE: dict[str, Any] = {
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 11,
    "axes.edgecolor": _MUTED,
    "axes.labelcolor": _MUTED,
    "axes.titlecolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": _INK,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "grid.color": _GRID,
    "svg.fonttype": "none",
}


P = ParamSpec("P")
_End = tuple[float, float, str, str]  # x, y, label and colour of a line's last point


@dataclass(frozen=True)
class Bar:
    """One stacked bar: `milliseconds_of_phase` in drawing order, and a remark that follows its total."""

    label: str
    milliseconds_of_phase: Mapping[str, float]
    remark: str = ""

    @property
    def total(self) -> float:
        """Milliseconds of all phases."""
        return sum(self.milliseconds_of_phase.values())


@dataclass(frozen=True)
class Line:
    """A named row of points ``(x, y)``; `faint` draws it as a reference, dashed and without markers."""

    label: str
    points: Sequence[tuple[float, float]]
    faint: bool = False


@dataclass(frozen=True)
class Chart:
    """A drawn chart."""

    figure: Figure

    def save(self, path: Path) -> Path:
        """Write the chart to `path`, as PNG or SVG by its suffix, on white paper.

        Raises:
            UsageError: another suffix.
        """
        if path.suffix not in (".png", ".svg"):
            raise UsageError(f"can't draw to {path.name!r}", remedy="name a .png or .svg file")
        path.parent.mkdir(parents=True, exist_ok=True)
        with _style(path.stem):
            self.figure.savefig(
                path, dpi=200, facecolor=_PAPER, metadata={"Date": None} if path.suffix == ".svg" else None
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
    return _matplotlib().rc_context({**_STYLE, "svg.hashsalt": salt})


def require_matplotlib() -> None:
    """Raise if nothing can be drawn.

    Raises:
        UsageError: matplotlib is not installed.
    """
    _matplotlib()


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError(
            "charts need matplotlib, which is not installed", remedy="pip install 'paceline[report]'"
        ) from error
    return matplotlib


def _drawn(draw: Callable[P, Chart]) -> Callable[P, Chart]:
    """Let `draw` work in Paceline's style, and leave the caller's own settings as they are."""

    @functools.wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> Chart:
        with _style(draw.__name__):
            return draw(*args, **kwargs)

    return styled


@_drawn
def curve(lines: Sequence[Line], *, x: str, y: str, wide: bool = True, from_zero: bool = False) -> Chart:
    """Return lines over steps, each named at its end; long ones as their running mean over the faint values.

    Args:
        lines: one per series; values that are not finite are left out.
        x: label of the horizontal axis, with its unit.
        y: label of the vertical axis, with its unit.
        wide: for a page of a desk, rather than for a phone.
        from_zero: begin the vertical axis at zero, and draw less high.
    """
    figure, (axes,) = _panels(width=10 if wide else 4.2, height=2.3 if from_zero else 3.5 if wide else 3.0)
    ends: list[_End] = []
    for line, colour in zip(lines, _COLOURS, strict=False):
        points = [(at, value) for at, value in line.points if math.isfinite(value)]
        if not points:
            continue
        steps, values = [at for at, _ in points], [value for _, value in points]
        if len(points) > 60:
            axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
            values = running_mean(values, len(values) // 80)
        few = len(points) < 25
        axes.plot(steps, values, color=colour, linewidth=2, marker="o" if few else "", markersize=4)
        ends.append((steps[-1], values[-1], line.label, colour))
    axes.set(xlabel=x, ylabel=y)
    axes.grid(axis="y")
    if from_zero:
        axes.set_ylim(0, 1.05 * max(axes.get_ylim()[1], 1e-9))
    if axes.get_ylim()[1] >= 10_000:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _name_lines(axes, [end for end in ends if end[2]], wide)
    return Chart(figure)


@_drawn
def breakdown(panels: Mapping[str, Sequence[Bar]], *, wide: bool = True) -> Chart:
    """Return where the time of a step goes: one stacked horizontal bar per entry, one panel per title.

    Args:
        panels: for each title its bars from top to bottom; an empty title is not written.
        wide: for a page of a desk, rather than for a phone.
    """
    heights = [0.36 * len(bars) + 0.5 for bars in panels.values()]
    figure, all_axes = _panels(
        width=10 if wide else 4.2, height=sum(heights) + (0.75 if wide else 1.3), heights=heights
    )
    every = [bar.milliseconds_of_phase for bars in panels.values() for bar in bars]
    phases = [phase for phase in COLOUR_OF_PHASE if any(parts.get(phase, 0.0) > 0 for parts in every)]
    for axes, (title, bars) in zip(all_axes, panels.items(), strict=True):
        _stack(axes, bars, phases, wide)
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    all_axes[-1].set_xlabel("milliseconds of one step")
    handles = [_swatch(phase) for phase in phases]
    columns = len(phases) if wide else 2
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=columns,
        fontsize=11 if wide else 9,
        frameon=False,
        handlelength=1,
        borderpad=0,
    )
    return Chart(figure)


@_drawn
def bucket_curve(panels: Mapping[str, Sequence[Line]]) -> Chart:
    """Return the time of a step against the bucket size, on a logarithmic axis, one panel per title.

    Args:
        panels: for each title its lines; points are (MiB, milliseconds) with MiB above 0.
    """
    figure, all_axes = _panels(width=10, height=3.3 * len(panels), heights=[1.0] * len(panels))
    for axes, (title, lines) in zip(all_axes, panels.items(), strict=True):
        ends: list[_End] = []
        looks = zip(_COLOURS * 2, _MARKERS * 2, strict=True)
        for line in lines:
            colour, marker = (_MUTED, "") if line.faint else next(looks)
            sizes, times = [size for size, _ in line.points], [time for _, time in line.points]
            style, width = ("--", 1.3) if line.faint else ("-", 2)
            axes.plot(sizes, times, style, color=colour, marker=marker, markersize=5, linewidth=width)
            ends.append((sizes[-1], times[-1], line.label, colour))
        _bucket_axis(axes, [size for line in lines for size, _ in line.points])
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
        axes.set(xlabel="bucket size (MiB)", ylabel="milliseconds of one step")
        axes.grid(axis="y")
        _name_lines(axes, ends, wide=True)
    return Chart(figure)


@_drawn
def against_size(times: Sequence[Line], ratios: Sequence[Line], *, title: str, ratio: str) -> Chart:
    """Return what a call takes by the size of its message, and below how many times faster than another one it is.

    All axes are logarithmic. A line has the same colour in both panels, found by its label.

    Args:
        times: points are (bytes, seconds).
        ratios: points are (bytes, times faster).
        title: what is measured, on what.
        ratio: label of the lower axis.
    """
    from matplotlib.ticker import LogLocator

    figure, (above, below) = _panels(width=10, height=7.2, heights=(1.8, 1.0))
    looks = dict(zip([line.label for line in times], zip(_COLOURS, _MARKERS, strict=True), strict=False))
    below.axhline(1.0, color=_MUTED, linewidth=1)
    for axes, lines in ((above, times), (below, ratios)):
        axes.set(xscale="log", yscale="log")
        ends: list[_End] = []
        for line in lines:
            colour, marker = (_MUTED, "") if line.faint else looks[line.label]
            style, width = ("--", 1.3) if line.faint else ("-", 2)
            sizes, values = zip(*line.points, strict=True)
            axes.plot(sizes, values, style, color=colour, marker=marker, markersize=5, linewidth=width)
            ends.append((sizes[-1], values[-1], line.label, colour))
        axes.xaxis.set_major_formatter(lambda nbytes, _: f"{format_count(nbytes)}B")
        axes.minorticks_off()
        axes.grid(axis="y")
        _name_lines(axes, ends, wide=True)
    above.yaxis.set_major_formatter(lambda seconds, _: format_seconds(seconds))
    above.set_title(title, loc="left", fontsize=11, fontweight="bold")
    low, high = below.get_ylim()
    below.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 5 * low else (1, 1.2, 1.5, 2, 3, 5)))
    below.yaxis.set_major_formatter(lambda times, _: f"{times:g}×")
    below.set(xlabel="bytes", ylabel=ratio)
    return Chart(figure)


def _panels(width: float, height: float, heights: Sequence[float] = (1.0,)) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure of `width` × `height` inches with panels below each other, as high as `heights` say."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(h_pad=0.1))
    grid = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": list(heights)})
    return figure, list(grid[:, 0])


def _stack(axes: Axes, bars: Sequence[Bar], phases: Sequence[str], wide: bool) -> None:
    """Draw the bars of one panel, with times inside of the parts that have room and totals behind them."""
    longest = max((bar.total for bar in bars), default=0.0) or 1.0
    room = 0.055 if wide else 0.14  # share of the longest bar that a number needs
    left = [0.0] * len(bars)
    for phase in phases:
        times = [bar.milliseconds_of_phase.get(phase, 0.0) for bar in bars]
        colour = COLOUR_OF_PHASE[phase]
        axes.barh(
            range(len(bars)), times, left=left, color=colour, height=0.72, edgecolor=_PAPER, linewidth=0.6
        )
        for row, time in enumerate(times):
            if time > room * longest:
                text, at = _short(time), left[row] + time / 2
                ink = "#10131a" if phase in _LIGHT_PHASES else "#ffffff"
                axes.text(at, row, text, ha="center", va="center", color=ink, fontsize=9)
        left = [start + time for start, time in zip(left, times, strict=True)]
    for row, bar in enumerate(bars):
        text = f"{_short(bar.total)} ms" + (f"  {bar.remark}" if bar.remark else "")
        axes.annotate(text, (bar.total, row), (5, 0), textcoords="offset points", va="center", fontsize=10)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.tick_params(axis="y", length=0, labelcolor=_INK)
    axes.set_xlim(0, longest * 1.02)
    axes.spines["left"].set_visible(False)
    axes.invert_yaxis()


def _short(milliseconds: float) -> str:
    return f"{milliseconds:.0f}" if milliseconds >= 99.5 else f"{milliseconds:.3g}"


def _swatch(phase: str) -> Patch:
    from matplotlib.patches import Patch

    return Patch(color=COLOUR_OF_PHASE[phase], label=_NAME_OF_PHASE.get(phase, phase))


def _name_lines(axes: Axes, ends: Sequence[_End], wide: bool) -> None:
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
    heights = spread([to_fraction.transform(end[:2])[1] for end in ends], gap=0.2 / inches)
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


def _bucket_axis(axes: Axes, sizes: Sequence[float]) -> None:
    ticks = sorted(set(sizes))
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{size:.3g}" for size in ticks])
    axes.minorticks_off()
