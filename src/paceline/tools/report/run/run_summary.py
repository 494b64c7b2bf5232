"""Key numbers of a run: step time by phase and rank, throughput, losses, communication.

The first step of every session is excluded if there are more, since it includes one-time costs (page faults, bucket
planning).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from paceline.tools.report.run.run_records import LoggedStep, RecordedRun
from paceline.tools.report.run.step_breakdown import (
    PHASES,
    backward_slowdown,
    mean_parts,
    seconds_without_tasks,
)
from paceline.tools.report.run.straggler_detection import Arrivals, compare_arrivals
from paceline.tools.report.run.trace_reader import RankTrace, TracedCall, read_timeline

__all__ = ["PHASES", "RankTime", "RunSummary", "rank_time", "summarise_run"]


@dataclass(frozen=True)
class RankTime:
    """Mean time of one rank's steps by phase.

    Attributes:
        rank: the rank.
        steps: number of steps.
        seconds: mean seconds per step of each of `PHASES`.
        between: mean seconds per step in held-out losses, checkpoints and other tasks.
        slowed: exposed seconds due to backward being slowed down by communication.
    """

    rank: int
    steps: int
    seconds: Mapping[str, float]
    between: float = 0.0
    slowed: float = 0.0

    @property
    def total(self) -> float:
        """Mean seconds of a step."""
        return sum(self.seconds.values())

    def share(self, phase: str) -> float:
        """Return the share of a phase in this rank's time, 0 to 1."""
        return self.seconds[phase] / self.total if self.total else 0.0

    @property
    def computing(self) -> float:
        """Share of this rank's time spent computing, 0 to 1."""
        return self.share("forward") + self.share("backward") + self.share("optimizer")


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Key numbers of a run; None if not recorded.

    Attributes:
        steps: number of the last step that was logged or recorded, from 1.
        step_seconds: median time of a step.
        tokens_per_second: throughput of all ranks, median over the logged steps.
        exposed_share: share of exposed communication in the step: the mean over ranks of the trace, otherwise the
            median of the logged steps.
        loss_first: training loss of the first logged step.
        loss_last: mean training loss of the last tenth of the logged steps.
        val_loss_first: first held-out loss.
        val_loss_last: last held-out loss.
        ranks: step time by phase of each rank; empty without a timeline.
        calls: collectives per step of rank 0, mean.
        nbytes: bytes per step passed to collectives by rank 0, mean.
        arrivals: arrivals of ranks at the exchange of a step.
        timelines: each rank's steps.
        samples_per_second: throughput of all ranks, if tokens are not counted.
        durations: (number from 1, seconds) of steps, without quiet ones, the first of a session, and tasks.
    """

    steps: int
    step_seconds: float | None
    tokens_per_second: float | None
    exposed_share: float | None
    loss_first: float | None
    loss_last: float | None
    val_loss_first: float | None
    val_loss_last: float | None
    ranks: tuple[RankTime, ...]
    calls: float | None
    nbytes: float | None
    arrivals: Arrivals = field(default_factory=Arrivals)
    timelines: Mapping[int, RankTrace] = field(default_factory=dict)
    samples_per_second: float | None = None
    durations: tuple[tuple[int, float], ...] = ()

    @property
    def speed(self) -> tuple[float, str] | None:
        """Throughput of all ranks and its unit: tokens if counted, otherwise samples."""
        if self.tokens_per_second is not None:
            return self.tokens_per_second, "tokens"
        return None if self.samples_per_second is None else (self.samples_per_second, "samples")


def summarise_run(run: RecordedRun) -> RunSummary:
    """Return the key numbers of a run."""
    steps = run.steps
    timelines = {rank: read_timeline(spans) for rank, spans in run.spans_of_rank.items()}
    timed = tuple(rank_time(rank, each) for rank, each in timelines.items() if each.steps)
    held_out = [step.val_loss for step in steps if step.val_loss is not None]
    losses = [step.loss for step in steps if step.loss is not None]
    exposed = [rank.share("exposed") for rank in timed]
    durations = tuple(_durations(steps, timelines))
    return RunSummary(
        steps=max(steps[-1].step if steps else 0, _steps_done(timelines)),
        step_seconds=median(seconds for _, seconds in durations) if durations else _step_seconds(timed),
        tokens_per_second=_median(step.tokens_per_second for step in steps),
        exposed_share=fmean(exposed) if exposed else _median(step.exposed_share for step in steps),
        loss_first=losses[0] if losses else None,
        loss_last=fmean(losses[-max(1, len(losses) // 10) :]) if losses else None,
        val_loss_first=held_out[0] if held_out else None,
        val_loss_last=held_out[-1] if held_out else None,
        ranks=timed,
        calls=_per_step(timelines.get(0), lambda call: 1.0),
        nbytes=_per_step(timelines.get(0), lambda call: float(call.nbytes)),
        arrivals=compare_arrivals(timelines),
        timelines=timelines,
        samples_per_second=_median(step.samples_per_second for step in steps),
        durations=durations,
    )


def rank_time(rank: int, timeline: RankTrace) -> RankTime:
    """Return the mean time of one rank's steps by phase."""
    mean = mean_parts(timeline.warm)
    seconds = {phase: mean[phase] for phase in PHASES}
    return RankTime(rank, len(timeline.warm), seconds, mean["between"], backward_slowdown(timeline.warm))


def _durations(
    steps: Sequence[LoggedStep], timelines: Mapping[int, RankTrace]
) -> Iterator[tuple[int, float]]:
    """Yield the steps of the first rank with a trace, otherwise the logged ones."""
    timeline = next((each for each in timelines.values() if each.steps), None)
    if timeline is None:
        later = steps[1:] or steps
        yield from ((step.step, step.step_seconds) for step in later if step.step_seconds is not None)
        return
    usual = [line for line in timeline.warm if not line.quiet] or timeline.warm
    yield from ((line.step + 1, seconds_without_tasks(line)) for line in usual)


def _step_seconds(ranks: Sequence[RankTime]) -> float | None:
    return median(rank.total for rank in ranks) if ranks else None


def _steps_done(timelines: Mapping[int, RankTrace]) -> int:
    return max((each.steps[-1].step + 1 for each in timelines.values() if each.steps), default=0)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return median(known) if known else None


def _per_step(timeline: RankTrace | None, count: Callable[[TracedCall], float]) -> float | None:
    """Return the mean per step of the sum of `count` over calls; None without calls."""
    lines = timeline.warm if timeline is not None else ()
    counted = [sum(count(call) for call in line.calls) for line in lines]
    return fmean(counted) if any(counted) else None
