"""What devices, batch and thresholds mean, in sentences (pure).

Devices, micro-batch, accumulation, and what a step is bound by: one answer out of plain numbers (pure).

What fits is asked first, then how the global batch is dealt, then whether what each device gets is enough to hide
communication. Every figure comes with its derivation (`paceline.tools.plan.xxl_model`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline._core.format import format_count, format_decimal
from paceline.errors import UsageError
from paceline.tools.plan.batch_split import (
    BatchSplit,
    ModelStates,
    device_nbytes,
    devices_needed,
    max_micro_batch,
    split_batch,
)
from paceline.tools.plan.communication_roofline import (
    RateEstimate,
    TokenThreshold,
    ddp_tokens,
    fsdp_tokens,
    hsdp_tokens,
    intensity,
)
from paceline.tools.plan.xxl_model import DerivedFigure

if TYPE_CHECKING:
    pass  # moved

__all__ = [
    "BatchPlan",
    "BatchRequest",
    "bound_words",
    "describe_split",
    "devices_of",
    "least_words",
    "plan_batch",
]


def least_words(asked: BatchRequest, states: ModelStates, least: int | None) -> str:
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


def describe_split(split: BatchSplit) -> list[str]:
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


def bound_words(
    asked: BatchRequest, split: BatchSplit | None, thresholds: dict[str, TokenThreshold]
) -> list[str]:
    """Return for each threshold whether the split's devices have enough tokens to hide communication."""
    said: list[str] = []
    for name, threshold in thresholds.items():
        if split is None:
            said.append(
                f"{name}: bound by computing from {threshold.tokens:,.0f} tokens per {threshold.per} on."
            )
            continue
        samples = split.samples / split.ranks
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


_INSIDE, _BETWEEN = "hsdp, inside a group", "hsdp, between groups"


@dataclass(frozen=True)
class BatchRequest:
    """What is to be planned.

    Attributes:
        parameters: of the model. strategy: one of `paceline.tools.plan.batch_split.STATES`.
        memory: of a device, bytes; usable: the part of it that may be planned with.
        token_activations: bytes that a token saves for backward; None: not known, and left out.
        shared: the part of activations that devices share. sample_tokens: tokens of a sample.
        devices: that there are; None: as many as it takes. samples: global batch; None: not asked.
        flops, wire: C and W; None: not asked.
        gradient_nbytes: of one on the wire.
        between, group: W of a device between groups of so many; None: all links are alike.
    """

    parameters: int
    strategy: str = "fsdp"
    memory: float = 80e9
    usable: float = 0.8
    token_activations: float | None = None
    shared: float = 0.0
    sample_tokens: int = 1
    devices: int | None = None
    samples: int | None = None
    flops: RateEstimate | None = None
    wire: RateEstimate | None = None
    gradient_nbytes: float = 2.0
    between: RateEstimate | None = None
    group: int = 1

    def __post_init__(self) -> None:
        for name, value in (
            ("parameters", self.parameters),
            ("devices", 1 if self.devices is None else self.devices),
            ("samples", 1 if self.samples is None else self.samples),
            ("sample_tokens", self.sample_tokens),
            ("group", self.group),
        ):
            if type(value) is not int or value < 1:
                raise UsageError(f"{name}={value!r}", remedy="give a whole number of 1 or more")
        if not 0 < self.usable <= 1:
            raise UsageError(f"usable={self.usable!r}", remedy="give a part of the memory, such as 80%")

    @property
    def sample_activations(self) -> float:
        """Bytes that a sample saves for backward; 0 where that is not known."""
        return (self.token_activations or 0.0) * self.sample_tokens


@dataclass(frozen=True)
class BatchPlan:
    """What came out.

    Attributes:
        figures: each with its derivation. sentences: what to do.
        least: devices at least; None: no number is enough.
        split: of the global batch; None: not asked, or it does not fit.
        thresholds: by what they are for, tokens of a device from which computing hides communication.
    """

    figures: tuple[DerivedFigure, ...]
    sentences: tuple[str, ...]
    least: int | None
    split: BatchSplit | None
    thresholds: dict[str, TokenThreshold]


def plan_batch(asked: BatchRequest) -> BatchPlan:
    """Return devices, batch and thresholds.

    Example:
        >>> found = answer(Asked(parameters=7_000_000_000, token_activations=4e6, sample_tokens=2048))
        >>> found.least, found.sentences[0]
        (3, 'At least 3 devices: each then holds 45.5 GB of the 64 GB that may be used.')
    """
    states = ModelStates.of(asked.parameters, asked.strategy)
    least = devices_needed(states, asked.sample_activations, asked.memory * asked.usable, asked.shared)
    figures = [_state_figure(asked, states), _least_figure(asked, states, least)]
    sentences = [least_words(asked, states, least)]
    devices = asked.devices or least
    split = None
    if least is not None and devices is not None and devices >= least:
        most = _most(asked, states, devices)
        if most is not None:
            figures.append(_most_figure(asked, states, devices, most))
        if asked.samples is not None:
            split = split_batch(asked.samples, devices, most or asked.samples)
            figures.append(_split_figure(split))
            sentences += describe_split(split)
    elif least is not None:
        sentences.append(f"{devices} devices are too few for {asked.strategy}: nothing else is planned.")
    thresholds = _thresholds(asked, devices or 1)
    figures += [_threshold_figure(asked, name, each) for name, each in thresholds.items()]
    sentences += bound_words(asked, split, thresholds)
    return BatchPlan(tuple(figures), tuple(sentences), least, split, thresholds)


