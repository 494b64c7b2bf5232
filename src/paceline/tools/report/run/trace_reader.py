"""Reads the steps of a rank from its trace (`paceline.profiling.step_recorder`), on rank 0's clock.

A trace of a run that was killed and resumed has several sessions. Of repeated steps, the last one counts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.tools.report.run.run_records import TraceSpan

__all__ = [
    "RankTrace",
    "RecoverySpan",
    "StepInterval",
    "TracedBucket",
    "TracedCall",
    "TracedStep",
    "TracedWait",
    "clock_offset_at",
    "read_timeline",
]


@dataclass(frozen=True, slots=True)
class StepInterval:
    """A named interval of a step, in seconds since the step began."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class TracedWait:
    """A wait for other ranks, in seconds since the step began; `bucket` is −1 for anything but a bucket."""

    bucket: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedCall:
    """A collective call of the engine; times in seconds since the step began, None if unknown.

    Attributes:
        kind: ``"reduce"`` or ``"gather"``.
        bucket: number of the bucket in launch order.
        nbytes: size of the bucket.
        sent: bytes that this rank sends for it.
        ready: see `paceline.profiling.step_recorder`, as for all other times.
        launched: when the call was launched.
        posted: when the launch returned.
        done: when the call completed.
        seen: when its completion was noticed.
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
        """Best known time of completion."""
        known = [moment for moment in (self.done, self.seen) if moment is not None]
        return max(self.posted, min(known)) if known else self.posted


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedStep:
    """One step of one rank.

    Attributes:
        step: its number, from 0.
        rank: the rank.
        start: its begin in unix seconds of rank 0's clock.
        seconds: its length.
        phases: phases in order, without gaps.
        waits: waits for other ranks.
        tasks: held-out losses, checkpoints and other work outside training.
        calls: collective calls.
        samples: samples behind this rank's gradient.
        cpu: processor seconds of the process.
        preempted: number of preemptions.
        quiet: whether no call was launched before the end of backward.
        parts: seconds of each part, kept by `paceline.tools.report.run.step_breakdown.step_parts`.
    """

    step: int
    rank: int
    start: float
    seconds: float
    phases: tuple[StepInterval, ...] = ()
    waits: tuple[TracedWait, ...] = ()
    tasks: tuple[StepInterval, ...] = ()
    calls: tuple[TracedCall, ...] = ()
    samples: float = 0.0
    cpu: float = 0.0
    preempted: int = 0
    quiet: bool = False
    parts: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def end(self) -> float:
        """Its end in unix seconds of rank 0's clock."""
        return self.start + self.seconds


@dataclass(frozen=True, slots=True)
class TracedBucket:
    """A bucket: kind of its call, bytes, number of parameters, name of the first parameter."""

    call: str
    nbytes: int
    parameters: int
    first: str


@dataclass(frozen=True, slots=True)
class RecoverySpan:
    """A recovery on a rank that went on: begin in unix seconds of rank 0's clock, steps done before, ranks after."""

    start: float
    seconds: float
    step: int
    ranks: int


@dataclass(frozen=True)
class RankTrace:
    """The steps of one rank.

    Attributes:
        steps: all steps in order, one per number.
        warm: the steps without the first of each session, which includes one-time costs.
        buckets: (first step, buckets) of each bucket layout, in order.
        clock_error: largest error of this rank's times against rank 0's clock, in seconds.
        memory: peak bytes by kind.
        memory_marks: (unix seconds of rank 0's clock, peak bytes by kind so far), in order.
        clock_marks: (unix seconds of this rank's clock, how far it was ahead of rank 0's), in order.
        recoveries: after which it trained on as this rank, in order.
    """

    steps: tuple[TracedStep, ...] = ()
    warm: tuple[TracedStep, ...] = ()
    buckets: tuple[tuple[int, tuple[TracedBucket, ...]], ...] = ()
    clock_error: float = 0.0
    memory: Mapping[str, int] = field(default_factory=dict)
    memory_marks: tuple[tuple[float, Mapping[str, int]], ...] = ()
    clock_marks: tuple[tuple[float, float], ...] = ()
    recoveries: tuple[RecoverySpan, ...] = ()

    def buckets_at(self, step: int) -> tuple[TracedBucket, ...]:
        """Return the bucket layout of a step; empty if unknown."""
        at = bisect_right([first for first, _ in self.buckets], step) - 1
        return self.buckets[at][1] if at >= 0 else ()


