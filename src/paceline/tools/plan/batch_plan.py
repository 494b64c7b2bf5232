"""Devices, micro-batch, accumulation and the bound of a step, derived from plain numbers (pure).

First which number of devices holds the model, then the split of the global batch, then whether each device gets enough
tokens to hide communication. Every figure comes with its derivation
(`paceline.tools.plan.xxl_worked_example.DerivedFigure`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from paceline._core.format import format_count, format_decimal, plural
from paceline.errors import UsageError
from paceline.parallel.strategy import ALIASES
from paceline.tools.plan.communication_roofline import (
    RateEstimate,
    TokenThreshold,
    ddp_tokens,
    fsdp_tokens,
    hsdp_tokens,
    intensity,
)
from paceline.tools.plan.devices_needed import ModelStates, device_nbytes, devices_needed, max_micro_batch
from paceline.tools.plan.micro_batch_split import BatchSplit, split_batch
from paceline.tools.plan.xxl_worked_example import DerivedFigure

__all__ = ["BatchPlan", "BatchRequest", "describe_split", "plan_batch"]

_OPTION_OF = {
    "parameters": "parameters",
    "devices": "world-size",
    "samples": "global-batch-size",
    "sample_tokens": "context",
    "group": "nproc-per-node",
}
_WITHIN_GROUP, _BETWEEN_GROUPS = "hsdp, inside a group", "hsdp, between groups"


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """Model, devices and links to plan for.

    Attributes:
        parameters: of the model.
        strategy: one of `paceline.tools.plan.devices_needed.STATES`, or an alias of the API.
        memory: bytes per device.
        usable: fraction of the memory to plan with.
        token_activations: bytes that a token saves for backward; None: unknown, and left out.
        shared: fraction of the activations that is divided among devices.
        sample_tokens: tokens per sample.
        devices: available; None: the fewest that are enough.
        samples: global batch; None: no split is planned.
        flops: C of a device; None: no thresholds.
        wire: W of a device, within a group; None: no thresholds.
        gradient_nbytes: bytes of a gradient on the wire.
        between: W of a device between groups; None: all links are alike.
        group: devices per group.
    """

    parameters: int
    strategy: str = "bucketed"
    memory: float = 80e9
    usable: float = 0.8
    token_activations: float | None = None
    shared: float = 0.0
    sample_tokens: int = 1
    devices: int | None = None
    samples: int | None = None
    flops: RateEstimate | None = None
    wire: RateEstimate | None = None
    gradient_nbytes: float = 4.0
    between: RateEstimate | None = None
    group: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", ALIASES.get(self.strategy, self.strategy))
        for name, option in _OPTION_OF.items():
            value = getattr(self, name)
            if value is None and name in ("devices", "samples"):
                continue
            if type(value) is not int or value < 1:
                raise UsageError(f"--{option} {value!r}", remedy="give a whole number of 1 or more")
        if not 0 < self.usable <= 1:
            raise UsageError(f"usable={self.usable!r}", remedy="give a part of the memory, such as 80%")

    @property
    def sample_activations(self) -> float:
        """Bytes that a sample saves for backward; 0 if unknown."""
        return (self.token_activations or 0.0) * self.sample_tokens

    @property
    def usable_memory(self) -> float:
        """Usable bytes per device."""
        return self.memory * self.usable

    @property
    def states(self) -> ModelStates:
        """Weights, gradients and optimizer state."""
        return ModelStates.of(self.parameters, self.strategy)

    @property
    def one_sample(self) -> ModelStates:
        """The same plus the activations of one sample."""
        return self.states.with_activations(self.sample_activations, self.shared)

    def wire_of(self, name: str) -> RateEstimate:
        """Return the links that a threshold is about: within a group, between groups, or the slower of both."""
        assert self.wire is not None
        if self.between is None or name == _WITHIN_GROUP:
            return self.wire
        if name == _BETWEEN_GROUPS:
            return self.between
        return min(self.wire, self.between, key=lambda each: each.value)


@dataclass(frozen=True)
class BatchPlan:
    """Result of `plan_batch`.

    Attributes:
        figures: each with its derivation.
        sentences: the advice.
        least: fewest devices; None: no number is enough.
        split: of the global batch; None: not requested, or it does not fit.
        thresholds: tokens per device from which computing hides communication, by strategy and links.
    """

    figures: tuple[DerivedFigure, ...]
    sentences: tuple[str, ...]
    least: int | None
    split: BatchSplit | None
    thresholds: dict[str, TokenThreshold]


def plan_batch(request: BatchRequest) -> BatchPlan:
    """Plan devices, batch split and thresholds.

    Example:
        >>> plan = plan_batch(BatchRequest(
        ...     parameters=7_000_000_000, strategy="full-shard", token_activations=4e6, sample_tokens=2048))
        >>> plan.least, plan.sentences[0]
        (3, 'At least 3 devices: each then holds 45.5 GB of the 64 GB that may be used.')
    """
    least = devices_needed(request.states, request.sample_activations, request.usable_memory, request.shared)
    figures = [_states_figure(request), _least_figure(request, least)]
    sentences = [_describe_least(request, least)]
    devices = request.devices or least
    split = None
    if least is not None and devices is not None and devices >= least:
        most = None
        if request.sample_activations:
            most = max_micro_batch(
                request.states, request.sample_activations, request.usable_memory, devices, request.shared
            )
            figures.append(_micro_batch_figure(request, devices, most))
        if request.samples is not None:
            split = split_batch(request.samples, devices, most or request.samples)
            figures.append(_split_figure(split))
            sentences += describe_split(split)
    elif least is not None:
        more = "" if request.strategy == "full-shard" else ", or try --strategy full-shard"
        sentences.append(
            f"{devices} devices are too few for {request.strategy}: nothing else is planned. Plan with more{more}."
        )
    thresholds = _thresholds(request, devices or 1)
    figures += [_threshold_figure(request, name, each) for name, each in thresholds.items()]
    sentences += _describe_thresholds(request, split, thresholds)
    return BatchPlan(tuple(figures), tuple(sentences), least, split, thresholds)


# ---------------------------------------------------------------------- sentences


def _describe_least(request: BatchRequest, least: int | None) -> str:
    usable = format_decimal(request.usable_memory)
    if least is None:
        return (
            f"No number of devices is enough: each would have to hold {format_decimal(request.one_sample.whole)} "
            f"whatever their number, and {usable} may be used. Shard more (--strategy full-shard), recompute "
            "activations, or use shorter samples."
        )
    held = format_decimal(request.one_sample.nbytes_on(least))
    end = ", activations not counted." if request.token_activations is None else "."
    return f"At least {plural(least, 'device')}: each then holds {held} of the {usable} that may be used{end}"


def describe_split(split: BatchSplit) -> list[str]:
    """Return the split in sentences, with the even alternatives where it does not divide."""
    first = (
        f"Global batch {split.samples}: {split.ranks} ranks, {split.accumulation} micro-batch"
        f"{'es' * (split.accumulation > 1)} of {'up to ' * bool(split.missing)}{split.micro} samples."
        + (f" {split.idle} devices stay idle: there are fewer samples than devices." if split.idle else "")
    )
    if not split.missing:
        return [first]
    least, most = split.rank_samples
    if least < most:
        rest = f"It does not divide by {split.ranks} ranks: they have {least} or {most} samples per step"
    else:
        parts = split.accumulation
        rest = f"A rank's {most} samples don't divide by {parts}: micro-batches have {most // parts} or {split.micro}"
    near = " or ".join(str(each) for each in (split.below, split.above) if each)
    same = "" if split.exact is None else f", or {split.samples} as {split.exact.label}"
    even = f"Even splits: {near}{same} (micro-batch × accumulation × ranks)."
    return [first, f"{rest}, which Paceline weights exactly. {even}"]


def _describe_thresholds(
    request: BatchRequest, split: BatchSplit | None, thresholds: dict[str, TokenThreshold]
) -> Iterator[str]:
    for name, threshold in thresholds.items():
        if split is None:
            yield f"{name}: compute-bound from {threshold.tokens:,.0f} tokens per {threshold.per}."
            continue
        samples = split.samples / split.ranks
        if threshold.per == "micro-batch":
            samples /= split.accumulation
        tokens = samples * request.sample_tokens
        verdict = (
            "computing can hide communication"
            if tokens >= threshold.tokens
            else f"communication takes {threshold.tokens / tokens:.3g}× as long as the computing that could hide it"
        )
        yield (
            f"{name}: {tokens:,.0f} tokens per device and {threshold.per}, {threshold.tokens:,.0f} are needed: "
            f"{verdict}."
        )


# ---------------------------------------------------------------------- figures


def _states_figure(request: BatchRequest) -> DerivedFigure:
    states = request.states
    shared, whole = (round(each / request.parameters) for each in (states.shared, states.whole))
    parts = [f"{shared} B divided"] if shared else []
    parts += [f"{whole} B on every device"] if whole else []
    return DerivedFigure(
        key="state_nbytes",
        what="weights, gradients and Adam's states",
        formula=f"{shared + whole} · {format_count(request.parameters)} parameters ({', '.join(parts)})",
        value=states.shared + states.whole,
        shown=format_decimal(states.shared + states.whole),
        why="float32: 4 bytes of weight, 4 of gradient, 8 of Adam; mixed precision with 2 + 2 + 12 needs the same",
    )


def _least_figure(request: BatchRequest, least: int | None) -> DerivedFigure:
    total, usable = request.one_sample, request.usable_memory
    formula = (
        f"n ≥ (S + f·A)/(M − R − (1 − f)·A) = {total.shared / 1e9:,.4g} GB / "
        f"({usable / 1e9:,.4g} − {total.whole / 1e9:,.4g}) GB"
    )
    if usable > total.whole:
        formula += f" = {total.shared / (usable - total.whole):.3g}"
    wrong = ""
    if least is not None and request.shared < 1 and request.sample_activations:
        naive = devices_needed(request.states, request.sample_activations, usable, 1.0)
        if naive is not None and naive != least:
            wrong = (
                f"(S + A)/n would give {naive}: what is not divided of A is on every device, whatever n is."
            )
    return DerivedFigure(
        key="devices",
        what="fewest devices, with a micro-batch of one sample",
        formula=formula,
        value=math.inf if least is None else least,
        shown="no number is enough" if least is None else str(least),
        why=f"M is {request.usable:.0%} of {format_decimal(request.memory)}: allocator and libraries take the rest",
        wrong=wrong,
    )


def _micro_batch_figure(request: BatchRequest, devices: int, most: int) -> DerivedFigure:
    usable, states = request.usable_memory / 1e9, request.states.nbytes_on(devices) / 1e9
    per_sample = device_nbytes(ModelStates(0.0), request.sample_activations, devices, request.shared) / 1e9
    return DerivedFigure(
        key="most_samples",
        what=f"largest micro-batch on {plural(devices, 'device')}",
        formula=f"⌊({usable:,.4g} − {states:,.4g}) GB / {per_sample:,.3g} GB per sample⌋",
        value=most,
        shown=f"{plural(most, 'sample')} of {plural(request.sample_tokens, 'token')}",
    )


def _split_figure(split: BatchSplit) -> DerivedFigure:
    return DerivedFigure(
        key="split",
        what="global batch = micro-batch × accumulation × ranks",
        formula=f"{split.samples} = {split.label}" + (f" − {split.missing}" if split.missing else ""),
        value=split.micro * split.accumulation * split.ranks,
        shown=split.label,
        why="ranks first, because they run in parallel; accumulation only for what does not fit into memory",
    )


def _thresholds(request: BatchRequest, devices: int) -> dict[str, TokenThreshold]:
    if request.flops is None or request.wire is None or devices == 1:
        return {}
    alpha = intensity(request.flops, request.wire_of(request.strategy)).value
    if request.strategy != "full-shard":
        return {request.strategy: ddp_tokens(alpha, devices, request.gradient_nbytes)}
    found = {"full-shard": fsdp_tokens(alpha, devices, 2.0, request.gradient_nbytes)}
    if request.between is not None and 1 < request.group < devices:
        within, between = (
            intensity(request.flops, request.wire_of(name)).value for name in (_WITHIN_GROUP, _BETWEEN_GROUPS)
        )
        groups = -(-devices // request.group)
        micro, step = hsdp_tokens(within, between, request.group, groups, request.gradient_nbytes)
        found |= {_WITHIN_GROUP: micro, _BETWEEN_GROUPS: step}
    return found


def _threshold_figure(request: BatchRequest, name: str, threshold: TokenThreshold) -> DerivedFigure:
    assert request.flops is not None
    wire = request.wire_of(name)
    alpha = intensity(request.flops, wire)
    low, high = (threshold.tokens * each / alpha.value for each in (alpha.low, alpha.high))
    shown = f"{threshold.tokens:,.0f} tokens per {threshold.per}"
    if high > low:
        shown += f" ({low:,.0f} to {high:,.0f})"
    wrong = ""
    if threshold.per == "micro-batch":
        wrong = "counting the tokens of several micro-batches: each gathers the weights and scatters gradients again."
    return DerivedFigure(
        key=f"tokens_{re.sub('[^a-z]+', '_', name)}",
        what=f"tokens on a device from which computing hides communication, {name}",
        formula=threshold.formula,
        value=threshold.tokens,
        shown=shown,
        why=f"C = {format_count(request.flops.value)}FLOP/s ({request.flops.source}), "
        f"W = {format_decimal(wire.value)}/s ({wire.source})",
        wrong=wrong,
    )
