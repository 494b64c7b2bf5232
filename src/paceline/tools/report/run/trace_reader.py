"""A rank's steps, read back from its trace and put on rank 0's clock: what `paceline.profiling.step_recorder` has
written.

A trace may hold several sessions: a run that was killed and went on. Steps that were done again count once, as they
were done last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.tools.report.run.run_records import TraceSpan

__all__ = [
    "RankTrace",
    "StepInterval",
    "Task",
    "TracedBucket",
    "TracedCall",
    "TracedStep",
    "TracedWait",
    "clock_offset_at",
    "read_timeline",
]


@dataclass(frozen=True)
class StepInterval:
    """A phase of a step, from and until when, in seconds since the step began."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class TracedWait:
    """Standing still for other ranks; `bucket` −1: for what is no bucket. Seconds since the step began."""

    bucket: int
    start: float
    end: float


Task = StepInterval


@dataclass(frozen=True)
class TracedCall:
    """A call of the engine; times in seconds since the step began, None where nobody knows.

    Attributes:
        kind: ``"reduce"`` or ``"gather"``. bucket: in launch order. nbytes: that were handed over. sent: that this rank
            sends for it.
        ready, launched, posted, done, seen: as in `paceline.profiling.step_recorder`.
    """

    kind: str
    bucket: int
    nbytes: int
    sent: int
    ready: float | None
    launched: float
    posted: float
    done: float | None
    seen: float | None

    @property
    def end(self) -> float:
        """When it was through, as far as anybody knows."""
        known = [moment for moment in (self.done, self.seen) if moment is not None]
        return max(self.posted, min(known)) if known else self.posted


@dataclass(frozen=True)
class TracedStep:
    """One step of one rank.

    Attributes:
        step: its number, counted from 0. rank: whose.
        start: when it began, in unix seconds of rank 0's clock. seconds: how long it took.
        phases: in order, without gaps. waits, tasks, calls: see there.
        samples: that this rank's gradient stood for. cpu: processor seconds of the process. preempted: how often.
        quiet: whether nothing was launched before backward had ended.
    """

    step: int
    rank: int
    start: float
    seconds: float
    phases: tuple[StepInterval, ...] = ()
    waits: tuple[TracedWait, ...] = ()
    tasks: tuple[Task, ...] = ()
    calls: tuple[TracedCall, ...] = ()
    samples: float = 0.0
    cpu: float = 0.0
    preempted: int = 0
    quiet: bool = False

    @property
    def end(self) -> float:
        """When it ended, in unix seconds of rank 0's clock."""
        return self.start + self.seconds


@dataclass(frozen=True)
class TracedBucket:
    """What a bucket is: the call that reduces it, its bytes, how many parameters, the name of the first."""

    call: str
    nbytes: int
    parameters: int
    first: str


@dataclass(frozen=True)
class RankTrace:
    """What one rank's trace tells of its steps.

    Attributes:
        steps: in order; of each number one. warm: those that did not pay for what happens once.
        buckets: by the step from which on they were so, in order of these steps.
        clock_error: by how much this rank's times may be off from rank 0's, in seconds.
        memory: the most bytes that were used, by what kind.
    """

    steps: tuple[TracedStep, ...] = ()
    warm: tuple[TracedStep, ...] = ()
    buckets: tuple[tuple[int, tuple[TracedBucket, ...]], ...] = ()
    clock_error: float = 0.0
    memory: Mapping[str, int] = field(default_factory=dict)

    def buckets_at(self, step: int) -> tuple[TracedBucket, ...]:
        """Return the buckets as they were in a step; none where that is not known."""
        at = bisect_right([first for first, _ in self.buckets], step) - 1
        return self.buckets[at][1] if at >= 0 else ()


