"""Devices that a training needs, and the split of a global batch over them (pure).

    m(n) = (S + f·A)/n + R + (1 − f)·A      bytes on each of n devices
    global batch = micro-batch × accumulation × ranks

S is divided among the devices (weights, gradients, optimizer state), R is replicated on each of them, A is what a
device saves for the backward pass of one micro-batch, and f the fraction of A that is divided too. For ZeRO-3 / FSDP
with Adam in float32 S is 16 bytes per parameter and R is 0; for ZeRO-1 S is 8 (Adam's two moments) and R is 8 (weights
and gradients); for DDP S is 0 (Rajbhandari et al., arXiv 1910.02054, with master weights and gradients in float32).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import UsageError, unknown

__all__ = [
    "STATES",
    "BatchSplit",
    "ModelStates",
    "device_nbytes",
    "devices_needed",
    "max_micro_batch",
    "split_batch",
    "transformer_token_nbytes",
]

STATES = {"ddp": (0, 16), "zero1": (8, 8), "zero2": (12, 4), "fsdp": (16, 0)}
"""Per strategy, bytes per parameter that are divided among devices and that are replicated; Adam in float32."""


@dataclass(frozen=True)
class ModelStates:
    """Bytes of weights, gradients and optimizer state.

    Attributes:
        shared: S, divided among n devices.
        whole: R, replicated on each of them.
    """

    shared: float
    whole: float = 0.0

    @classmethod
    def of(cls, parameters: int, strategy: str = "fsdp") -> ModelStates:
        """Return the states of a model that is trained with Adam in float32.

        Args:
            parameters: of the model.
            strategy: one of `STATES`.

        Raises:
            UsageError: unknown strategy.

        Example:
            >>> ModelStates.of(1_000_000, "zero1")
            ModelStates(shared=8000000, whole=8000000)
        """
        if strategy not in STATES:
            raise unknown("strategy", strategy, STATES)
        shared, whole = STATES[strategy]
        return cls(shared * parameters, whole * parameters)

    def with_activations(self, activations: float, shared: float) -> ModelStates:
        """Return these states plus activations, of which the fraction `shared` is divided among devices."""
        return ModelStates(self.shared + shared * activations, self.whole + (1.0 - shared) * activations)

    def nbytes_on(self, devices: int) -> float:
        """Return the bytes on each of `devices` devices."""
        return self.shared / devices + self.whole


def device_nbytes(states: ModelStates, activations: float, devices: int, shared: float = 0.0) -> float:
    """Return m(n), the bytes that each device holds.

    Args:
        states: S and R.
        activations: A, bytes.
        devices: n.
        shared: f, the fraction of A that is divided among devices.

    Example:
        >>> device_nbytes(ModelStates(1600.0), 100.0, devices=4, shared=0.5)
        462.5
    """
    return states.with_activations(activations, shared).nbytes_on(devices)


def devices_needed(states: ModelStates, activations: float, memory: float, shared: float = 0.0) -> int | None:
    """Return the least n with m(n) ≤ memory; None if no number of devices is enough.

    n ≥ (S + f·A) / (memory − R − (1 − f)·A): the replicated part is subtracted from the memory first.

    Args:
        states: S and R.
        activations: A, bytes.
        memory: usable bytes per device.
        shared: f, the fraction of A that is divided among devices, 0 to 1.

    Raises:
        UsageError: a number is out of range.

    Example:
        >>> devices_needed(ModelStates(3517.6e9), activations=0.0, memory=80e9)
        44
        >>> devices_needed(ModelStates(3517.6e9), activations=300e9, memory=80e9, shared=0.5) is None
        True
    """
    for name, value in (("states", states.shared + states.whole), ("activations", activations)):
        if not 0 <= value < math.inf:
            raise UsageError(f"{name} of {value!r} bytes", remedy="give bytes of 0 or more")
    if not 0 < memory < math.inf:
        raise UsageError(f"a device with {memory!r} bytes of memory", remedy="give bytes above 0")
    if not 0 <= shared <= 1:
        raise UsageError(f"{shared!r} of the activations are shared", remedy="give a fraction from 0 to 1")
    total = states.with_activations(activations, shared)
    free = memory - total.whole
    if free < 0 or (free == 0 and total.shared):
        return None
    return max(1, math.ceil(total.shared / free)) if total.shared else 1


def max_micro_batch(
    states: ModelStates, sample_activations: float, memory: float, devices: int, shared: float = 0.0
) -> int:
    """Return the largest micro-batch that fits on each of n devices; 0 if not even one sample fits.

    Args:
        states: S and R.
        sample_activations: A of one sample, bytes above 0.
        memory: usable bytes per device.
        devices: n.
        shared: f, the fraction of A that is divided among devices.

    Example:
        >>> max_micro_batch(ModelStates(1600.0), 10.0, memory=500.0, devices=4)
        10
    """
    free = memory - states.nbytes_on(devices)
    per_sample = device_nbytes(ModelStates(0.0), sample_activations, devices, shared)
    return max(
        0, math.floor(free / per_sample * (1 + 1e-12))
    )  # against quotients rounded below a whole number


def transformer_token_nbytes(d_model: int, layers: int, vocabulary: int) -> float:
    """Return the approximate bytes that a transformer saves for backward per token, in 16 bits with fused attention.

    34·d_model bytes per layer (Korthikanti et al., arXiv 2205.05198, without the attention scores, which fused
    attention does not keep) and 6 bytes per logit. ``paceline plan memory`` counts what a given model really saves.

    Example:
        >>> transformer_token_nbytes(1024, 24, 50257)
        1137126.0
    """
    return 34.0 * d_model * layers + 6.0 * vocabulary


@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """A global batch as micro-batch × accumulation × ranks.

    Attributes:
        samples: the global batch.
        micro: samples of a rank's largest micro-batch.
        accumulation: micro-batches per rank and optimizer step.
        ranks: that take part.
        idle: devices without samples.
        missing: samples short of micro × accumulation × ranks; 0: it divides.
        below: the next smaller global batch that divides by ranks × accumulation; 0: there is none.
        above: the next larger one.
        exact: the split with the most ranks that divides; None: this one does.
    """

    samples: int
    micro: int
    accumulation: int
    ranks: int
    idle: int
    missing: int
    below: int
    above: int
    exact: BatchSplit | None = None

    @property
    def rank_samples(self) -> tuple[int, int]:
        """The least and the most samples of a rank per optimizer step; equal where the batch divides."""
        return self.samples // self.ranks, -(-self.samples // self.ranks)

    @property
    def label(self) -> str:
        """Micro-batch × accumulation × ranks."""
        return f"{self.micro} × {self.accumulation} × {self.ranks}"

    def facts(self) -> dict[str, Any]:
        """Return the split for JSON."""
        numbers = {name: value for name, value in vars(self).items() if name not in ("samples", "exact")}
        return {
            "asked": self.samples,
            **numbers,
            "exact": None if self.exact is None else self.exact.facts(),
        }


def split_batch(samples: int, devices: int, most: int) -> BatchSplit:
    """Split a global batch over as many ranks as possible, then over micro-batches.

    Ranks come before accumulation, because they run in parallel and micro-batches one after another. Accumulation is
    the least that memory allows. Where the batch does not divide, ranks differ by one sample, which Paceline weights
    exactly (`paceline.tools.plan.batch_balance`); `below`, `above` and `exact` are the even alternatives.

    Args:
        samples: the global batch.
        devices: available.
        most: samples of a micro-batch that fit on a device.

    Raises:
        UsageError: one is below 1.

    Example:
        >>> split = split_batch(100, devices=8, most=5)
        >>> split.micro, split.accumulation, split.ranks, split.missing, split.below, split.above
        (5, 3, 8, 20, 96, 120)
        >>> split.rank_samples
        (12, 13)
        >>> split.exact.ranks, split.exact.accumulation, split.exact.micro
        (5, 4, 5)
    """
    for name, value in (("samples", samples), ("devices", devices), ("most", most)):
        if type(value) is not int or value < 1:
            raise UsageError(f"{name}={value!r}", remedy="give a whole number of 1 or more")
    ranks = min(devices, samples)
    split = _split(samples, ranks, devices, -(-samples // (ranks * most)))
    if not split.missing:
        return split
    # The even split with the most ranks and, of these, the least accumulation.
    ranks = next(count for count in range(ranks, 0, -1) if samples % count == 0)
    own = samples // ranks
    accumulation = next(parts for parts in range(-(-own // most), own + 1) if own % parts == 0)
    return replace(split, exact=_split(samples, ranks, devices, accumulation))


def _split(samples: int, ranks: int, devices: int, accumulation: int) -> BatchSplit:
    unit = ranks * accumulation
    micro = -(-samples // unit)
    return BatchSplit(
        samples=samples,
        micro=micro,
        accumulation=accumulation,
        ranks=ranks,
        idle=devices - ranks,
        missing=micro * unit - samples,
        below=samples // unit * unit,
        above=micro * unit,
    )
