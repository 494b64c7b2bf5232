"""Charts of a run's page: step time by rank, and curves over steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from paceline._core.format import format_percent, format_seconds, plural
from paceline.tools.report.page.curve_chart import Curve, CurveChart
from paceline.tools.report.page.html_page import Bar, BarChart, BarPart, PageTable
from paceline.tools.report.run.rank_selection import RankSelection
from paceline.tools.report.run.restart_records import RecoveryRecord
from paceline.tools.report.run.run_records import LoggedStep, RecordedRun
from paceline.tools.report.run.run_summary import RankTime, RunSummary
from paceline.tools.report.run.step_breakdown import PHASES, step_parts

__all__ = [
    "computing_shares",
    "phase_bar",
    "points_of",
    "readable",
    "run_figures",
    "timed_curve",
    "wall_times",
]

_NUMBERS_SHOWN = 24
_STEPS_OF_A_WINDOW = 100  # of percentiles
_COMPUTING = ("forward", "backward", "optimizer")


def run_figures(
    run: RecordedRun, summary: RunSummary, selection: RankSelection
) -> list[BarChart | CurveChart]:
    """Return the charts of a run; those without data are omitted."""
    figures: list[BarChart | CurveChart] = []
    if summary.ranks:
        figures.append(step_time_by_rank(summary.ranks, selection))
    if len(run.steps) <= 1 and len(summary.durations) <= 1:
        return figures
    wall = wall_times(summary)
    unit = summary.speed[1] if summary.speed else ""
    later = run.steps[1:]  # the first step includes one-time costs
    speed = points_of(later, lambda step: getattr(step, f"{unit}_per_second", None))
    speed_caption = f"{unit.capitalize()} per second of all ranks together."
    charts = [
        loss_chart(run, wall),
        _one_curve("Speed", speed_caption, f"{unit}/s", speed, wall, from_zero=True),
        step_time_chart(summary, wall),
        utilisation_chart(run, summary, wall),
        *_logged_numbers(run, wall),
    ]
    marks = _recovery_marks(run, wall)
    return [*figures, *(replace(chart, marks=marks) for chart in charts if chart is not None)]


def _recovery_marks(run: RecordedRun, wall: Mapping[int, float]) -> list[tuple[float, str, float]]:
    """Return the marks of live recoveries: before their step, with the number of ranks from then on."""
    ranks_at = {each.step + 0.5: len(each.members) for each in run.live if isinstance(each, RecoveryRecord)}
    steps = sorted(ranks_at)
    seconds = np.interp(steps, list(wall), list(wall.values())).tolist() if wall else steps
    return [(step, plural(ranks_at[step], "rank"), at) for step, at in zip(steps, seconds, strict=True)]


def step_time_by_rank(ranks: Sequence[RankTime], selection: RankSelection) -> BarChart:
    """Return the bars of step time by phase, one per rank, worst first."""
    time_of_rank = {each.rank: each for each in ranks}
    bars, rows = [], []
    for rank in selection.ranks:
        time = time_of_rank[rank]
        bars.append(phase_bar(selection.label(rank), time.seconds))
        shares = (format_percent(time.share(phase)) for phase in PHASES)
        rows.append([str(rank), *shares, format_percent(time.computing), format_seconds(time.total)])
    caption = (
        "Mean time of a step on each rank. Exposed: communication not hidden by computing. "
        f"{selection.caption()}"
    )
    choose = selection.rows() if len(selection.ranks) > len(selection.shown) else ()
    head = ["rank", *PHASES, "computing", "step"]
    table = PageTable(title="Step time by rank", table=[head, *rows], ranks=choose)
    return BarChart(
        title="Step time", caption=caption.strip(), bars=bars, table=table, phases=True, ranks=choose
    )


def phase_bar(label: str, seconds: Mapping[str, float]) -> Bar:
    """Return the bar of a step's seconds by phase."""
    parts = [
        BarPart(seconds[phase], phase, f"{phase}: {format_seconds(seconds[phase])}")
        for phase in PHASES
        if seconds[phase] > 0
    ]
    return Bar(label, parts, format_seconds(sum(seconds.values())))


def wall_times(summary: RunSummary) -> dict[int, float]:
    """Return the end of each recorded step (from 1) in seconds since the first one began; empty without a trace."""
    timeline = next((each for each in summary.timelines.values() if each.steps), None)
    if timeline is None:
        return {}
    begin = timeline.steps[0].start
    return {line.step + 1: line.end - begin for line in timeline.steps}


def timed_curve(
    name: str, points: Sequence[tuple[float, float]], wall: Mapping[int, float], **options: object
) -> Curve:
    """Return a curve over steps with the wall time of each point, interpolated where a step was not recorded."""
    seconds: list[float] = []
    if wall:
        at = np.interp([step for step, _ in points], list(wall), list(wall.values()))
        seconds = at.tolist()
    return Curve(name=name, points=points, seconds=seconds, **options)  # type: ignore[arg-type]


