"""Charts of an asynchronous run: scores, contributions of workers, staleness and traffic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from paceline._core.format import format_percent, plural
from paceline.async_dp.hub.membership import StalenessHistogram
from paceline.tools.report.hub.downsample import DownsampledCurve, Point
from paceline.tools.report.hub.hub_downtime import HubDowntime
from paceline.tools.report.hub.hub_records import HubRun
from paceline.tools.report.hub.hub_summary import ContributionRow
from paceline.tools.report.hub.hub_text import scores_caption, staleness_caption, traffic_caption
from paceline.tools.report.page.curve_chart import Curve, CurveChart
from paceline.tools.report.page.html_page import Bar, BarChart, BarPart, PageTable

__all__ = ["break_at", "contribution_chart", "score_chart", "staleness_chart", "traffic_chart"]

_WORKERS_SHOWN = 20
_MAX_COLOURED = 5  # workers up to which each has a colour; more are drawn faintly
_LOG_FROM = 30.0  # largest value / median from which an axis is logarithmic


@dataclass(frozen=True)
class _Worker:
    """The curve of a worker's scores."""

    name: str
    points: Sequence[Point]


def score_chart(run: HubRun) -> CurveChart | None:
    """Return the chart of scores over wall time, or of training losses if there are none; None without either."""
    losses = not run.global_scores.count and not run.scores
    workers = _workers(run, run.losses if losses else run.scores)
    whole = _since(run, run.global_scores.points())
    if not workers and not whole:
        return None
    down = _downtimes(run)
    curves = []
    if whole:
        curves.append(Curve(name="global model", points=break_at(whole, down), colour=0))
    few = len(workers) <= _MAX_COLOURED
    for number, each in enumerate(workers):
        curves.append(
            Curve(
                name=each.name,
                points=break_at(each.points, down),
                colour=1 + number % 5,
                style="line" if few and not whole else "faint",
            )
        )
    replaced = [(each.at, each.score) for each in run.replacements if each.score is not None]
    if replaced and not losses:
        curves.append(
            Curve(name="replaced by the best", points=_since(run, replaced), style="crosses", smooth=False)
        )
    values = [value for _, value in [*whole, *(point for each in workers for point in each.points)]]
    return CurveChart(
        title="Training loss" if losses else "Score",
        caption=scores_caption(run, len(workers), losses=losses),
        unit="training loss" if losses else "score",
        curves=curves,
        x="time",
        log=bool(values) and min(values) > 0 and max(values) > _LOG_FROM * median(values),
        away=[(each.since, each.until) for each in down],
        marks=[] if run.merged_at is None else [(run.merged_at - run.begin, "all adopt the best")],
    )


def _workers(run: HubRun, curves: dict[int, DownsampledCurve]) -> list[_Worker]:
    """Return the curves of the workers with the largest contributions."""
    names = run.workers.names()
    ranked = [each.number for each in run.workers.ranked() if each.number in curves][:_WORKERS_SHOWN]
    return [_Worker(names[each], _since(run, curves[each].points())) for each in ranked]


def contribution_chart(rows: Sequence[ContributionRow], caption: str, table: PageTable) -> BarChart:
    """Return the bars of workers' shares, largest first."""
    bars = [
        Bar(row.name, [BarPart(row.share, "muted" if row.worker.count > 1 else "c0")], _remark(row))
        for row in rows
    ]
    return BarChart(title="Contributions", caption=caption, bars=bars, table=table)


def _remark(row: ContributionRow) -> str:
    refused = sum(row.worker.refused.values())
    return format_percent(row.share) + (f", {refused:,} refused" if refused else "")


def staleness_chart(run: HubRun) -> BarChart:
    """Return the histogram of staleness in rounds, with empty bars up to the last non-empty one."""
    rows = _with_empty(run.staleness_bars.rows())
    whole = sum(count for _, _, count in rows) or 1
    bars = [
        Bar(
            f"{begin:g}–{end:g}" if math.isfinite(end) else f"≥ {begin:g}",
            [BarPart(float(count), "c0")],
            f"{format_percent(count / whole)}, {plural(count, 'update')}",
        )
        for begin, end, count in rows
    ]
    return BarChart(title="Staleness", caption=f"Rounds. {staleness_caption(run)}", bars=bars)


def _with_empty(rows: Sequence[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    counts, last = {row[0]: row[2] for row in rows}, rows[-1][0]
    return [
        (begin, end, counts.get(begin, 0))
        for begin, end in pairwise(StalenessHistogram.EDGES)
        if begin <= last
    ]


def traffic_chart(run: HubRun) -> CurveChart:
    """Return the chart of bytes per second over wall time, with the reserved rate dashed."""
    down, traffic = _downtimes(run), run.traffic
    curves = [
        Curve(name="in", points=break_at(_since(run, traffic.received_rates.points()), down)),
        Curve(name="out", points=break_at(_since(run, traffic.sent_rates.points()), down)),
    ]
    reserved: list[Point] = []
    for each in traffic.reserved:
        begin, end = each.begin - run.begin, each.end - run.begin
        reserved += [(begin, each.rate), (end, each.rate), (end, math.nan)]
    if reserved:
        curves.append(Curve(name="reserved", points=reserved, style="dashed", colour=2, smooth=False))
    return CurveChart(
        title="Network",
        caption=traffic_caption(run),
        unit="bytes per second",
        curves=curves,
        x="time",
        number="bytes/s",
        from_zero=True,
        away=[(each.since, each.until) for each in down],
    )


def break_at(points: Iterable[Point], downtimes: Sequence[HubDowntime]) -> list[Point]:
    """Return the points of a curve with a gap at each downtime of the hub.

    Example:
        >>> break_at([(0.0, 1.0), (9.0, 2.0)], [HubDowntime(3.0, 5.0)])
        [(0.0, 1.0), (5.0, nan), (9.0, 2.0)]
    """
    broken: list[Point] = []
    gaps = [each.until for each in downtimes]
    passed = 0
    for x, value in points:
        while passed < len(gaps) and gaps[passed] <= x:
            if broken:
                broken.append((gaps[passed], math.nan))
            passed += 1
        broken.append((x, value))
    return broken


def _since(run: HubRun, points: Iterable[Point]) -> list[Point]:
    """Return points over seconds since the beginning."""
    return [(at - run.begin, value) for at, value in points]


def _downtimes(run: HubRun) -> list[HubDowntime]:
    return [HubDowntime(each.since - run.begin, each.until - run.begin) for each in run.downtime.downtimes]
