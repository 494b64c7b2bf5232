"""The numbers of a run. Pure functions over records.

Where the time of a step goes is read from each rank's timeline (`paceline.tools.report.run.step_breakdown`). The
first step of every session is left out where there are more: it pays for what happens once (first touch of memory,
planning of buckets).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from paceline.tools.report.run.rank_arrivals import Arrivals, compare_arrivals
from paceline.tools.report.run.run_records import RecordedRun
from paceline.tools.report.run.step_breakdown import PHASES, backward_slowdown, mean_parts
from paceline.tools.report.run.trace_reader import RankTrace, TracedCall, read_timeline

__all__ = ["PHASES", "RankTime", "RunSummary", "rank_time", "summarise_run"]


@dataclass(frozen=True)
class RankTime:
    """Where one rank's time went.

    Attributes:
        rank: the rank.
        steps: steps that were counted.
        seconds: for each of `PHASES` the mean time of a step, in seconds.
        between: mean seconds a step that went into held-out losses, checkpoints and other tasks.
        slowed: of the exposed seconds, those by which communication slows backward.
    """

    rank: int
    steps: int
    seconds: Mapping[str, float]
    between: float = 0.0
    slowed: float = 0.0

    @property
    def total(self) -> float:
        """Mean seconds of a step, all phases together."""
        return sum(self.seconds.values())

    def share(self, phase: str) -> float:
        """Return the share of `phase` in this rank's time, 0 to 1."""
        return self.seconds[phase] / self.total if self.total else 0.0

    @property
    def computing(self) -> float:
        """Share of this rank's time in which it computed, 0 to 1."""
        return self.share("forward") + self.share("backward") + self.share("optimizer")


@dataclass(frozen=True)
class RunSummary:
    """The numbers of a run; None where the run did not record them.

    Attributes:
        steps: the number of the last step that was logged or recorded; steps count from 1.
        step_seconds: median time of a step.
        tokens_per_second: median over the logged steps, all ranks together.
        exposed_share: share of the step in which ranks stood still for communication: the mean over
            ranks of the trace, or else the median of the logged steps.
        loss_first: training loss of the first logged step.
        loss_last: mean training loss of the last tenth of the logged steps.
        val_loss_first: first held-out loss.
        val_loss_last: last held-out loss.
        ranks: where each rank's time went; empty without a timeline.
        calls: collectives per step, mean of rank 0.
        nbytes: bytes per step that rank 0 handed to collectives, mean.
        arrivals: who comes when to the exchange of a step, and who is waited for.
        timelines: each rank's steps.
        samples_per_second: as `tokens_per_second`; what is told where nobody counts tokens.
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

    @property
    def speed(self) -> tuple[float, str] | None:
        """How many of what all ranks do in a second: tokens where they are counted, else samples."""
        if self.tokens_per_second is not None:
            return self.tokens_per_second, "tokens"
        return None if self.samples_per_second is None else (self.samples_per_second, "samples")


def summarise_run(run: RecordedRun) -> RunSummary:
    """Return the numbers of `run`."""
    steps = run.steps
    timelines = {rank: read_timeline(spans) for rank, spans in run.spans_of_rank.items()}
    timed = tuple(rank_time(rank, each) for rank, each in timelines.items() if each.steps)
    held_out = [step.val_loss for step in steps if step.val_loss is not None]
    losses = [step.loss for step in steps if step.loss is not None]
    exposed = [rank.share("exposed") for rank in timed]
    return RunSummary(
        steps=max(steps[-1].step if steps else 0, _steps_done(timelines)),
        step_seconds=_median(step.step_seconds for step in steps) or _step_seconds(timed),
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
    )


def rank_time(rank: int, timeline: RankTrace) -> RankTime:
    """Return where the time of one rank went."""
    mean = mean_parts(timeline.warm)
    seconds = {phase: mean[phase] for phase in PHASES}
    return RankTime(rank, len(timeline.warm), seconds, mean["between"], backward_slowdown(timeline.warm))


def _step_seconds(ranks: Sequence[RankTime]) -> float | None:
    return median(rank.total for rank in ranks) if ranks else None


def _steps_done(timelines: Mapping[int, RankTrace]) -> int:
    return max((each.steps[-1].step + 1 for each in timelines.values() if each.steps), default=0)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return median(known) if known else None


def _per_step(timeline: RankTrace | None, count: Callable[[TracedCall], float]) -> float | None:
    """Return the mean per step of what is counted of each call; None where nothing was called."""
    lines = timeline.warm if timeline is not None else ()
    counted = [sum(count(call) for call in line.calls) for line in lines]
    return fmean(counted) if any(counted) else None