def read_timeline(spans: Sequence[TraceSpan]) -> RankTrace:
    """Return what a rank's trace tells of its steps; lines that make no sense are left out."""
    steps: dict[int, TracedStep] = {}
    buckets: dict[int, tuple[TracedBucket, ...]] = {}
    cold: set[int] = set()
    memory: dict[str, int] = {}
    error = 0.0
    for session in _sessions(spans):
        marks = [(span.start, _number(span, "offset")) for span in session if span.name == "clock"]
        found = [line for span in session if span.name == "step" for line in _step(span, marks)]
        if found:
            first = min(line.step for line in found)
            steps = {step: line for step, line in steps.items() if step < first}
            buckets = {step: fields for step, fields in buckets.items() if step < first}
            steps |= {line.step: line for line in found}
            cold.add(first)
        buckets |= {int(_number(span, "step")): _buckets(span) for span in session if span.name == "plan"}
        errors = [_number(span, "error") for span in session if span.name == "clock"]
        error = max([error, *errors])
        for span in session:
            if span.name == "memory":
                memory |= {
                    key: int(_number(span, key)) for key in ("resident", "allocated") if key in span.fields
                }
    every = tuple(steps[step] for step in sorted(steps))
    settled = tuple(line for line in every if line.step not in cold)
    return RankTrace(every, settled or every, tuple(sorted(buckets.items())), error, memory)


def _sessions(spans: Sequence[TraceSpan]) -> list[list[TraceSpan]]:
    """Return the spans of each session; each begins with a mark."""
    sessions: list[list[TraceSpan]] = [[]]
    for span in spans:
        if span.name == "session":
            sessions.append([])
        sessions[-1].append(span)
    return sessions


def _step(span: TraceSpan, marks: Sequence[tuple[float, float]]) -> list[TracedStep]:
    """Return the step of a line, on rank 0's clock; nothing where the line makes no sense."""
    fields: Mapping[str, Any] = span.fields
    try:
        phases = [(str(name), since / 1e6) for name, since in fields["phases"]]
        ends = [*(since for _, since in phases[1:]), span.seconds]
        calls = [_call(*call) for call in fields["calls"]]
        if all(name != "backward" for name, _ in phases):
            return []  # a forward alone: a held-out loss after the last step
        return [
            TracedStep(
                int(fields["step"]),
                span.rank,
                span.start - clock_offset_at(marks, span.start),
                span.seconds,
                tuple(
                    StepInterval(name, since, end) for (name, since), end in zip(phases, ends, strict=True)
                ),
                tuple(
                    TracedWait(int(bucket), since / 1e6, until / 1e6)
                    for bucket, since, until in fields["waits"]
                ),
                tuple(Task(str(name), since / 1e6, until / 1e6) for name, since, until in fields["tasks"]),
                tuple(calls),
                float(fields.get("samples") or 0.0),
                float(fields.get("cpu") or 0.0),
                int(fields.get("preempted") or 0),
                fields.get("quiet") is True,
            )
        ]
    except (KeyError, TypeError, ValueError):
        return []


def _call(kind: str, bucket: int, nbytes: int, sent: int, *moments: float | None) -> TracedCall:
    """Return the call of a line's list; its moments are microseconds."""
    ready, launched, posted, done, seen = (None if moment is None else moment / 1e6 for moment in moments)
    if launched is None or posted is None:
        raise ValueError("every call is launched")
    return TracedCall(str(kind), int(bucket), int(nbytes), int(sent), ready, launched, posted, done, seen)


def clock_offset_at(marks: Sequence[tuple[float, float]], moment: float) -> float:
    """Return how far a clock was ahead at a moment of its own: between two measurements on a line, beyond as there.

    Example:
        >>> offset_at([(0.0, 1.0), (10.0, 2.0)], 5.0)
        1.5
    """
    if not marks:
        return 0.0
    after = bisect_right([at for at, _ in marks], moment)
    if after == 0:
        return marks[0][1]
    if after == len(marks):
        return marks[-1][1]
    (begin, low), (end, high) = marks[after - 1], marks[after]
    return low + (high - low) * (moment - begin) / (end - begin)


def _buckets(span: TraceSpan) -> tuple[TracedBucket, ...]:
    fields = span.fields.get("buckets")
    known = [each for each in fields if isinstance(each, Mapping)] if isinstance(fields, list) else []
    return tuple(
        TracedBucket(
            str(each.get("call")),
            int(each.get("nbytes") or 0),
            int(each.get("parameters") or 0),
            str(each.get("first") or ""),
        )
        for each in known
    )


def _number(span: TraceSpan, key: str) -> float:
    value = span.fields.get(key)
    return float(value) if isinstance(value, int | float) else 0.0
