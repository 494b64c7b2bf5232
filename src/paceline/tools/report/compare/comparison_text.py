"""Sentences that compare two runs: the verdict on speed, the losses, and how far both can be trusted."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean, stdev

from paceline._core.format import format_number, format_ratio, format_seconds
from paceline.tools.report.compare.run_comparison import ComparedRun, SpeedRatio, mean_phases
from paceline.tools.report.run.run_records import LoggedStep

__all__ = ["comparison_headline", "difference", "loss_sentence", "speed_sentence"]

_PHASE_NAMES = {"data": "waiting for data", "exposed": "exposed communication", "other": "other work"}
_MIN_LOSSES = 5


def comparison_headline(first: ComparedRun, second: ComparedRun, speed: SpeedRatio | None) -> list[str]:
    """Return the verdict on speed, the losses, and what the interval does not cover."""
    sentences = [speed_sentence(first, second, speed)]
    if loss := loss_sentence(first, second):
        sentences.append(loss)
    if speed is not None:
        sentences.append(
            "The interval covers the spread of the steps within these two runs. Repeated runs differ by more, for "
            "example by the load of the machines: repeat both before relying on a small difference."
        )
    return sentences


def speed_sentence(first: ComparedRun, second: ComparedRun, speed: SpeedRatio | None) -> str:
    """Return the verdict on speed in one sentence."""
    if speed is None:
        return "Their speed can't be compared: fewer than 10 steps of a run were timed."
    interval = f"95 % interval {_times(speed.low)} to {_times(speed.high)}"
    times = f"{format_seconds(speed.second)} per {speed.per} instead of {format_seconds(speed.first)}"
    if not speed.shown:
        return f"No difference in speed can be shown: {second.name} takes {times} ({interval} as fast)."
    return (
        f"{second.name} is {difference(speed.ratio)} than {first.name}: {times} ({interval} as fast)"
        f"{_cause(first, second, speed)}."
    )


def _times(ratio: float) -> str:
    return f"{ratio:.3g}×" if ratio < 9.95 else format_ratio(ratio)


def difference(ratio: float) -> str:
    """Return how much faster something is whose speed has this ratio.

    Example:
        >>> difference(2.5), difference(1.2), difference(0.8), difference(0.25)
        ('2.5× faster', '20 % faster', '20 % slower', '4× slower')
    """
    if ratio >= 2 or ratio <= 0.5:
        times = ratio if ratio > 1 else 1 / ratio
        return f"{_times(times)} {'faster' if ratio > 1 else 'slower'}"
    return f"{abs(100 * (ratio - 1)):.2g} % {'faster' if ratio > 1 else 'slower'}"


def _cause(first: ComparedRun, second: ComparedRun, speed: SpeedRatio) -> str:
    """Return which phase explains most of a difference per step; empty if unknown."""
    one, other = mean_phases(first.summary), mean_phases(second.summary)
    if not one or not other or speed.per != "step":
        return ""
    sign = 1 if speed.ratio > 1 else -1
    saved = {phase: sign * (one[phase] - other[phase]) for phase in one}
    phase = max(saved, key=saved.__getitem__)
    whole = sign * (sum(one.values()) - sum(other.values()))
    if whole <= 0 or saved[phase] < whole / 2:
        return ""
    name = _PHASE_NAMES.get(phase, phase)
    return f", mostly by {format_seconds(saved[phase])} {'less' if sign > 0 else 'more'} {name}"


def loss_sentence(first: ComparedRun, second: ComparedRun) -> str:
    """Return a sentence on the losses at the last step that both reached; empty if a loss is not logged."""
    held_out = _held_out(first, second)
    if held_out:
        step, one, other = held_out
        return (
            f"The held-out loss after {step:,} steps is {format_number(other)} against {format_number(one)}; "
            "one run each, so what another seed would change is unknown."
        )
    last = min(
        (max((step.step for step in each.run.steps), default=0) for each in (first, second)), default=0
    )
    losses = [_training(each, last) for each in (first, second)]
    if any(len(each) < 2 for each in losses):
        return ""
    one, other = (fmean(each) for each in losses)
    text = f"The training loss up to step {last:,} (last tenth) is {format_number(other)} against {format_number(one)}"
    if any(len(each) < _MIN_LOSSES for each in losses):
        return f"{text}, from too few values to judge."
    error = math.hypot(*(stdev(each) / math.sqrt(len(each)) for each in losses))
    if not math.isfinite(one - other):
        return f"{text}."
    return text + (
        ": a difference within its noise." if abs(one - other) <= 2 * error else ": more than its noise."
    )


def _held_out(first: ComparedRun, second: ComparedRun) -> tuple[int, float, float] | None:
    """Return the last step with a held-out loss in both runs, and both losses."""
    one, other = (_by_step(each, lambda step: step.val_loss) for each in (first, second))
    common = sorted(one.keys() & other.keys())
    return (common[-1], one[common[-1]], other[common[-1]]) if common and common[-1] > 1 else None


def _training(compared: ComparedRun, last: int) -> list[float]:
    losses = _by_step(compared, lambda step: step.loss)
    return [value for step, value in losses.items() if 0.9 * last <= step <= last and math.isfinite(value)]


def _by_step(compared: ComparedRun, value_of: Callable[[LoggedStep], float | None]) -> dict[int, float]:
    values = ((step.step, value_of(step)) for step in compared.run.steps)
    return {step: value for step, value in values if value is not None}
