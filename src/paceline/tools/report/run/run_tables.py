"""Tables of a run's page: waiting by rank, restarts, memory, and the facts of ``run.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline._core.format import format_bytes, format_percent, format_seconds
from paceline.tools.report.page.html_page import PageTable, RankRow
from paceline.tools.report.run.rank_selection import RankSelection
from paceline.tools.report.run.run_figures import readable
from paceline.tools.report.run.run_records import RestartRecord
from paceline.tools.report.run.run_summary import RunSummary

__all__ = ["fact_groups", "memory_table", "readable_value", "restart_table", "waiting_table"]

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
