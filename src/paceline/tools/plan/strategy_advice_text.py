"""The advice of `paceline.tools.plan.strategy_advice` in sentences (pure)."""

from __future__ import annotations

from paceline._core.format import format_seconds
from paceline.tools.plan.strategy_advice import RankBatch, ScalingPoint, StepAdvice

__all__ = ["advice_sentences", "scaling_rows"]

_CURES = {
    "computing": "larger or more processors, or fewer samples; more bandwidth would hardly help",
    "communication": "less to send, or a faster network",
    "the update": "sharding it, which leaves each rank its part of it",
}


def advice_sentences(advice: StepAdvice, batch: RankBatch) -> list[str]:
    """Return what to do, what to expect of it, what limits it and what would help, most first."""
    last = advice.points[-1]
    told = [
        f"Synchronise with {advice.best.strategy.label}: a step of {batch.samples} samples a rank takes "
        f"{_range(last)}, {last.samples_per_second:.3g} samples/s on {last.ranks} ranks."
    ]
    if advice.default is not None:
        extra = last.seconds - advice.best.seconds
        times = (advice.default.seconds + extra) / last.seconds
        told.append(
            f"torch DDP as it comes would take {times:.2f} times as long."
            if times > 1
            else "torch DDP as it comes would take as long."
        )
    told += [
        f"Of what {last.ranks} ranks by themselves would do, {_percent(last.efficiency)} is left "
        f"({_percent(last.least)} to {_percent(last.most)}).",
        _limit(advice),
        _helps(advice),
    ]
    beyond = dict.fromkeys(
        note for point in advice.points if point.beyond for note in point.beyond.split("; ")
    )
    told += [f"Beyond what was measured: {'; '.join(beyond)}."] if beyond else []
    return [each for each in told if each]


def scaling_rows(advice: StepAdvice) -> list[tuple[str, ...]]:
    """Return the table: ranks, how, a step, its range, samples per second, efficiency and its range."""
    return [
        (
            str(point.ranks),
            "alone" if point.strategy is None else point.strategy.label,
            format_seconds(point.seconds),
            f"{format_seconds(point.low)} – {format_seconds(point.high)}",
            f"{point.samples_per_second:.3g}",
            _percent(point.efficiency),
            f"{_percent(point.least)} – {_percent(point.most)}",
        )
        for point in advice.points
    ]


def _limit(advice: StepAdvice) -> str:
    parts = ", ".join(f"{name} {_percent(share)}" for name, share in advice.shares.items())
    return f"Limited by {advice.limit} (of a step: {parts}): what helps is {_CURES[advice.limit]}."


def _helps(advice: StepAdvice) -> str:
    if not advice.remedies:
        return "No single change that was tried makes it noticeably faster."
    told = [
        f"{each.what}: {each.factor:.2f} times the samples/s" + (f" ({each.cost})" if each.cost else "")
        for each in advice.remedies
    ]
    return f"What would help most: {'; '.join(told)}."


def _range(point: ScalingPoint) -> str:
    return f"{format_seconds(point.seconds)} ({format_seconds(point.low)} to {format_seconds(point.high)})"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
