"""The numbers of a run. Pure functions over records.

Where the time of a step goes is read from each rank's trace, by the names of its spans:

    data        getting the next batch
    forward     the model's outputs and the loss
    backward    gradients, with whatever was waited for inside
    optimizer   the update, with whatever was waited for inside
    exposed     standing still for communication
    step        the whole step

`exposed` usually lies inside `backward` and `optimizer`; it is taken out of the phase in which it began, so that
phases add up. What is left of `step` is "other". `eval` and `checkpoint` spans lie between steps. The first step
of a trace is left out where there are more: it pays for what happens once (first touch of memory, planning of
buckets). Where `exposed` spans carry ``calls`` and ``nbytes``, these are the step's collectives and their payload.
In the trace of a program with no `exposed` spans, the engine's own `exchange` and `gather` stand in: its waits in
backward and in the update.

Times are those of the host: on a GPU a phase ends when its work was handed over, and the time that it takes shows
where the host first needs a result.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from paceline.report.records import Run, Span, Step

__all__ = ["PHASES", "RankTime", "Summary", "rank_time", "summarize"]

PHASES = ("data", "forward", "backward", "exposed", "optimizer", "other")
_HOLDS_EXPOSED = ("forward", "backward", "optimizer")
_BETWEEN_STEPS = ("eval", "checkpoint")
_OF_THE_ENGINE = ("exchange", "gather")


@dataclass(frozen=True)
class RankTime:
    """Where one rank's time went.

    Attributes:
        rank: the rank.
        steps: steps that were counted.
        seconds: for each of `PHASES` the time in all counted steps, in seconds.
        between: seconds between these steps that went into held-out losses and checkpoints.
    """

    rank: int
    steps: int
    seconds: Mapping[str, float]
    between: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of all phases together."""
        return sum(self.seconds.values())

    def share(self, phase: str) -> float:
        """Return the share of `phase` in this rank's time, 0 to 1."""
        return self.seconds[phase] / self.total if self.total else 0.0

    @property
    def computing(self) -> float:
        """Share of this rank's time in which it computed, 0 to 1."""
        return self.share("forward") + self.share("backward") + self.share("optimizer")


@dataclass(frozen=True)
class Summary:
    """The numbers of a run; None where the run did not record them.

    Attributes:
        steps: the number of the last logged step; steps count from 1.
        step_seconds: median time of a step.
        tokens_per_second: median over the logged steps, all ranks together.
        exposed_share: share of the step in which ranks stood still for communication: the mean over
            ranks of the trace, or else the median of the logged steps.
        loss_first: training loss of the first logged step.
        loss_last: mean training loss of the last tenth of the logged steps.
        val_loss_first: first held-out loss.
        val_loss_last: last held-out loss.
        ranks: where each rank's time went; empty without a trace.
        calls: collectives per step, mean, as rank 0 counted them.
        nbytes: bytes per step that rank 0 handed to collectives, mean.
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


def summarize(run: Run) -> Summary:
    """Return the numbers of `run`."""
    steps = run.steps
    ranks = tuple(rank_time(rank, spans) for rank, spans in run.spans_of_rank.items())
    timed = tuple(rank for rank in ranks if rank.total)
    held_out = [step.val_loss for step in steps if step.val_loss is not None]
    exposed = [rank.share("exposed") for rank in timed]
    return Summary(
        steps=steps[-1].step if steps else 0,
        step_seconds=_median(step.step_seconds for step in steps),
        tokens_per_second=_median(step.tokens_per_second for step in steps),
        exposed_share=fmean(exposed) if exposed else _median(step.exposed_share for step in steps),
        loss_first=steps[0].loss if steps else None,
        loss_last=_last_loss(steps),
        val_loss_first=held_out[0] if held_out else None,
        val_loss_last=held_out[-1] if held_out else None,
        ranks=timed,
        calls=_per_step(run.spans_of_rank.get(0, ()), "calls"),
        nbytes=_per_step(run.spans_of_rank.get(0, ()), "nbytes"),
    )


def rank_time(rank: int, spans: Sequence[Span]) -> RankTime:
    """Return where the time of one rank went, by the rule that this module's text states."""
    spans = _after_first_step(spans)
    seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    for span in spans:
        if span.name in ("data", "forward", "backward", "optimizer"):
            seconds[span.name] += span.seconds
    seconds["exposed"] = sum(span.seconds for span in _exposed(spans))
    for phase, inside in _exposed_inside(spans).items():
        seconds[phase] = max(0.0, seconds[phase] - inside)
    whole_steps = [span.seconds for span in spans if span.name == "step"]
    seconds["other"] += max(0.0, sum(whole_steps) - sum(seconds.values()))
    steps = len(whole_steps) or sum(span.name == "optimizer" for span in spans)
    between = sum(span.seconds for span in spans if span.name in _BETWEEN_STEPS)
    return RankTime(rank, steps, seconds, between)


def _after_first_step(spans: Sequence[Span]) -> Sequence[Span]:
    ends = sorted(span.end for span in spans if span.name == "step")
    if len(ends) < 2:
        return spans
    return [span for span in spans if span.start >= ends[0] - 1e-6]


def _exposed(spans: Sequence[Span]) -> list[Span]:
    own = [span for span in spans if span.name == "exposed"]
    return own or [span for span in spans if span.name in _OF_THE_ENGINE]


def _exposed_inside(spans: Sequence[Span]) -> dict[str, float]:
    """Return, for each phase, the exposed seconds that began inside of it."""
    inside: dict[str, float] = dict.fromkeys(_HOLDS_EXPOSED, 0.0)
    holders = sorted((span for span in spans if span.name in _HOLDS_EXPOSED), key=lambda span: span.start)
    starts = [span.start for span in holders]
    for span in _exposed(spans):
        index = bisect_right(starts, span.start + 1e-6) - 1
        if index >= 0 and span.start <= holders[index].end:
            inside[holders[index].name] += span.seconds
    return inside


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return median(known) if known else None


def _last_loss(steps: Sequence[Step]) -> float | None:
    last = steps[-max(1, len(steps) // 10) :]
    return fmean(step.loss for step in last) if last else None


def _per_step(spans: Sequence[Span], key: str) -> float | None:
    """Return the mean per step of what the exposed spans carry as `key`; None where they don't."""
    spans = _after_first_step(spans)
    steps = sum(span.name == "step" for span in spans)
    values = [span.fields.get(key) for span in _exposed(spans)]
    known = [value for value in values if isinstance(value, int | float)]
    return sum(known) / steps if known and steps else None
