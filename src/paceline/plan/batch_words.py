"""What devices, batch and thresholds mean, in sentences (pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.plan.batch import BatchSplit, States, device_nbytes
from paceline.plan.compute_bound import Threshold
from paceline.units import format_decimal

if TYPE_CHECKING:
    from paceline.plan.batch_answer import Asked

__all__ = ["bound_words", "devices_of", "least_words", "split_words"]


def least_words(asked: Asked, states: States, least: int | None) -> str:
    """Return how many devices it takes at least, or why no number is enough."""
    room = asked.memory * asked.usable
    if least is None:
        alone = states.whole + (1 - asked.shared) * asked.sample_activations
        return (
            f"No number of devices is enough: each would have to hold {format_decimal(alone)} by itself, and "
            f"{format_decimal(room)} may be used. Share more (fsdp), recompute activations, or take shorter samples."
        )
    held = device_nbytes(states, asked.sample_activations, least, asked.shared)
    return (
        f"At least {devices_of(least)}: each then holds {format_decimal(held)} of the {format_decimal(room)} that may "
        "be used" + (", activations not counted." if asked.token_activations is None else ".")
    )


def split_words(split: BatchSplit) -> list[str]:
    """Return how a global batch is dealt, and what becomes of it where it does not divide."""
    said = [
        f"Global batch {split.asked}: {split.ranks} ranks, {split.accumulation} micro-batch"
        f"{'es' * (split.accumulation > 1)} of {'up to ' * bool(split.missing)}{split.micro} samples."
        + (f" {split.idle} devices stay idle: there are fewer samples than devices." if split.idle else "")
    ]
    if split.missing:
        said.append(_rest_words(split))
    return said


def _rest_words(split: BatchSplit) -> str:
    """Return what becomes of a global batch that does not divide."""
    least, most = split.rank_samples
    if least < most:
        said = f"It does not divide by {split.ranks} ranks: they have {least} or {most} samples a step"
    else:
        parts = split.accumulation
        said = f"A rank's {most} samples don't divide by {parts}: micro-batches have {most // parts} or {split.micro}"
    near = " or ".join(str(each) for each in (split.below, split.above) if each)
    same = "" if split.exact is None else f", or {split.asked} as {split.exact.told}"
    return f"{said}, which Paceline weighs exactly. All alike are {near}{same} (micro-batch × accumulation × ranks)."


def bound_words(asked: Asked, split: BatchSplit | None, thresholds: dict[str, Threshold]) -> list[str]:
    """Return for each threshold whether the split's devices have enough tokens to hide communication."""
    said: list[str] = []
    for name, threshold in thresholds.items():
        if split is None:
            said.append(
                f"{name}: bound by computing from {threshold.tokens:,.0f} tokens per {threshold.per} on."
            )
            continue
        samples = split.asked / split.ranks
        if threshold.per == "micro-batch":
            samples /= split.accumulation
        has = samples * asked.sample_tokens
        verdict = (
            "computing can hide communication"
            if has >= threshold.tokens
            else f"communication is {threshold.tokens / has:.3g} times as long as what could hide it"
        )
        said.append(
            f"{name}: {has:,.0f} tokens on a device per {threshold.per}, {threshold.tokens:,.0f} are needed: {verdict}."
        )
    return said


def devices_of(count: int) -> str:
    """Return so many devices in words."""
    return f"{count} device{'s' * (count > 1)}"
