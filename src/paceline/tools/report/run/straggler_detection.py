"""Straggler detection by the times at which ranks launch the last collective of a step.

An all-reduce ends at the same time on all ranks, so step timers show the same values everywhere, whichever rank is
slow. The launch times differ: all ranks wait for the one that launches the last call of a step last, and after that
only for the network. So exposed communication has two parts: *imbalance* until the last launch, and *transfer*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from paceline.tools.report.run.step_breakdown import PHASES, exposed_intervals, step_parts
from paceline.tools.report.run.trace_reader import RankTrace, TracedStep

__all__ = ["Arrivals", "RankArrivals", "StragglerBreakdown", "compare_arrivals"]

_MIN_LAST_SHARE = 0.5
"""Share of the steps in which a straggler is last, at least."""

_MIN_LATENESS = 0.03
"""Lateness of a straggler, at least, as a share of the step."""


@dataclass(frozen=True, kw_only=True)
class RankArrivals:
    """Arrivals of one rank at the last collective of its steps.

    Attributes:
        rank: the rank.
        last_share: share of the steps in which it was last.
        lateness: seconds behind the median of the others, median over steps; negative if earlier.
        lateness_p95: the same, 95th percentile over steps.
        imbalance: mean exposed seconds per step until the last rank's launch.
        transfer: mean exposed seconds per step after that.
    """

    rank: int
    last_share: float
    lateness: float
    lateness_p95: float
    imbalance: float
    transfer: float


@dataclass(frozen=True, kw_only=True)
class StragglerBreakdown:
    """The rank that the others wait for, compared with them; medians over steps.

    Attributes:
        rank: the rank.
        last_share: share of the steps in which it was last.
        lateness: seconds behind the others.
        excess: seconds by which each part of its step takes longer than on the others.
        parts: seconds of each part of its step.
        other_parts: the same of the other ranks.
        cpu: processor seconds per step.
        others_cpu: the same of the other ranks.
        preempted: preemptions per step.
        others_preempted: the same of the other ranks.
        samples: samples per step; 0 if not counted.
        others_samples: the same of the other ranks.
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
    """Arrivals of all ranks.

    Attributes:
        steps: number of compared steps.
        ranks: arrivals by rank.
        straggler: the straggler, if any.
        clock_error: largest error between the clocks of two ranks, in seconds.
    """

    steps: int = 0
    ranks: tuple[RankArrivals, ...] = ()
    straggler: StragglerBreakdown | None = None
    clock_error: float = 0.0


def compare_arrivals(ranks: Mapping[int, RankTrace]) -> Arrivals:
    """Return the arrivals over all steps recorded by all ranks; empty for fewer than two ranks."""
    steps_of_rank = {rank: {each.step: each for each in trace.warm} for rank, trace in ranks.items()}
    if len(steps_of_rank) < 2:
        return Arrivals()
    common = sorted(set.intersection(*(set(steps) for steps in steps_of_rank.values())))
    compared: list[tuple[dict[int, TracedStep], dict[int, float]]] = []
    for step in common:
        lines = {rank: each[step] for rank, each in steps_of_rank.items()}
        moments = {rank: _arrival(line) for rank, line in lines.items()}
        known = {rank: moment for rank, moment in moments.items() if moment is not None}
        if len(known) == len(moments):
            compared.append((lines, known))
    if not compared:
        return Arrivals()
    arrivals = tuple(_rank(rank, compared) for rank in sorted(steps_of_rank))
    error = 2 * max(each.clock_error for each in ranks.values())
    return Arrivals(len(compared), arrivals, _straggler(arrivals, compared, error), error)


def _arrival(line: TracedStep) -> float | None:
    """Return when a rank launched the last reduction of a step, in unix seconds; None without reductions."""
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
    return RankArrivals(
        rank=rank,
        last_share=last / steps,
        lateness=median(late),
        lateness_p95=often,
        imbalance=imbalance / steps,
        transfer=transfer / steps,
    )


def _split(line: TracedStep, last: float) -> tuple[float, float]:
    """Return the exposed seconds of a step before and after the last rank's launch."""
    before = after = 0.0
    for piece in exposed_intervals(line):
        before += max(0.0, min(piece.end, last) - piece.start)
        after += max(0.0, piece.end - max(piece.start, last))
    return before, after


def _straggler(
    ranks: Sequence[RankArrivals],
    compared: Sequence[tuple[dict[int, TracedStep], dict[int, float]]],
    error: float,
) -> StragglerBreakdown | None:
    slowest = max(ranks, key=lambda each: each.lateness)
    step = median(line.seconds for lines, _ in compared for line in lines.values())
    if slowest.last_share < _MIN_LAST_SHARE or slowest.lateness < max(_MIN_LATENESS * step, error):
        return None
    rank = slowest.rank
    own = [lines[rank] for lines, _ in compared]
    others = [line for lines, _ in compared for other, line in lines.items() if other != rank]
    parts, theirs = _medians(own), _medians(others)
    return StragglerBreakdown(
        rank=rank,
        last_share=slowest.last_share,
        lateness=slowest.lateness,
        excess={name: parts[name] - theirs[name] for name in parts if name != "exposed"},
        parts=parts,
        other_parts=theirs,
        cpu=median(line.cpu for line in own),
        others_cpu=median(line.cpu for line in others),
        preempted=median(line.preempted for line in own),
        others_preempted=median(line.preempted for line in others),
        samples=median(line.samples for line in own),
        others_samples=median(line.samples for line in others),
    )


def _medians(lines: Sequence[TracedStep]) -> dict[str, float]:
    parts = [step_parts(line) for line in lines]
    return {name: median(each[name] for each in parts) for name in (*PHASES, "between")}
