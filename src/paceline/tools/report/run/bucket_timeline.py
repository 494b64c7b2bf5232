"""Data of the interactive bucket timeline: phases and bucket transfers of a few steps on each rank."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from paceline._core.format import format_bytes, format_seconds
from paceline.tools.report.page.html_page import BucketView, PageTable
from paceline.tools.report.run.rank_selection import RankSelection
from paceline.tools.report.run.step_breakdown import step_intervals
from paceline.tools.report.run.trace_reader import RankTrace, TracedBucket, TracedCall, TracedStep

__all__ = ["make_bucket_view"]

_RANKS_SHOWN = 8
_ROWS_SHOWN = 24


def make_bucket_view(timelines: Mapping[int, RankTrace], selection: RankSelection) -> BucketView | None:
    """Return the view of a few steps; None if no calls were recorded.

    Args:
        timelines: each rank's steps.
        selection: the order of ranks; of many, the worst, the median and the best are shown.
    """
    ranks = _chosen(selection)
    steps = _steps_shown({rank: timelines[rank] for rank in ranks})
    if not steps:
        return None
    shown = [_step(name, number, {rank: timelines[rank] for rank in ranks}) for name, number in steps]
    text = json.dumps({"steps": shown}, separators=(",", ":")).replace("<", "\\u003c")
    first = timelines[ranks[0]]
    usual = next(line for line in first.steps if line.step == steps[0][1])
    caption = (
        "One step on each rank: its phases above, its buckets below from the time they are ready, hollow while they "
        "wait for their turn or for other ranks, filled while in transfer."
    )
    if len(timelines) > len(ranks):
        caption += (
            f" {len(ranks)} of {len(timelines)} ranks: the worst {len(ranks) - 2}, the median and the best."
        )
    table = PageTable(title="Calls of a typical step", table=_table(usual, first.buckets_at(usual.step)))
    return BucketView(text, caption, table)


def _chosen(selection: RankSelection) -> list[int]:
    ranks = selection.ranks
    if len(ranks) > _RANKS_SHOWN:
        ranks = tuple(dict.fromkeys([selection.median, ranks[-1], *ranks]))[:_RANKS_SHOWN]
    return sorted(ranks)


def _steps_shown(timelines: Mapping[int, RankTrace]) -> list[tuple[str, int]]:
    """Return a typical, the slowest and the latest of the steps recorded by all ranks."""
    lines_of_rank = [
        {line.step: line for line in each.warm if line.calls and not line.quiet}
        for each in timelines.values()
    ]
    common = sorted(set.intersection(*(set(lines) for lines in lines_of_rank))) if lines_of_rank else []
    if not common:
        return []
    seconds = {step: max(lines[step].seconds for lines in lines_of_rank) for step in common}
    middle = median(seconds.values())
    usual = min(common, key=lambda step: abs(seconds[step] - middle))
    slowest = max(common, key=seconds.__getitem__)
    name_of_step: dict[int, str] = {}
    for name, step in (("typical step", usual), ("slowest step", slowest), ("latest step", common[-1])):
        name_of_step.setdefault(step, name)
    return [(name, step) for step, name in name_of_step.items()]


def _step(name: str, number: int, timelines: Mapping[int, RankTrace]) -> dict[str, Any]:
    lines = {
        rank: next(line for line in each.steps if line.step == number) for rank, each in timelines.items()
    }
    begin = min(line.start for line in lines.values())
    last: dict[tuple[str, int], tuple[float, int]] = {}
    for rank, line in lines.items():
        for call in line.calls:
            key = (call.kind, call.bucket)
            last[key] = max(last.get(key, (0.0, 0)), (line.start + call.launched, rank))
    ranks = [_lane(rank, line, timelines[rank], begin, last) for rank, line in lines.items()]
    end = max(line.end for line in lines.values()) - begin
    return {"name": f"{name}: {number + 1}, {format_seconds(end)}", "seconds": end, "ranks": ranks}


def _lane(
    rank: int,
    line: TracedStep,
    timeline: RankTrace,
    begin: float,
    last: Mapping[tuple[str, int], tuple[float, int]],
) -> dict[str, Any]:
    """Return the phases and calls of one rank, in seconds since the first rank began the step."""
    offset, buckets = line.start - begin, timeline.buckets_at(line.step)

    def at(moment: float) -> float:
        return round(offset + moment, 6)

    calls = []
    for call in line.calls:
        moment, by = last[call.kind, call.bucket]
        calls.append(
            {
                "name": _name(call, buckets),
                "bytes": format_bytes(call.nbytes),
                "kind": call.kind,
                "ready": at(call.launched if call.ready is None else call.ready),
                "launched": at(call.launched),
                "all": round(moment - begin, 6),
                "last": by,
                "end": at(call.end),
                "waits": [[at(w.start), at(w.end)] for w in line.waits if _waits_for(w.bucket, call)],
            }
        )
    pieces = [[piece.name, at(piece.start), at(piece.end)] for piece in step_intervals(line)]
    return {"rank": rank, "pieces": pieces, "calls": calls}


def _waits_for(bucket: int, call: TracedCall) -> bool:
    return call.kind == "reduce" and bucket == call.bucket


def _name(call: TracedCall, buckets: Sequence[TracedBucket]) -> str:
    if call.kind == "gather":
        return f"parameters {call.bucket}"
    if call.bucket < len(buckets):
        bucket = buckets[call.bucket]
        if not bucket.parameters:
            return "ledger"
        more = f" and {bucket.parameters - 1} more" if bucket.parameters > 1 else ""
        return f"bucket {call.bucket}: {bucket.first}{more}"
    return f"bucket {call.bucket}"


def _table(line: TracedStep, buckets: Sequence[TracedBucket]) -> list[list[str]]:
    rows = [["call", "bytes", "ready", "launched", "done", "duration"]]
    for call in line.calls[:_ROWS_SHOWN]:
        ready = "–" if call.ready is None else format_seconds(call.ready)
        rows.append(
            [
                _name(call, buckets),
                format_bytes(call.nbytes),
                ready,
                format_seconds(call.launched),
                format_seconds(call.end),
                format_seconds(call.end - call.launched),
            ]
        )
    if len(line.calls) > _ROWS_SHOWN:
        rows.append([f"and {len(line.calls) - _ROWS_SHOWN} more", "", "", "", "", ""])
    return rows
