"""Export of a run's timeline to the Trace Event Format of Perfetto and chrome://tracing.

Each rank is a process with a track of phases, a track of waits, and one track per concurrent call.
Format: "Trace Event Format", Google, 2016; times in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.tools.report.run.step_breakdown import step_intervals
from paceline.tools.report.run.trace_reader import RankTrace, TracedBucket, TracedCall, TracedStep

__all__ = ["trace_events"]

_PHASES, _WAITS, _CALLS = 0, 1, 2


def trace_events(timelines: Mapping[int, RankTrace]) -> dict[str, Any]:
    """Return the timelines of all ranks as a JSON object; the earliest step begins at 0.

    Args:
        timelines: each rank's steps.
    """
    begin = min((line.start for each in timelines.values() for line in each.steps), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, timeline in timelines.items():
        events += _names(rank)
        for line in timeline.steps:
            events += _step(line, timeline.buckets_at(line.step), line.start - begin)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(rank: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    for row, name in ((_PHASES, "phases"), (_WAITS, "waiting"), (_CALLS, "calls")):
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}}


def _step(line: TracedStep, buckets: Sequence[TracedBucket], offset: float) -> Iterator[dict[str, Any]]:
    def event(name: str, row: int, start: float, end: float, **args: object) -> dict[str, Any]:
        times = {"ts": round(1e6 * (offset + start), 3), "dur": round(1e6 * (end - start), 3)}
        return {"ph": "X", "name": name, "pid": line.rank, "tid": row, **times, "args": args}

    yield event(f"step {line.step + 1}", _PHASES, 0.0, line.seconds, samples=line.samples, cpu=line.cpu)
    for piece in step_intervals(line):
        yield event(piece.name, _PHASES, piece.start, piece.end)
    for wait in line.waits:
        yield event(
            "waiting" if wait.bucket < 0 else f"waiting for bucket {wait.bucket}",
            _WAITS,
            wait.start,
            wait.end,
        )
    for row, call in _in_rows(line.calls):
        known = call.kind == "reduce" and call.bucket < len(buckets)
        yield event(
            f"{call.kind} {call.bucket}",
            _CALLS + row,
            call.launched,
            call.end,
            bytes=call.nbytes,
            first_parameter=buckets[call.bucket].first if known else "",
            ready=None if call.ready is None else round(1e6 * (offset + call.ready), 3),
        )


def _in_rows(calls: Sequence[TracedCall]) -> Iterator[tuple[int, TracedCall]]:
    """Yield each call with a track in which no other call overlaps it."""
    ends: list[float] = []
    for call in calls:
        row = next((index for index, end in enumerate(ends) if end <= call.launched), len(ends))
        ends[row : row + 1] = [call.end]
        yield row, call
