"""Sentences about how often to save: what to pass, what is then lost, how much it matters, what is unknown."""

from __future__ import annotations

from paceline._core.format import format_duration, format_percent, plural
from paceline.checkpoint.save_interval import FailureModel, daly_interval
from paceline.tools.plan.checkpoint_interval import CheckpointPlan, IntervalLosses

__all__ = ["checkpoint_findings", "format_loss"]

_NOTICEABLE = 0.001
"""Share of all time from which a difference is worth a sentence."""
_HARDLY = 0.5
"""Share lost from which a job is said to hardly advance."""


def checkpoint_findings(plan: CheckpointPlan) -> list[str]:
    """Return sentences about a plan, the most important first."""
    found = [_advice(plan), _loss(plan.recommended)]
    if plan.present is not None:
        found.append(_compared(plan, plan.present))
    if plan.is_bound:
        found.append(_bound(plan))
    low, high = plan.flat
    if high > low:
        found.append(
            f"The optimum is flat: from {format_duration(low)} to {format_duration(high)}, waiting for saves and lost "
            "work add up to at most a tenth more."
        )
    if plan.rate.failures is not None:
        found.append(_confidence(plan))
    return found


def _advice(plan: CheckpointPlan) -> str:
    text = f'Save every {format_duration(plan.seconds)} of training: pass every="{plan.every}" to paceline.Checkpoint'
    if plan.steps is None:
        return f"{text}."
    return f"{text}, or every={plan.steps}, in steps (paceline train: --checkpoint-every {plan.steps})."


def _loss(losses: IntervalLosses) -> str:
    parts = (
        f"{format_loss(losses.saves)} waiting for saves, {format_loss(losses.work)} in work that failures undo, "
        f"{format_loss(losses.restarts)} in restarts"
    )
    text = f"{format_loss(losses.total)} of all time is then lost: {parts}."
    if losses.total >= _HARDLY:
        text += " The job hardly advances: restart faster, or find out why it fails."
    return text


def _compared(plan: CheckpointPlan, now: IntervalLosses) -> str:
    more = now.total - plan.recommended.total
    text = f"Now it is {format_loss(now.total)}, with {format_duration(now.interval)} of training between two saves"
    return f"{text}: no change is needed." if more < _NOTICEABLE else f"{text}, {_points(more)} more."


def _bound(plan: CheckpointPlan) -> str:
    costs = plan.costs
    of_failures = daly_interval(FailureModel(plan.rate.mtbf, costs.stall))
    if costs.step is not None and costs.step >= costs.complete - costs.stall:
        return f"Failures suggest {format_duration(of_failures)}, but a step takes {format_duration(costs.step)}."
    return (
        f"Failures suggest {format_duration(of_failures)}, but a checkpoint is complete only after "
        f"{format_duration(costs.complete)}, and the next save waits for that: write to a faster disk, or less."
    )


def _confidence(plan: CheckpointPlan) -> str:
    """Say what so few failures leave open, and how little that matters."""
    rate, (low, high) = plan.rate, plan.best_range
    assert rate.failures is not None
    text = (
        f"{plural(rate.failures, 'failure')} in {format_duration(rate.seconds)}: with 95 % confidence, one in "
        f"{format_duration(rate.low)} to {format_duration(rate.high)} on average"
    )
    if low == high:
        return f"{text}; the best interval is the same for both."
    more = "hardly more" if plan.regret < _NOTICEABLE else f"at most {_points(plan.regret)} more"
    return (
        f"{text}, and the best interval is {format_duration(low)} to {format_duration(high)}. "
        f'every="{plan.every}" loses {more} than the best for either.'
    )


def _points(share: float) -> str:
    """Return a difference of two shares in percentage points."""
    return f"{100 * share:.2g} points"


def format_loss(share: float) -> str:
    """Return a lost share in per cent, without an exponent.

    Example:
        >>> format_loss(0.0123), format_loss(8.1e-7)
        ('1.2 %', '< 0.001 %')
    """
    return "< 0.001 %" if 0 < share < 1e-5 else format_percent(share)
