"""Tables of a run's page: waiting by rank, restarts, recoveries, memory, and the facts of ``run.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from paceline._core.format import format_bytes, format_percent, format_seconds, plural
from paceline.tools.report.page.html_page import PageTable, RankRow
from paceline.tools.report.run.rank_selection import RankSelection
from paceline.tools.report.run.restart_records import (
    DepartureRecord,
    HostChangeRecord,
    RecoveryRecord,
    RestartRecord,
)
from paceline.tools.report.run.run_figures import readable
from paceline.tools.report.run.run_records import RecordedRun
from paceline.tools.report.run.run_summary import RunSummary

__all__ = [
    "fact_groups",
    "memory_table",
    "readable_value",
    "recovery_table",
    "restart_table",
    "waiting_table",
]

_OWN_SECTION = ("sent",)


def waiting_table(summary: RunSummary, selection: RankSelection) -> list[PageTable]:
    """Return the table of waiting by rank; none for fewer than two ranks with recorded steps."""
    arrivals = summary.arrivals
    if not arrivals.ranks:
        return []
    arrival_of_rank = {each.rank: each for each in arrivals.ranks}
    shown = [arrival_of_rank[rank] for rank in selection.ranks if rank in arrival_of_rank]
    slowed = {rank.rank: rank.slowed for rank in summary.ranks}
    head = [
        "rank",
        "last in",
        "after the others' median",
        "95th percentile",
        "waits for ranks",
        "waits for the network",
        "backward slowed by",
    ]
    rows = [
        [
            str(each.rank),
            format_percent(each.last_share),
            _signed(each.lateness),
            _signed(each.lateness_p95),
            _wait(each.imbalance),
            _wait(each.transfer),
            format_seconds(slowed.get(each.rank, 0.0)),
        ]
        for each in shown
    ]
    caption = (
        f"Arrival of each rank at the last exchange of a step, over {arrivals.steps} steps. Exposed communication "
        "consists of waiting for the last rank, waiting for the network after that, and backward slowed by concurrent "
        "calls; mean per step."
    )
    if arrivals.clock_error:
        caption += f" Clocks of hosts are known to {format_seconds(arrivals.clock_error)}."
    ranks = _rank_rows(selection, [each.rank for each in shown])
    caption += f" {selection.caption()}"
    return [PageTable(title="Waiting by rank", table=[head, *rows], caption=caption.strip(), ranks=ranks)]


def _rank_rows(selection: RankSelection, ranks: Sequence[int]) -> list[RankRow]:
    """Return the rows of ranks among which the reader may choose; none if all are shown."""
    if len(selection.ranks) == len(selection.shown):
        return []
    return [RankRow(rank, rank in selection.shown) for rank in ranks]


def _wait(seconds: float) -> str:
    return format_seconds(seconds if seconds >= 1e-6 else 0.0)  # clocks resolve no less


def _signed(seconds: float) -> str:
    return f"{'−' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"


def restart_table(restarts: Sequence[RestartRecord]) -> list[PageTable]:
    """Return the table of restarts; none if there were none."""
    if not restarts:
        return []
    rows = [["restart", "time", "first failure", "ranks"]]
    for each in restarts:
        after = str(each.ranks_after) if each.ranks_after else "ended"
        time = each.time[:19].replace("T", " ")
        rows.append([str(each.number), time, each.reason, f"{each.ranks_before} → {after}"])
    return [PageTable(title="Restarts", table=rows, kind="texts")]


def recovery_table(run: RecordedRun) -> list[PageTable]:
    """Return the table of what changed while other ranks trained on; none if nothing did."""
    if not run.live:
        return []
    rows = [["when", "event", "ranks", "recovery took", "trains on"]]
    world, latest = run.facts.get("world"), {}
    size_of_world: dict[int, object] = {each.number: each.ranks_after for each in run.restarts}
    began = world.get("size") if isinstance(world, Mapping) else "?"
    size_of_world[0] = run.restarts[0].ranks_before if run.restarts else began
    for each in run.live:
        when = _when(each.time, run.facts.get("started"))
        match each:
            case RecoveryRecord():
                before: tuple[str, ...] | None = latest.get(each.restart)
                latest[each.restart] = each.members
                size = len(before) if before else size_of_world.get(each.restart, "?")
                step = f"step {each.step + 1} repeated" if each.repeated else f"from step {each.step + 1}"
                ranks = f"{size} → {len(each.members)}"
                rows.append([when, _recovery(each, before), ranks, format_seconds(each.seconds), step])
            case HostChangeRecord():
                rows.append([when, f"{each.host} {each.how}", "", "", ""])
            case DepartureRecord():
                then = "; it is replaced" if each.replaced else ""
                rows.append([when, f"rank {each.rank} on {each.host} {each.how}{then}", "", "", ""])
    caption = "The other ranks trained on in the same processes; after a recovery ranks are numbered anew."
    return [PageTable(title="Live recoveries", table=rows, caption=caption, kind="texts")]


def _recovery(record: RecoveryRecord, before: tuple[str, ...] | None) -> str:
    """Return what happened to the members; without those before, processes that replaced others have joined."""
    if before is None:
        joined = sum(not member.endswith("/0") for member in record.members)
    else:
        joined = len(set(record.members).difference(before))
    return f"recovery, with {plural(joined, 'new rank')}" if joined else "recovery"


def _when(time: str, started: object) -> str:
    """Return seconds since a run started, or the date where it started later or that is not known."""
    try:
        seconds = (datetime.fromisoformat(time) - datetime.fromisoformat(str(started))).total_seconds()
    except (ValueError, TypeError):  # no time; one without a time zone
        seconds = -1.0
    return f"{seconds:.1f} s" if seconds >= 0 else time[:19].replace("T", " ")


def memory_table(summary: RunSummary, selection: RankSelection) -> list[PageTable]:
    """Return the table of peak memory by rank; none if not recorded."""
    memory_of_rank = {rank: each.memory for rank, each in summary.timelines.items() if each.memory}
    if not memory_of_rank:
        return []
    kinds = sorted({kind for memory in memory_of_rank.values() for kind in memory}, reverse=True)
    names = {"resident": "of the process, resident", "allocated": "allocated on its GPU"}
    rows = [["peak", *(names.get(kind, kind) for kind in kinds)]]
    shown = [rank for rank in selection.ranks or sorted(memory_of_rank) if rank in memory_of_rank]
    for rank in shown:
        memory = memory_of_rank[rank]
        cells = (format_bytes(memory[kind]) if kind in memory else "–" for kind in kinds)
        rows.append([f"rank {rank}", *cells])
    return [PageTable(title="Memory", table=rows, ranks=_rank_rows(selection, shown))]


def fact_groups(facts: Mapping[str, object]) -> dict[str, dict[str, str]]:
    """Return the facts of ``run.json`` by titled group, without those shown elsewhere on the page."""
    hidden = ("command", "started", *_OWN_SECTION)
    groups: dict[str, Mapping[Any, object]] = {"run": {}}
    groups["run"] = {
        key: value for key, value in facts.items() if not isinstance(value, Mapping) and key not in hidden
    }
    groups |= {
        key: value for key, value in facts.items() if isinstance(value, Mapping) and key not in _OWN_SECTION
    }
    return {
        readable(title): {readable(key): readable_value(value) for key, value in group.items()}
        for title, group in groups.items()
        if group
    }


def readable_value(value: object) -> str:
    """Return a value of ``run.json`` as people write it."""
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}" if value >= 10_000 else str(value)
        case float():
            return f"{value:g}"
        case list():
            return ", ".join(readable_value(item) for item in value)
        case Mapping():
            return ", ".join(f"{readable(key)} {readable_value(item)}" for key, item in value.items())
    return str(value)
