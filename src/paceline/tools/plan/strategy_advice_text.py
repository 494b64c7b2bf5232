"""The advice of `paceline.tools.plan.strategy_advice` as text (pure)."""

from __future__ import annotations

from paceline._core.format import format_seconds
from paceline.tools.plan.strategy_advice import RankBatch, ScalingPoint, StepAdvice

__all__ = ["SCALING_COLUMNS", "advice_sentences", "scaling_rows"]

SCALING_COLUMNS = ("ranks", "how", "a step", "range", "samples/s", "efficiency", "range")

_CURES = {
    "computing": "larger or more processors, or fewer samples; more bandwidth would hardly help",
    "communication": "sending less, or a faster network",
    "the update": "sharding it, so that each rank updates its part",
}


def advice_sentences(advice: StepAdvice, batch: RankBatch) -> list[str]:
    """Return what to do and expect, what limits it, and what would help, most first."""
    last = advice.points[-1]
    lines = [
        f"Synchronise with {advice.best.strategy.label}: a step of {batch.samples} samples per rank takes "
        f"{format_seconds(last.seconds)} ({format_seconds(last.low)} to {format_seconds(last.high)}), "
        f"{last.samples_per_second:.3g} samples/s on {last.ranks} ranks."
    ]
    if advice.default is not None:
        extra = last.seconds - advice.best.seconds
        ratio = (advice.default.seconds + extra) / last.seconds
        lines.append(
            f"That is {ratio:.2f}× faster than torch DDP's default."
            if ratio > 1
            else "torch DDP's default would be as fast."
        )
    lines.append(
        f"Scaling efficiency on {last.ranks} ranks: {_percent(last.efficiency)} "
        f"({_percent(last.least)} to {_percent(last.most)})."
    )
    parts = ", ".join(f"{name} {_percent(share)}" for name, share in advice.shares.items())
    lines.append(f"Limited by {advice.limit} (of a step: {parts}): what helps is {_CURES[advice.limit]}.")
    remedies = [
        f"{each.what}: {each.factor:.2f}× the samples/s" + (f" ({each.cost})" if each.cost else "")
        for each in advice.remedies
    ]
    lines.append(
        f"What would help most: {'; '.join(remedies)}."
        if remedies
        else "No single change that was tried makes it noticeably faster."
    )
    notes = [note for point in advice.points if point.beyond for note in point.beyond.split("; ")]
    return [*lines, f"Beyond what was measured: {'; '.join(dict.fromkeys(notes))}."] if notes else lines


def scaling_rows(advice: StepAdvice) -> list[tuple[str, ...]]:
    """Return a row of cells per number of ranks; see `SCALING_COLUMNS`."""
    return [_scaling_row(point) for point in advice.points]


def _scaling_row(point: ScalingPoint) -> tuple[str, ...]:
    return (
        str(point.ranks),
        "alone" if point.strategy is None else point.strategy.label,
        format_seconds(point.seconds),
        f"{format_seconds(point.low)} – {format_seconds(point.high)}",
        f"{point.samples_per_second:.3g}",
        _percent(point.efficiency),
        f"{_percent(point.least)} – {_percent(point.most)}",
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
