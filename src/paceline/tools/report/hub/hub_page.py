"""HTML report of an asynchronous run, from its hub's folder: contributions, staleness, scores, traffic, decisions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from paceline._core.format import (
    format_count,
    format_decimal,
    format_number,
    format_percent,
    format_seconds,
    plural,
)
from paceline.async_dp.hub.membership import StalenessHistogram
from paceline.tools.report.charts.chart_style import Chart, ChartLine
from paceline.tools.report.html_page import (
    PageFigure,
    PageTable,
    ReportPage,
    Tile,
    responsive_figure,
    write_page,
)
from paceline.tools.report.hub.bounded_decision_log import HUB_ITSELF, HubDecision
from paceline.tools.report.hub.downsample import DownsampledCurve, Point
from paceline.tools.report.hub.hub_charts import (
    ScoreCurves,
    ShareBar,
    contribution_chart,
    ignore_missing_glyphs,
    score_chart,
    staleness_histogram,
    traffic_chart,
)
from paceline.tools.report.hub.hub_downtime import HubDowntime
from paceline.tools.report.hub.hub_records import HubRun, read_hub_run
from paceline.tools.report.hub.hub_summary import ContributionRow, contribution_rows, ddp_nbytes, local_steps
from paceline.tools.report.hub.hub_text import (
    contributions_caption,
    decisions_caption,
    format_refusals,
    hub_headline,
    scores_caption,
    staleness_caption,
    traffic_caption,
)
from paceline.tools.report.hub.hub_traffic import ReservedRate
from paceline.tools.report.hub.worker_statistics import WorkerStatistics

__all__ = ["render_hub_page", "write_hub_report"]

_WORKERS_SHOWN = 20


def write_hub_report(folder: Path) -> Path:
    """Write ``report.html`` atomically into a hub's folder and return its path.

    Raises:
        UsageError: the folder is not writable or was written by a newer version of Paceline, or the ``report`` extra
            is not installed.
    """
    return write_page(folder, render_hub_page(read_hub_run(folder)))


def render_hub_page(run: HubRun) -> str:
    """Return the report of `run` as HTML.

    Raises:
        UsageError: the ``report`` extra is not installed.
    """
    rows = contribution_rows(run, _WORKERS_SHOWN)
    with ignore_missing_glyphs():
        figures = _figures(run, rows)
    return ReportPage(
        title=f"Asynchronous run {run.name or run.folder.resolve().name}",
        subtitle=_subtitle(run),
        notes=run.notes,
        sentences=hub_headline(run, rows),
        tiles=_tiles(run),
        figures=figures,
        tables=_decisions(run),
        groups=_groups(run),
    ).html()


def _subtitle(run: HubRun) -> str:
    parts = [plural(len(run.workers), "worker")]
    if run.parameters is not None:
        parts.append(f"{format_count(run.parameters)} parameters")
    if run.records:
        parts += [plural(run.updates, "update"), f"from {_clock(run.begin)} UTC"]
    return " · ".join(parts)


# ---------------------------------------------------------------------- numbers


def _tiles(run: HubRun) -> list[Tile]:
    if not run.records:
        return []
    at_a_time = f"at most {run.max_present} at a time" if run.max_present else "none was present"
    refused = f"accepted; {format_count(sum(run.refused.values()))} refused"
    tiles = [
        Tile("time", format_seconds(run.seconds), "from the first to the last record"),
        Tile("workers", f"{len(run.workers):,}", at_a_time),
        Tile("updates", format_count(run.updates), refused),
    ]
    if run.updates:
        steps = f"in {format_count(local_steps(run))} local steps"
        tiles.append(Tile("samples", format_count(run.samples), steps))
        worst = f"rounds, median; maximum {run.staleness.largest:.3g}"
        tiles.append(Tile("staleness", f"{run.staleness.median or 0:.2g}", worst))
    if run.traffic.record_count:
        tiles.append(Tile("bytes in", format_decimal(run.traffic.received), "from workers"))
        tiles.append(Tile("bytes out", format_decimal(run.traffic.sent), "to workers"))
    ddp = ddp_nbytes(run)
    if ddp is not None:
        tiles.append(Tile("torch DDP", format_decimal(ddp), "would have sent for the same steps"))
    if run.first_score is not None and run.last_score is not None:
        first = f"from {format_number(run.first_score.score)}"
        tiles.append(Tile("global model's score", format_number(run.last_score.score), first))
    return tiles


# ---------------------------------------------------------------------- charts


def _figures(run: HubRun, rows: Sequence[ContributionRow]) -> list[PageFigure]:
    figures = [_scores(run)]
    if run.updates or run.refused:
        figures.append(_contributions(run, rows))
    if run.updates:
        bars = _bars(run.staleness_bars.rows())
        figures.append(
            responsive_figure(
                "Staleness",
                staleness_caption(run),
                "ages",
                lambda wide: staleness_histogram(bars, wide=wide),
            )
        )
    if run.traffic.record_count > 1:
        figures.append(_traffic(run))
    return [figure for figure in figures if figure is not None]


def _scores(run: HubRun) -> PageFigure | None:
    losses = not run.global_scores.count and not run.scores
    lines = _lines(run, run.losses if losses else run.scores)
    if not lines and not run.global_scores.count:
        return None
    replacements = [(each.at, each.score) for each in run.replacements if each.score is not None]
    curves = ScoreCurves(
        _since(run, run.global_scores.points()),
        lines,
        None if run.merged_at is None else run.merged_at - run.begin,
        [] if losses else _since(run, replacements),
        _downtimes(run),
    )

    def draw(wide: bool) -> Chart:
        return score_chart(curves, run.seconds, y="training loss" if losses else "score", wide=wide)

    title = "Training loss" if losses else "Score"
    return responsive_figure(title, scores_caption(run, len(lines), losses=losses), "scores", draw)


def _lines(run: HubRun, curves: dict[int, DownsampledCurve]) -> list[ChartLine]:
    """Return the curves of the workers with the largest contributions."""
    names = run.workers.names()
    ranked = [each.number for each in run.workers.ranked() if each.number in curves][:_WORKERS_SHOWN]
    return [ChartLine(names[each], _since(run, curves[each].points())) for each in ranked]


def _contributions(run: HubRun, rows: Sequence[ContributionRow]) -> PageFigure:
    head = [
        "worker",
        "updates",
        "samples",
        "share",
        "weight",
        "stale, median",
        "largest",
        "steps/s",
        "present",
        "refused",
    ]
    table = [head, *(_cells(row) for row in rows)]

    def draw(wide: bool) -> Chart:
        bars = [ShareBar(row.name, row.share, _remark(row, wide), row.worker.count > 1) for row in rows]
        return contribution_chart(bars, wide=wide)

    return responsive_figure(
        "Contributions", contributions_caption(run, rows), "gave", draw, table, wrap_last=True
    )


def _remark(row: ContributionRow, wide: bool) -> str:
    text, refused = format_percent(row.share), sum(row.worker.refused.values())
    if wide:
        text += f", {plural(row.worker.updates, 'update')}"
    return text + (f", {refused:,} refused" if refused else "")


def _cells(row: ContributionRow) -> list[str]:
    worker = row.worker
    median = worker.staleness.median
    return [
        row.name,
        f"{worker.updates:,}",
        format_count(worker.samples),
        format_percent(row.share),
        format_percent(row.weight),
        "–" if median is None else f"{median:.2g}",
        "–" if median is None else f"{worker.staleness.largest:.3g}",
        "–" if worker.speed is None or worker.count > 1 else f"{worker.speed:.3g}",
        _present(worker),
        format_refusals(worker.refused) or "–",
    ]


def _present(worker: WorkerStatistics) -> str:
    if not worker.present_seconds:
        return "–"
    mean = worker.present_seconds / worker.count
    return format_seconds(mean) if worker.count == 1 else f"{format_seconds(mean)} each"


def _traffic(run: HubRun) -> PageFigure:
    traffic, begin = run.traffic, run.begin
    received, sent = _since(run, traffic.received_rates.points()), _since(run, traffic.sent_rates.points())
    reserved = [ReservedRate(each.begin - begin, each.end - begin, each.rate) for each in traffic.reserved]

    def draw(wide: bool) -> Chart:
        return traffic_chart(received, sent, reserved, _downtimes(run), run.seconds, wide=wide)

    return responsive_figure("Network", traffic_caption(run), "traffic", draw)


def _bars(rows: Sequence[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """Return the bars of a histogram including empty ones, up to the last non-empty bar."""
    counts, last = {row[0]: row[2] for row in rows}, rows[-1][0]
    edges = zip(StalenessHistogram.EDGES, StalenessHistogram.EDGES[1:], strict=False)
    return [(begin, end, counts.get(begin, 0)) for begin, end in edges if begin <= last]


def _since(run: HubRun, points: Iterable[Point]) -> list[Point]:
    """Return points over seconds since the beginning."""
    return [(at - run.begin, value) for at, value in points]


def _downtimes(run: HubRun) -> list[HubDowntime]:
    return [HubDowntime(each.since - run.begin, each.until - run.begin) for each in run.downtime.downtimes]


# ---------------------------------------------------------------------- tables


def _decisions(run: HubRun) -> list[PageTable]:
    shown, names = run.decisions.newest(), run.workers.names()
    if not shown:
        return []
    head = ["after", "time (UTC)", "worker", "decision", "reason"]
    rows = [_decision(run, each, names) for each in shown]
    return [PageTable("Decisions of the hub", [head, *rows], decisions_caption(run))]


def _decision(run: HubRun, each: HubDecision, names: dict[int, str]) -> list[str]:
    why, what = each.why, each.what
    if each.other is not None and each.other in names:
        why = f"{why.removesuffix(str(each.other))}{names[each.other]}"
    if each.repeats > 1:
        what += f", {each.repeats:,} times"
        why += f" (first; the last {format_seconds(max(0.0, each.last - each.at))} later)"
    worker = "the hub" if each.worker == HUB_ITSELF else names.get(each.worker, str(each.worker))
    clock = _clock(each.at)
    if _clock(run.begin)[:10] == _clock(run.end)[:10]:
        clock = clock[11:] or clock  # the date is in the subtitle
    return [format_seconds(max(0.0, each.at - run.begin)), clock, worker, what, why]


def _groups(run: HubRun) -> dict[str, dict[str, str]]:
    facts = {"name": run.name or "–", "folder": run.folder.resolve().name}
    if run.parameters is not None:
        facts["parameters"] = f"{run.parameters:,.0f}"
    if run.fragments:
        facts["fragments"] = str(len(run.fragments))
    if run.initial_worker is not None:
        facts["initial parameters of"] = run.workers.names().get(run.initial_worker, str(run.initial_worker))
    facts["records"] = f"{run.records:,}"
    if run.records:
        facts |= {"first record": f"{_clock(run.begin)} UTC", "last record": f"{_clock(run.end)} UTC"}
        facts["hub down"] = plural(run.downtime.count, "time")
    groups = {"run": facts}
    if run.refused:
        groups["refused"] = {why: f"{count:,}" for why, count in run.refused.most_common(12)}
    return groups


def _clock(t: float) -> str:
    """Return a date and time; unix seconds beyond the calendar's range unchanged."""
    try:
        return datetime.fromtimestamp(t, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return f"{t:g}"
