"""HTML report of an asynchronous run, from its hub's folder: contributions, staleness, scores, traffic, decisions."""

from __future__ import annotations

from collections.abc import Sequence
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
from paceline.tools.report.hub.bounded_decision_log import HUB_ITSELF, HubDecision
from paceline.tools.report.hub.hub_charts import (
    contribution_chart,
    score_chart,
    staleness_chart,
    traffic_chart,
)
from paceline.tools.report.hub.hub_records import HubRun, read_hub_run
from paceline.tools.report.hub.hub_summary import ContributionRow, contribution_rows, ddp_nbytes, local_steps
from paceline.tools.report.hub.hub_text import (
    contributions_caption,
    decisions_caption,
    format_refusals,
    hub_headline,
)
from paceline.tools.report.hub.worker_statistics import WorkerStatistics
from paceline.tools.report.page.curve_chart import CurveChart
from paceline.tools.report.page.html_page import BarChart, PageTable, ReportPage, Tile, write_page

__all__ = ["render_hub_page", "write_hub_report"]

_WORKERS_SHOWN = 20


def write_hub_report(folder: Path) -> Path:
    """Write ``report.html`` atomically into a hub's folder and return its path.

    Raises:
        UsageError: the folder is not writable or was written by a newer version of Paceline, or the ``report`` extra
            is not installed.
    """
    return write_page(folder / "report.html", render_hub_page(read_hub_run(folder)))


def render_hub_page(run: HubRun) -> str:
    """Return the report of `run` as HTML.

    Raises:
        UsageError: the ``report`` extra is not installed.
    """
    rows = contribution_rows(run, _WORKERS_SHOWN)
    return ReportPage(
        title=f"Asynchronous run {run.name or run.folder.resolve().name}",
        subtitle=_subtitle(run),
        notes=run.notes,
        sentences=hub_headline(run, rows),
        tiles=_tiles(run),
        figures=_figures(run, rows),
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


def _figures(run: HubRun, rows: Sequence[ContributionRow]) -> list[BarChart | CurveChart]:
    figures: list[BarChart | CurveChart] = []
    if scores := score_chart(run):
        figures.append(scores)
    if run.updates or run.refused:
        figures.append(_contributions(run, rows))
    if run.updates:
        figures.append(staleness_chart(run))
    if run.traffic.record_count > 1:
        figures.append(traffic_chart(run))
    return figures


def _contributions(run: HubRun, rows: Sequence[ContributionRow]) -> BarChart:
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
    table = PageTable(title="Contributions", table=[head, *(_cells(row) for row in rows)], kind="wrap-last")
    return contribution_chart(rows, contributions_caption(run, rows), table)


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


# ---------------------------------------------------------------------- tables


def _decisions(run: HubRun) -> list[PageTable]:
    shown, names = run.decisions.newest(), run.workers.names()
    if not shown:
        return []
    head = ["after", "time (UTC)", "worker", "decision", "reason"]
    rows = [_decision(run, each, names) for each in shown]
    return [
        PageTable(
            title="Decisions of the hub", table=[head, *rows], caption=decisions_caption(run), kind="texts"
        )
    ]


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