def loss_chart(run: RecordedRun, wall: Mapping[int, float]) -> CurveChart | None:
    """Return the chart of training and held-out loss; None if no loss was logged."""
    training = points_of(run.steps, lambda step: step.loss)
    held_out = points_of(run.steps, lambda step: step.val_loss)
    if len(training) < 2:
        return None
    curves = [timed_curve("training", training, wall)]
    if held_out:
        curves.append(timed_curve("held out", held_out, wall, smooth=False))
    caption, unit = "Loss of the training batches as logged.", "loss"
    if "model" in run.facts:  # the reference model
        caption = "Cross-entropy of the training batches" + (" and of held-out text." if held_out else ".")
        unit = "loss (nats per token)"
    return CurveChart(title="Loss", caption=caption, unit=unit, curves=curves)


def step_time_chart(summary: RunSummary, wall: Mapping[int, float]) -> CurveChart | None:
    """Return the chart of step time over the run, with percentiles of windows if there are enough steps."""
    durations = summary.durations
    if len(durations) < 2:
        return None
    curves = [timed_curve("step", durations, wall)]
    caption = "Time of each step, without held-out losses and checkpoints."
    size = max(_STEPS_OF_A_WINDOW, -(-len(durations) // 200))
    if len(durations) >= 2 * size:
        percentiles: dict[int, list[tuple[float, float]]] = {50: [], 90: [], 99: []}
        for begin in range(0, len(durations) - size + 1, size):
            window = durations[begin : begin + size]
            values = np.percentile([seconds for _, seconds in window], list(percentiles))
            for points, value in zip(percentiles.values(), values.tolist(), strict=True):
                points.append((window[size // 2][0], value))
        curves[0] = timed_curve("step", durations, wall, style="faint")
        curves += [
            timed_curve(f"p{name}", points, wall, smooth=False) for name, points in percentiles.items()
        ]
        caption += f" Percentiles over {size} steps each: p99 is exceeded by one step in a hundred."
    return CurveChart(
        title="Step time over the run",
        caption=caption,
        unit="time of a step",
        curves=curves,
        number="seconds",
        from_zero=True,
    )


def utilisation_chart(run: RecordedRun, summary: RunSummary, wall: Mapping[int, float]) -> CurveChart | None:
    """Return the chart of the shares of a step that a rank computes and waits for communication."""
    exposed = points_of(
        run.steps[1:], lambda step: None if step.exposed_share is None else 100 * step.exposed_share
    )
    curves = []
    if computing := computing_shares(summary):
        curves.append(timed_curve("computing", computing, wall))
    if len(exposed) > 1:
        curves.append(timed_curve("exposed communication", exposed, wall, colour=1))
    if not curves:
        return None
    return CurveChart(
        title="Utilisation" if computing else "Exposed communication",
        caption="Share of each step that rank 0 computed (forward, backward, optimizer), and that it waited for "
        "communication.",
        unit="% of the step",
        curves=curves,
        number="percent",
        from_zero=True,
    )


def computing_shares(summary: RunSummary) -> list[tuple[float, float]]:
    """Return (step, per cent of the step spent in forward, backward and optimizer) of the first recorded rank."""
    timeline = next((each for each in summary.timelines.values() if each.steps), None)
    shares = []
    for line in () if timeline is None else timeline.warm:
        parts = step_parts(line)
        whole = line.seconds - parts["between"]
        if whole > 0:
            shares.append((line.step + 1.0, 100 * sum(parts[each] for each in _COMPUTING) / whole))
    return shares


def _logged_numbers(run: RecordedRun, wall: Mapping[int, float]) -> list[CurveChart | None]:
    """Return curves of other logged numbers, of the first names."""
    names = list(dict.fromkeys(name for step in run.steps for name in step.numbers))
    caption = "As logged: mean over all ranks, weighted by samples."
    charts = []
    for name in names[:_NUMBERS_SHOWN]:
        points = [(float(step.step), step.numbers[name]) for step in run.steps if name in step.numbers]
        more = len(names) - _NUMBERS_SHOWN
        last = name == names[:_NUMBERS_SHOWN][-1] and more > 0
        text = f"{caption} {more} more logged numbers are in steps.jsonl." if last else caption
        charts.append(_one_curve(readable(name), text, readable(name), points, wall))
    return charts


def _one_curve(
    title: str,
    caption: str,
    unit: str,
    points: Sequence[tuple[float, float]],
    wall: Mapping[int, float],
    *,
    from_zero: bool = False,
) -> CurveChart | None:
    """Return a chart of one curve; None with fewer than two points."""
    if len(points) < 2:
        return None
    curves = [timed_curve("", points, wall)]
    return CurveChart(title=title, caption=caption, unit=unit, curves=curves, from_zero=from_zero)


def points_of(
    steps: Iterable[LoggedStep], value_of: Callable[[LoggedStep], float | None]
) -> list[tuple[float, float]]:
    """Return (step, value) of the steps that have the value."""
    values = ((float(step.step), value_of(step)) for step in steps)
    return [(number, value) for number, value in values if value is not None]


def readable(name: object) -> str:
    """Return a name with spaces instead of underscores."""
    return str(name).replace("_", " ")
