"""Where the time of a step goes on one rank. Pure functions over its line.

    data        getting the next batch
    forward     the model's outputs, and what follows until backward: the loss
    backward    gradients
    exposed     communication that nothing hides: waiting for other ranks, launching calls, completing results
    optimizer   the update
    other       what is in none of these
    between     held-out losses, checkpoints and other tasks, which are no part of a training step

`exposed` also holds by how much communication slows backward, which quiet steps tell ([Note: quiet steps] in
`paceline.profiling.step_recorder`).

`exposed` is taken out of the phase that it lies in, and tasks are taken out of everything, so that the parts add up to
the step.

Times are those of the host: on a GPU a phase ends when its work was handed over, and the time that it takes shows
where the host first needs a result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, median

from paceline.tools.report.run.trace_reader import StepInterval, TracedStep

__all__ = [
    "PHASES",
    "Piece",
    "backward_slowdown",
    "exposed_intervals",
    "mean_parts",
    "merge_intervals",
    "step_intervals",
    "step_parts",
]

PHASES = ("data", "forward", "backward", "exposed", "optimizer", "other")

Piece = StepInterval
"""Of a step, named by its part."""

_FEWEST_QUIET = 3
"""Quiet steps without which nothing is said of them."""


def step_parts(line: TracedStep) -> dict[str, float]:
    """Return the seconds of each part of a step, ``"between"`` too; they add up to the step's."""
    parts: dict[str, float] = dict.fromkeys((*PHASES, "between"), 0.0)
    for piece in step_intervals(line):
        parts[piece.name] += piece.end - piece.start
    return parts


def mean_parts(lines: Sequence[TracedStep]) -> dict[str, float]:
    """Return the mean seconds of each part of a rank's steps; what slows backward is exposed too.

    Steps that were quiet are not what is usual, so they only tell what backward takes by itself; unless all are.
    """
    usual = [line for line in lines if not line.quiet] or list(lines)
    parts = [step_parts(line) for line in usual]
    mean = {name: fmean(each[name] for each in parts) for name in (*PHASES, "between")}
    slowed = backward_slowdown(lines)
    return mean | {"backward": mean["backward"] - slowed, "exposed": mean["exposed"] + slowed}


def backward_slowdown(lines: Sequence[TracedStep]) -> float:
    """Return by how much calls that were under way slowed backward, median of a rank's steps; 0: not known."""
    told = [(line.quiet, step_parts(line)["backward"]) for line in lines if line.calls]
    quiet = [seconds for is_quiet, seconds in told if is_quiet]
    usual = [seconds for is_quiet, seconds in told if not is_quiet]
    return max(0.0, median(usual) - median(quiet)) if len(quiet) >= _FEWEST_QUIET and usual else 0.0


def step_intervals(line: TracedStep) -> list[Piece]:
    """Return the parts of a step in the order of time, without gaps."""
    pieces = list(_phases(line))
    pieces = _over(pieces, exposed_intervals(line))
    tasks = [Piece("between", max(0.0, task.start), min(task.end, line.seconds)) for task in line.tasks]
    return _over(pieces, merge_intervals(tasks))


def exposed_intervals(line: TracedStep) -> list[Piece]:
    """Return when this rank communicated and did nothing else, in order and apart from each other."""
    found = [Piece("exposed", phase.start, phase.end) for phase in line.phases if phase.name == "exchange"]
    found += [Piece("exposed", wait.start, wait.end) for wait in line.waits]
    found += [Piece("exposed", call.launched, call.posted) for call in line.calls]
    return merge_intervals(found)


def _phases(line: TracedStep) -> Iterator[Piece]:
    """Yield the phases by their part: what lies between forward and backward belongs to forward."""
    after = ""
    named: list[Piece] = []
    for phase in reversed(line.phases):
        part = phase.name if phase.name in PHASES else "other"
        if phase.name == "outside" and after == "backward":
            part = "forward"
        if phase.name != "outside":
            after = phase.name
        named.append(Piece("exposed" if phase.name == "exchange" else part, phase.start, phase.end))
    yield from reversed(named)


def _over(pieces: Sequence[Piece], upper: Sequence[Piece]) -> list[Piece]:
    """Return `pieces` with `upper` laid over them; both in order and apart from each other."""
    result: list[Piece] = []
    at = 0
    for piece in pieces:
        start = piece.start
        while at < len(upper) and upper[at].end <= start:
            at += 1
        index = at
        while index < len(upper) and upper[index].start < piece.end:
            over = upper[index]
            if over.start > start:
                result.append(Piece(piece.name, start, over.start))
            end = min(over.end, piece.end)
            if end > max(start, over.start):
                result.append(Piece(over.name, max(start, over.start), end))
            start = max(start, end)
            index += 1
        if piece.end > start:
            result.append(Piece(piece.name, start, piece.end))
    return result


def merge_intervals(pieces: Sequence[Piece]) -> list[Piece]:
    """Return pieces of one name in order, those that touch or overlap as one."""
    merged: list[Piece] = []
    for piece in sorted(pieces, key=lambda each: each.start):
        if piece.end <= piece.start:
            continue
        if merged and piece.start <= merged[-1].end:
            merged[-1] = Piece(piece.name, merged[-1].start, max(merged[-1].end, piece.end))
        else:
            merged.append(piece)
    return merged
