"""Who is waited for: by the moments at which ranks arrive at a step's exchange.

An all-reduce ends at the same time on all ranks, so timers around a step show the same everywhere, whoever is slow.
What differs is when a rank comes to it. Of each step the call that closes it is looked at: the rank that launches it
last is the one that all others wait for, and from then on only the network is waited for. So exposed communication
has two parts: *imbalance*, until the last rank is there, and *transfer*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from paceline.tools.report.run.step_breakdown import PHASES, exposed_intervals, step_parts
from paceline.tools.report.run.trace_reader import RankTrace, TracedStep

__all__ = ["Arrivals", "RankArrivals", "Straggler", "compare_arrivals"]

_OFTEN = 0.5
"""Of the steps in which a straggler is the last one."""

_CONSIDERABLE = 0.03
"""Of the step: what others wait for a rank, below which nobody is called a straggler."""


@dataclass(frozen=True)
class RankArrivals:
    """When one rank comes to the exchanges of its steps.

    Attributes:
        rank: the rank. last: share of the steps in which it was the last one.
        late: seconds by which it is behind the median of the others, median over steps; negative: before them.
        late_often: the same, as it is in the worst twentieth of the steps.
        imbalance, transfer: mean seconds of a step that it stands still until the last rank is there, and after that.
    """

    rank: int
    last_share: float
    lateness: float
    lateness_p95: float
    imbalance: float
    transfer: float


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for, and why.

    Attributes:
        rank: who. last: share of the steps in which it was the last one. late: seconds behind the others, median.
        longer: for each part of a step, the seconds by which it takes longer than the others' median.
        parts, others: seconds of each part, its own and the others' median.
        cpu, others_cpu: processor seconds of a step. preempted, others_preempted: how often a step.
        samples, others_samples: of a step; 0 where nobody counts them.
    """

    rank: int
    last_share: float
    lateness: float
    excess: Mapping[str, float]
    parts: Mapping[str, float]
    other_parts: Mapping[str, float]
    cpu: float
    others_cpu: float
    preempted: float
    others_preempted: float
    samples: float
    others_samples: float


@dataclass(frozen=True)
class Arrivals:
    """What the arrivals of all ranks tell.

    Attributes:
        steps: how many were compared. ranks: by rank.
        straggler: None where there is none.
        clock_error: by how much the times of two ranks may be off from each other, in seconds.
    """

    steps: int = 0
    ranks: tuple[RankArrivals, ...] = ()
    straggler: Straggler | None = None
    clock_error: float = 0.0


def compare_arrivals(ranks: Mapping[int, RankTrace]) -> Arrivals:
    """Return who arrives when, over all steps that all ranks have a line of; nothing for fewer than two ranks."""
    lines_of_rank = {rank: {line.step: line for line in each.warm} for rank, each in ranks.items()}
    if len(lines_of_rank) < 2:
        return Arrivals()
    common = sorted(set.intersection(*(set(lines) for lines in lines_of_rank.values())))
    compared: list[tuple[dict[int, TracedStep], dict[int, float]]] = []
    for step in common:
        lines = {rank: each[step] for rank, each in lines_of_rank.items()}
        moments = {rank: _arrival(line) for rank, line in lines.items()}
        known = {rank: moment for rank, moment in moments.items() if moment is not None}
        if len(known) == len(moments):
            compared.append((lines, known))
    if not compared:
        return Arrivals()
    told = tuple(_rank(rank, compared) for rank in sorted(lines_of_rank))
    error = 2 * max(each.clock_error for each in ranks.values())
    return Arrivals(len(compared), told, _straggler(told, compared, error), error)


def _arrival(line: TracedStep) -> float | None:
    """Return when a rank came to the last reduction of a step, in unix seconds; None: it had none."""
    launched = [call.launched for call in line.calls if call.kind == "reduce"]
    return line.start + max(launched) if launched else None


def _rank(rank: int, compared: Sequence[tuple[dict[int, TracedStep], dict[int, float]]]) -> RankArrivals:
    late, last, imbalance, transfer = [], 0, 0.0, 0.0
    for lines, moments in compared:
        others = [moment for other, moment in moments.items() if other != rank]
        late.append(moments[rank] - median(others))
        last += moments[rank] > max(others)
        line = lines[rank]
        before, after = _split(line, max(moments.values()) - line.start)
        imbalance, transfer = imbalance + before, transfer + after
    steps = len(compared)
    often = sorted(late)[min(steps - 1, int(0.95 * steps))]
    return RankArrivals(rank, last / steps, median(late), often, imbalance / steps, transfer / steps)


def _split(line: TracedStep, last: float) -> tuple[float, float]:
    """Return the exposed seconds of a step before and after the last rank has come to its last reduction."""
    before = after = 0.0
    for piece in exposed_intervals(line):
        before += max(0.0, min(piece.end, last) - piece.start)
        after += max(0.0, piece.end - max(piece.start, last))
    return before, after


def _straggler(
    ranks: Sequence[RankArrivals],
    compared: Sequence[tuple[dict[int, TracedStep], dict[int, float]]],
    error: float,
) -> Straggler | None:
    """Return the rank that is last most often and late enough for others to wait, None if no rank is."""
    slowest = max(ranks, key=lambda each: each.lateness)
    step = median(line.seconds for lines, _ in compared for line in lines.values())
    if slowest.last_share < _OFTEN or slowest.lateness < max(_CONSIDERABLE * step, error):
        return None
    rank = slowest.rank
    own = [lines[rank] for lines, _ in compared]
    others = [line for lines, _ in compared for other, line in lines.items() if other != rank]
    parts, theirs = _medians(own), _medians(others)
    return Straggler(
        rank,
        slowest.last_share,
        slowest.lateness,
        {name: parts[name] - theirs[name] for name in parts if name != "exposed"},
        parts,
        theirs,
        *(median(getattr(line, what) for line in lines) for what in _COUNTED for lines in (own, others)),
    )


_COUNTED = ("cpu", "preempted", "samples")


def _medians(lines: Sequence[TracedStep]) -> dict[str, float]:
    parts = [step_parts(line) for line in lines]
    return {name: median(each[name] for each in parts) for name in (*PHASES, "between")}