def read_timeline(spans: Sequence[TraceSpan]) -> RankTrace:
    """Return the steps of a rank's trace; invalid lines are skipped."""
    steps: dict[int, TracedStep] = {}
    buckets: dict[int, tuple[TracedBucket, ...]] = {}
    cold: set[int] = set()
    memory: dict[str, int] = {}
    memory_marks: list[tuple[float, Mapping[str, int]]] = []
    clock_marks: list[tuple[float, float]] = []
    recoveries: list[RecoverySpan] = []
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
                known = [key for key in ("resident", "allocated") if key in span.fields]
                peaks = {key: int(_number(span, key)) for key in known}
                memory |= peaks
                memory_marks.append((span.start - clock_offset_at(marks, span.start), peaks))
            elif span.name == "recovery":
                begin = span.start - clock_offset_at(marks, span.start)
                step, ranks = int(_number(span, "step")), int(_number(span, "ranks"))
                recoveries.append(RecoverySpan(begin, span.seconds, step, ranks))
        clock_marks += marks
    every = tuple(steps[step] for step in sorted(steps))
    warm = tuple(line for line in every if line.step not in cold)
    return RankTrace(
        every,
        warm or every,
        tuple(sorted(buckets.items())),
        error,
        memory,
        tuple(memory_marks),
        tuple(clock_marks),
        tuple(recoveries),
    )


def _sessions(spans: Sequence[TraceSpan]) -> list[list[TraceSpan]]:
    """Return the spans of each session; a session begins with a ``session`` span."""
    sessions: list[list[TraceSpan]] = [[]]
    for span in spans:
        if span.name == "session":
            sessions.append([])
        sessions[-1].append(span)
    return sessions


def _step(span: TraceSpan, marks: Sequence[tuple[float, float]]) -> list[TracedStep]:
    """Return the step of a span on rank 0's clock; empty if the span is invalid."""
    fields: Mapping[str, Any] = span.fields
    try:
        phases = [(str(name), since / 1e6) for name, since in fields["phases"]]
        ends = [*(since for _, since in phases[1:]), span.seconds]
        calls = [_call(*call) for call in fields["calls"]]
        if all(name != "backward" for name, _ in phases):
            return []  # only a forward: a held-out loss after the last step
        return [
            TracedStep(
                step=int(fields["step"]),
                rank=span.rank,
                start=span.start - clock_offset_at(marks, span.start),
                seconds=span.seconds,
                phases=tuple(
                    StepInterval(name, since, end) for (name, since), end in zip(phases, ends, strict=True)
                ),
                waits=tuple(
                    TracedWait(int(bucket), since / 1e6, until / 1e6)
                    for bucket, since, until in fields["waits"]
                ),
                tasks=tuple(
                    StepInterval(str(name), since / 1e6, until / 1e6)
                    for name, since, until in fields["tasks"]
                ),
                calls=tuple(calls),
                samples=float(fields.get("samples") or 0.0),
                cpu=float(fields.get("cpu") or 0.0),
                preempted=int(fields.get("preempted") or 0),
                quiet=fields.get("quiet") is True,
            )
        ]
    except (KeyError, TypeError, ValueError):
        return []


def _call(kind: str, bucket: int, nbytes: int, sent: int, *moments: float | None) -> TracedCall:
    """Return a call from its JSON list; times there are microseconds."""
    ready, launched, posted, done, seen = (None if moment is None else moment / 1e6 for moment in moments)
    if launched is None or posted is None:
        raise ValueError("every call is launched")
    return TracedCall(
        kind=str(kind),
        bucket=int(bucket),
        nbytes=int(nbytes),
        sent=int(sent),
        ready=ready,
        launched=launched,
        posted=posted,
        done=done,
        seen=seen,
    )


def clock_offset_at(marks: Sequence[tuple[float, float]], moment: float) -> float:
    """Return how far a clock was ahead at one of its times: interpolated between measurements, constant outside.

    Example:
        >>> clock_offset_at([(0.0, 1.0), (10.0, 2.0)], 5.0)
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
