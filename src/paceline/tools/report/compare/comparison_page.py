"""HTML page that compares two runs: verdict, where the time goes, curves over each other, settings that differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, quantiles

from paceline._core.format import format_bytes, format_count, format_number, format_percent, format_seconds
from paceline.tools.report.compare.comparison_text import comparison_headline, difference
from paceline.tools.report.compare.run_comparison import (
    ComparedRun,
    SpeedRatio,
    differing_facts,
    mean_phases,
    read_pair,
    speed_ratio,
)
from paceline.tools.report.page.curve_chart import Curve, CurveChart
from paceline.tools.report.page.html_page import BarChart, PageTable, ReportPage, Tile, write_page
from paceline.tools.report.run.bottleneck import find_bottleneck
from paceline.tools.report.run.run_figures import (
    computing_shares,
    phase_bar,
    points_of,
    readable,
    timed_curve,
    wall_times,
)
from paceline.tools.report.run.run_records import LoggedStep
from paceline.tools.report.run.run_summary import RunSummary
from paceline.tools.report.run.run_tables import readable_value

__all__ = ["render_comparison", "write_comparison"]

_NUMBERS_SHOWN = 24


def write_comparison(first: Path, second: Path) -> Path:
    """Write the comparison atomically into the folder of the second run, as ``compare-FIRST.html``.

    Args:
        first: folder of the run to compare with.
        second: folder of the other run.

    Returns:
        The page's path.

    Raises:
        UsageError: a folder holds no run, the second is not writable, or the ``report`` extra is not installed.
    """
    one, other = read_pair(first, second)
    name = one.name.replace("/", "-")
    return write_page(second / f"compare-{name}.html", render_comparison(one, other))


def render_comparison(first: ComparedRun, second: ComparedRun) -> str:
    """Return the comparison of two runs as HTML."""
    speed = speed_ratio(first, second)
    notes = [f"{each.name}: {note}" for each in (first, second) for note in each.run.notes]
    if first.run.facts.get("parameters") != second.run.facts.get("parameters"):
        notes.append("The runs train models of different size.")
    return ReportPage(
        title=f"{second.name} compared with {first.name}",
        subtitle=" · ".join(f"{each.name}: {each.summary.steps} steps" for each in (first, second)),
        sentences=[*comparison_headline(first, second, speed), *_bottlenecks(first, second)],
        notes=notes,
        tiles=_tiles(first, second, speed),
        figures=_figures(first, second),
        tables=[*_settings(first, second), _results(first, second)],
    ).html()


def _bottlenecks(*runs: ComparedRun) -> list[str]:
    known = [each for each in runs if each.summary.ranks]
    return [f"{each.name}: {find_bottleneck(each.summary, each.run.facts).sentences[0]}" for each in known]


def _tiles(first: ComparedRun, second: ComparedRun, speed: SpeedRatio | None) -> list[Tile]:
    tiles = []
    if speed is not None:
        note = f"per {speed.per}; 95 %: {speed.low:.3g}× to {speed.high:.3g}× as fast"
        verdict = difference(speed.ratio) if speed.shown else "no difference shown"
        tiles.append(Tile("speed", verdict, note))
    for name, value_of, write in _RESULTS:
        values = [value_of(each.summary) for each in (first, second)]
        if name in _TILES and None not in values:
            old, new = (write(value) for value in values if value is not None)
            tiles.append(Tile(name, new, f"instead of {old}"))
    return tiles


# ---------------------------------------------------------------------- charts


def _figures(first: ComparedRun, second: ComparedRun) -> list[BarChart | CurveChart]:
    runs = (first, second)
    figures: list[BarChart | CurveChart] = []
    if all(each.summary.ranks for each in runs):
        figures.append(_phases(first, second))
    unit = next((each.summary.speed[1] for each in runs if each.summary.speed), "samples")
    charts = [
        _losses(runs),
        _overlaid(
            "Step time over the run",
            "Time of each step, without held-out losses and checkpoints.",
            "time of a step",
            [(each, each.summary.durations) for each in runs],
            number="seconds",
        ),
        _overlaid(
            "Speed",
            f"{unit.capitalize()} per second of all ranks together.",
            f"{unit}/s",
            [
                (each, points_of(each.run.steps[1:], lambda s: getattr(s, f"{unit}_per_second")))
                for each in runs
            ],
        ),
        _overlaid(
            "Utilisation",
            "Share of each step that the first recorded rank computed.",
            "% of the step",
            [(each, computing_shares(each.summary)) for each in runs],
            number="percent",
        ),
        *_numbers(runs),
    ]
    return [*figures, *(chart for chart in charts if chart is not None)]


def _phases(first: ComparedRun, second: ComparedRun) -> BarChart:
    one, other = mean_phases(first.summary), mean_phases(second.summary)
    rows = [["part", first.name, second.name, "difference"]]
    whole = {"step": (sum(one.values()), sum(other.values()))}
    for name, (old, new) in ({phase: (one[phase], other[phase]) for phase in one} | whole).items():
        sign = "−" if new < old else "+"
        change = f"{sign}{format_seconds(abs(new - old))}" if abs(new - old) >= 1e-6 else "0 s"
        rows.append([name, format_seconds(old), format_seconds(new), change])
    return BarChart(
        title="Where the time goes",
        caption="Mean time of a step by phase, mean of all ranks.",
        bars=[phase_bar(first.name, one), phase_bar(second.name, other)],
        table=PageTable(title="Time of a step by phase", table=rows),
        phases=True,
    )


def _losses(runs: Sequence[ComparedRun]) -> CurveChart | None:
    curves: list[Curve] = []
    for number, each in enumerate(runs):
        wall = wall_times(each.summary)
        training = points_of(each.run.steps, lambda step: step.loss)
        held_out = points_of(each.run.steps, lambda step: step.val_loss)
        if len(training) > 1:
            curves.append(timed_curve(f"{each.name}, training", training, wall, colour=number))
        if len(held_out) > 1:
            curves.append(
                timed_curve(
                    f"{each.name}, held out", held_out, wall, colour=number, style="dashed", smooth=False
                )
            )
    caption = "Losses as logged, over steps or wall time since the first step of each run."
    return CurveChart(title="Loss", caption=caption, unit="loss", curves=curves) if curves else None


def _overlaid(
    title: str,
    caption: str,
    unit: str,
    points: Sequence[tuple[ComparedRun, Sequence[tuple[float, float]]]],
    *,
    number: str = "plain",
    from_zero: bool = True,
) -> CurveChart | None:
    """Return a chart with one curve of each run; None if one has fewer than two points."""
    if any(len(each) < 2 for _, each in points):
        return None
    curves = [timed_curve(run.name, each, wall_times(run.summary)) for run, each in points]
    return CurveChart(
        title=title,
        caption=caption,
        unit=unit,
        curves=curves,
        number=number,  # type: ignore[arg-type]
        from_zero=from_zero,
    )


def _numbers(runs: Sequence[ComparedRun]) -> list[CurveChart | None]:
    """Return charts of other numbers that both runs logged."""
    names = [{name: None for step in each.run.steps for name in step.numbers} for each in runs]
    common = [name for name in names[0] if name in names[1]][:_NUMBERS_SHOWN]
    caption = "As logged: mean over all ranks, weighted by samples."
    charts = []
    for name in common:
        value_of: Callable[[LoggedStep], float | None] = lambda step, name=name: step.numbers.get(name)  # noqa: E731
        points = [(each, points_of(each.run.steps, value_of)) for each in runs]
        charts.append(_overlaid(readable(name), caption, readable(name), points, from_zero=False))
    return charts


# ---------------------------------------------------------------------- tables


def _settings(first: ComparedRun, second: ComparedRun) -> list[PageTable]:
    rows = [
        [readable(name.replace(".", ": ")), readable_value(one), readable_value(other)]
        for name, one, other in differing_facts(first.run, second.run)
    ]
    caption = "From run.json of both runs." if rows else "Nothing in run.json differs."
    head = ["setting", first.name, second.name]
    return [PageTable(title="What differs", table=[head, *rows], caption=caption, kind="texts")]


def _percentile(percent: int) -> Callable[[RunSummary], float | None]:
    def value_of(summary: RunSummary) -> float | None:
        seconds = [each for _, each in summary.durations]
        return quantiles(seconds, n=100, method="inclusive")[percent - 1] if len(seconds) >= 20 else None

    return value_of


def _exposed(summary: RunSummary) -> float | None:
    return summary.exposed_share


_RESULTS: list[tuple[str, Callable[[RunSummary], float | None], Callable[[float], str]]] = [
    ("step, median", lambda each: each.step_seconds, format_seconds),
    ("step, 90th percentile", _percentile(90), format_seconds),
    ("step, 99th percentile", _percentile(99), format_seconds),
    (
        "throughput",
        lambda each: each.speed[0] if each.speed else None,
        lambda value: f"{format_count(value)}/s",
    ),
    (
        "computing",
        lambda each: fmean(rank.computing for rank in each.ranks) if each.ranks else None,
        format_percent,
    ),
    ("waiting for communication", _exposed, format_percent),
    ("bytes per step", lambda each: each.nbytes, format_bytes),
    ("training loss, last tenth", lambda each: each.loss_last, format_number),
    ("held-out loss, last", lambda each: each.val_loss_last, format_number),
]
_TILES = {"step, median", "throughput", "computing", "waiting for communication", "held-out loss, last"}


def _results(first: ComparedRun, second: ComparedRun) -> PageTable:
    rows = []
    for name, value_of, write in _RESULTS:
        values = [value_of(each.summary) for each in (first, second)]
        if any(value is not None for value in values):
            rows.append([name, *("–" if value is None else write(value) for value in values)])
    return PageTable(title="Results", table=[["number", first.name, second.name], *rows])
