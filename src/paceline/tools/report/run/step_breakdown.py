"""Breakdown of a step's time on one rank.

    data        waiting for the next batch
    forward     the model's outputs, and everything until backward, such as the loss
    backward    gradients
    exposed     communication not hidden by computing: waiting for other ranks, launching calls, completing results
    optimizer   the update
    other       anything else in the step
    between     held-out losses, checkpoints and other tasks outside training steps

`exposed` includes the slowdown of backward by communication, measured by quiet steps ([Note: quiet steps] in
`paceline.profiling.step_recorder`). It is excluded from the phase it occurs in, and tasks are excluded from everything,
so that the parts add up to the step.

Times are host times: on a GPU, a phase ends when its work is enqueued, and device time shows up where the host first
needs a result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, median

from paceline.tools.report.run.trace_reader import StepInterval, TracedStep

__all__ = [
    "PHASES",
    "backward_slowdown",
    "exposed_intervals",
    "mean_parts",
    "merge_intervals",
    "seconds_without_tasks",
    "step_intervals",
    "step_parts",
]

PHASES = ("data", "forward", "backward", "exposed", "optimizer", "other")

_MIN_QUIET_STEPS = 3


def step_parts(line: TracedStep) -> dict[str, float]:
    """Return the seconds of each part of a step, including ``"between"``; they add up to the step."""
    if not line.parts:
        parts: dict[str, float] = dict.fromkeys((*PHASES, "between"), 0.0)
        for piece in step_intervals(line):
            parts[piece.name] += piece.end - piece.start
        line.parts.update(parts)
    return line.parts


def mean_parts(lines: Sequence[TracedStep]) -> dict[str, float]:
    """Return the mean seconds of each part of a rank's steps, with the slowdown of backward as exposed.

    Quiet steps are excluded (unless all are quiet): they only serve to measure backward without communication.
    """
    usual = [line for line in lines if not line.quiet] or list(lines)
    parts = [step_parts(line) for line in usual]
    mean = {name: fmean(each[name] for each in parts) for name in (*PHASES, "between")}
    slowed = backward_slowdown(lines)
    return mean | {"backward": mean["backward"] - slowed, "exposed": mean["exposed"] + slowed}


def backward_slowdown(lines: Sequence[TracedStep]) -> float:
    """Return the seconds by which concurrent calls slow backward, from medians of a rank's steps; 0 if unknown."""
    backward = [(line.quiet, step_parts(line)["backward"]) for line in lines if line.calls]
    quiet = [seconds for is_quiet, seconds in backward if is_quiet]
    usual = [seconds for is_quiet, seconds in backward if not is_quiet]
    return max(0.0, median(usual) - median(quiet)) if len(quiet) >= _MIN_QUIET_STEPS and usual else 0.0


def step_intervals(line: TracedStep) -> list[StepInterval]:
    """Return the parts of a step in order of time, without gaps."""
    pieces = list(_phases(line))
    pieces = _overlay(pieces, exposed_intervals(line))
    tasks = [
        StepInterval("between", max(0.0, task.start), min(task.end, line.seconds)) for task in line.tasks
    ]
    return _overlay(pieces, merge_intervals(tasks))


def seconds_without_tasks(line: TracedStep) -> float:
    """Return the seconds of a step without held-out losses, checkpoints and other tasks."""
    return line.seconds - step_parts(line)["between"]


def exposed_intervals(line: TracedStep) -> list[StepInterval]:
    """Return the disjoint intervals, in order, in which this rank did nothing but communicate."""
    found = [
        StepInterval("exposed", phase.start, phase.end) for phase in line.phases if phase.name == "exchange"
    ]
    found += [StepInterval("exposed", wait.start, wait.end) for wait in line.waits]
    found += [StepInterval("exposed", call.launched, call.posted) for call in line.calls]
    return merge_intervals(found)


def _phases(line: TracedStep) -> Iterator[StepInterval]:
    """Yield the phases named by part; time between forward and backward counts as forward."""
    after = ""
    named: list[StepInterval] = []
    for phase in reversed(line.phases):
        part = phase.name if phase.name in PHASES else "other"
        if phase.name == "outside" and after == "backward":
            part = "forward"
        if phase.name != "outside":
            after = phase.name
        named.append(StepInterval("exposed" if phase.name == "exchange" else part, phase.start, phase.end))
    yield from reversed(named)


def _overlay(pieces: Sequence[StepInterval], upper: Sequence[StepInterval]) -> list[StepInterval]:
    """Return `pieces` overlaid with `upper`; both are disjoint and in order."""
    result: list[StepInterval] = []
    at = 0
    for piece in pieces:
        start = piece.start
        while at < len(upper) and upper[at].end <= start:
            at += 1
        index = at
        while index < len(upper) and upper[index].start < piece.end:
            over = upper[index]
            if over.start > start:
                result.append(StepInterval(piece.name, start, over.start))
            end = min(over.end, piece.end)
            if end > max(start, over.start):
                result.append(StepInterval(over.name, max(start, over.start), end))
            start = max(start, end)
            index += 1
        if piece.end > start:
            result.append(StepInterval(piece.name, start, piece.end))
    return result


def merge_intervals(pieces: Sequence[StepInterval]) -> list[StepInterval]:
    """Return intervals of one name in order, with touching or overlapping ones merged."""
    merged: list[StepInterval] = []
    for piece in sorted(pieces, key=lambda each: each.start):
        if piece.end <= piece.start:
            continue
        if merged and piece.start <= merged[-1].end:
            merged[-1] = StepInterval(piece.name, merged[-1].start, max(merged[-1].end, piece.end))
        else:
            merged.append(piece)
    return merged
