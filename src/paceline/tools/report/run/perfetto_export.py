"""Export of a run's timeline to the Trace Event Format of Perfetto and chrome://tracing.

Each rank is a process with tracks of phases, waits, tasks (held-out losses, checkpoints, recoveries) and calls;
concurrent calls have a track each. Arrows join the calls of one collective over all ranks, in order of launch, so they
end at the rank that the others waited for. Counters show the bytes in flight and the peak memory.

Format: "Trace Event Format", Google, 2016; times in microseconds since the earliest step began.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.tools.report.run.step_breakdown import step_intervals
from paceline.tools.report.run.trace_reader import RankTrace, TracedBucket, TracedCall, TracedStep

__all__ = ["TIMELINE_PID", "timeline_begin", "trace_events"]

Event = dict[str, Any]

TIMELINE_PID = 0
"""Process id of rank 0; rank k has this plus k."""

_PHASES, _WAITS, _TASKS, _CALLS = 0, 1, 2, 3
_NAMES = {_PHASES: "phases", _WAITS: "waiting", _TASKS: "tasks"}


def trace_events(timelines: Mapping[int, RankTrace]) -> dict[str, Any]:
    """Return the timelines of all ranks as a JSON object; the earliest step begins at 0.

    Args:
        timelines: each rank's steps.
    """
    begin = timeline_begin(timelines)
    events: list[Event] = []
    launches: dict[tuple[int, str, int], list[Event]] = {}  # calls by step, kind and bucket
    for rank, timeline in timelines.items():
        slices: list[Event] = []
        for line in timeline.steps:
            slices += _step(line, line.start - begin)
            for call, event in _calls(line, timeline.buckets_at(line.step), line.start - begin):
                slices.append(event)
                launches.setdefault((line.step, call.kind, call.bucket), []).append(event)
        for each in timeline.recoveries:
            times, args = (each.start - begin, each.start - begin + each.seconds), {"ranks": each.ranks}
            slices.append(_slice(rank, _TASKS, "recovery", *times, step=each.step + 1, **args))
        events += [*_names(rank, {event["tid"] for event in slices}), *slices]
        events += _bytes_in_flight(rank, timeline.steps, begin)
        events += _memory(rank, timeline, begin)
    for number, calls in enumerate(launches.values()):
        events += _arrows(number, calls)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def timeline_begin(timelines: Mapping[int, RankTrace]) -> float:
    """Return when the earliest step began, in unix seconds of rank 0's clock; 0 without steps."""
    return min((line.start for each in timelines.values() for line in each.steps), default=0.0)


def _names(rank: int, tracks: set[int]) -> Iterator[Event]:
    """Yield the names and the order of a rank's process and of all its tracks."""
    pid = TIMELINE_PID + rank

    def meta(kind: str, tid: int, /, **args: object) -> Event:
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}

    yield meta("process_name", 0, name=f"rank {rank}")
    yield meta("process_sort_index", 0, sort_index=2 * rank)
    for tid in sorted(tracks):
        number = tid - _CALLS + 1
        yield meta("thread_name", tid, name=_NAMES.get(tid) or f"calls {number}" if number != 1 else "calls")
        yield meta("thread_sort_index", tid, sort_index=tid)


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def _slice(rank: int, track: int, name: str, start: float, end: float, **args: object) -> Event:
    times = {"ts": _microseconds(start), "dur": _microseconds(max(0.0, end - start))}
    return {"ph": "X", "name": name, "pid": TIMELINE_PID + rank, "tid": track, **times, "args": args}


def _step(line: TracedStep, offset: float) -> Iterator[Event]:
    """Yield the slices of a step without its calls; `offset` is when it began."""

    def piece(track: int, name: str, start: float, end: float, **args: object) -> Event:
        return _slice(line.rank, track, name, offset + start, offset + end, **args)

    yield piece(_PHASES, f"step {line.step + 1}", 0.0, line.seconds, samples=line.samples, cpu=line.cpu)
    for interval in step_intervals(line):
        yield piece(_PHASES, interval.name, interval.start, interval.end)
    for wait in line.waits:
        name = "waiting" if wait.bucket < 0 else f"waiting for bucket {wait.bucket}"
        yield piece(_WAITS, name, wait.start, wait.end)
    for task in line.tasks:
        yield piece(_TASKS, task.name, task.start, task.end)


def _calls(
    line: TracedStep, buckets: Sequence[TracedBucket], offset: float
) -> Iterator[tuple[TracedCall, Event]]:
    """Yield each call of a step with its slice, on a track in which no other call overlaps it."""
    ends: list[float] = []
    for call in sorted(line.calls, key=lambda each: each.launched):
        row = next((index for index, end in enumerate(ends) if end <= call.launched), len(ends))
        ends[row : row + 1] = [call.end]
        known = call.kind == "reduce" and call.bucket < len(buckets)
        yield (
            call,
            _slice(
                line.rank,
                _CALLS + row,
                f"{call.kind} {call.bucket}",
                offset + call.launched,
                offset + call.end,
                bytes=call.nbytes,
                first_parameter=buckets[call.bucket].first if known else "",
                ready=None if call.ready is None else _microseconds(offset + call.ready),
            ),
        )


def _arrows(number: int, calls: Sequence[Event]) -> Iterator[Event]:
    """Yield the flow that joins the slices of one collective: start, steps and end, each bound to its slice."""
    ordered = sorted(calls, key=lambda call: (call["ts"], call["pid"]))
    if len(ordered) < 2:
        return
    for index, call in enumerate(ordered):
        kind = "s" if index == 0 else "f" if index == len(ordered) - 1 else "t"
        event = {"ph": kind, "id": number + 1, "name": "collective", "cat": "collective"}
        event |= {"pid": call["pid"], "tid": call["tid"], "ts": call["ts"]}
        yield event | {"bp": "e"} if kind == "f" else event


def _bytes_in_flight(rank: int, steps: Sequence[TracedStep], begin: float) -> Iterator[Event]:
    """Yield a counter of the bytes of calls that are launched and not done."""
    changes: dict[float, int] = {}
    for line in steps:
        for call in line.calls:
            for moment, nbytes in ((call.launched, call.nbytes), (call.end, -call.nbytes)):
                at = _microseconds(line.start - begin + moment)
                changes[at] = changes.get(at, 0) + nbytes
    total = 0
    for at in sorted(changes):
        total += changes[at]
        yield _counter(rank, "bytes in flight", at, {"bytes": total})


def _memory(rank: int, timeline: RankTrace, begin: float) -> Iterator[Event]:
    """Yield counters of the peak memory so far."""
    for at, peaks in timeline.memory_marks:
        for kind, nbytes in peaks.items():
            yield _counter(
                rank, f"peak memory, {kind}", _microseconds(max(0.0, at - begin)), {"bytes": nbytes}
            )


def _counter(rank: int, name: str, at: float, values: Mapping[str, int]) -> Event:
    return {"ph": "C", "name": name, "pid": TIMELINE_PID + rank, "tid": 0, "ts": at, "args": dict(values)}