def _state_figure(asked: BatchRequest, states: ModelStates) -> DerivedFigure:
    shared, whole = (round(each / asked.parameters) for each in (states.shared, states.whole))
    parts = [f"{nbytes} B shared" for nbytes in (shared,) if nbytes]
    parts += [f"{nbytes} B on every device" for nbytes in (whole,) if nbytes]
    return DerivedFigure(
        "state_nbytes",
        "weights, gradients and Adam's states",
        f"{shared + whole} · {format_count(asked.parameters)} parameters ({', '.join(parts)})",
        states.shared + states.whole,
        format_decimal(states.shared + states.whole),
        "float32: 4 bytes of weight, 4 of gradient, 8 of Adam; mixed precision with 2 + 2 + 12 needs as many",
    )


def _least_figure(asked: BatchRequest, states: ModelStates, least: int | None) -> DerivedFigure:
    per_device = states.whole + (1 - asked.shared) * asked.sample_activations
    together = states.shared + asked.shared * asked.sample_activations
    room = asked.memory * asked.usable
    formula = (
        f"n ≥ (S + f·A)/(M − R − (1 − f)·A) = {together / 1e9:,.4g} GB / "
        f"({room / 1e9:,.4g} − {per_device / 1e9:,.4g}) GB"
    )
    if room > per_device:
        formula += f" = {together / (room - per_device):.3g}"
    wrong = ""
    if least is not None and asked.shared < 1 and asked.sample_activations:
        naive = devices_needed(states, asked.sample_activations, room, 1.0)
        if naive is not None and naive != least:
            wrong = (
                f"(S + A)/n would give {naive}: what is not shared of A is on every device, whatever n is."
            )
    return DerivedFigure(
        "devices",
        "devices at least, with a micro-batch of one sample",
        formula,
        math.inf if least is None else least,
        "no number is enough" if least is None else str(least),
        f"M is {asked.usable:.0%} of {format_decimal(asked.memory)}: the rest is left to allocator and libraries",
        wrong,
    )


def _most(asked: BatchRequest, states: ModelStates, devices: int) -> int | None:
    """Return the largest micro-batch in samples; None where nobody knows what a sample needs."""
    if not asked.sample_activations:
        return None
    return max_micro_batch(
        states, asked.sample_activations, asked.memory * asked.usable, devices, asked.shared
    )


def _most_figure(asked: BatchRequest, states: ModelStates, devices: int, most: int) -> DerivedFigure:
    room = asked.memory * asked.usable
    left = room - states.shared / devices - states.whole
    each = asked.sample_activations * (asked.shared / devices + 1 - asked.shared)
    return DerivedFigure(
        "most_samples",
        f"largest micro-batch on {devices_of(devices)}",
        f"⌊({room / 1e9:,.4g} − {(room - left) / 1e9:,.4g}) GB / {each / 1e9:,.3g} GB a sample⌋",
        most,
        f"{most} sample{'s' * (most != 1)} of {asked.sample_tokens} token{'s' * (asked.sample_tokens > 1)}",
    )


def _split_figure(split: BatchSplit) -> DerivedFigure:
    unit = split.micro * split.accumulation * split.ranks
    return DerivedFigure(
        "split",
        "global batch = micro-batch × accumulation × ranks",
        f"{split.asked} = {split.told}" + (f" − {split.missing}" if split.missing else ""),
        unit,
        split.label,
        "ranks first, since they work at the same time; accumulation only for what memory does not hold",
    )


def _thresholds(asked: BatchRequest, devices: int) -> dict[str, TokenThreshold]:
    if asked.flops is None or asked.wire is None or devices == 1:
        return {}
    sharded = asked.strategy == "fsdp"
    alpha = intensity(asked.flops, _wire_of(asked, asked.strategy)).value
    plain = (
        fsdp_tokens(alpha, devices, 2.0, asked.gradient_nbytes)
        if sharded
        else ddp_tokens(alpha, devices, asked.gradient_nbytes)
    )
    found = {asked.strategy: plain}
    if sharded and asked.between is not None and 1 < asked.group < devices:
        inside, outside = (intensity(asked.flops, each).value for each in (asked.wire, asked.between))
        micro, step = hsdp_tokens(
            inside, outside, asked.group, -(-devices // asked.group), asked.gradient_nbytes
        )
        found |= {_INSIDE: micro, _BETWEEN: step}
    return found


def _wire_of(asked: BatchRequest, name: str) -> RateEstimate:
    """Return the links that a threshold is about: inside a group, between groups, or the slower of both."""
    assert asked.wire is not None
    if asked.between is None or name == _INSIDE:
        return asked.wire
    return asked.between if name == _BETWEEN else min(asked.wire, asked.between, key=lambda each: each.value)


def _threshold_figure(asked: BatchRequest, name: str, threshold: TokenThreshold) -> DerivedFigure:
    assert asked.flops is not None
    wire = _wire_of(asked, name)
    alpha = intensity(asked.flops, wire)
    low, high = (threshold.tokens * each / alpha.value for each in (alpha.low, alpha.high))
    shown = f"{threshold.tokens:,.0f} tokens per {threshold.per}"
    if high > low:
        shown += f" ({low:,.0f} to {high:,.0f})"
    wrong = ""
    if threshold.per == "micro-batch":
        wrong = (
            "counting tokens of several micro-batches: each gathers the weights and scatters gradients anew."
        )
    return DerivedFigure(
        f"tokens_{name.replace(', ', '_').replace(' ', '_')}",
        f"tokens on a device from which computing hides communication, {name}",
        threshold.formula,
        threshold.tokens,
        shown,
        f"C = {format_count(asked.flops.value)}FLOP/s ({asked.flops.source}), "
        f"W = {format_decimal(wire.value)}/s ({wire.source})",
        wrong,
    )
