"""How many devices a training needs at least, and how a global batch is dealt to them (pure).

    m(n) = (S + f·A)/n + R + (1 − f)·A      bytes on each of n devices
    global batch = micro-batch × accumulation × ranks

S is what devices share (weights, gradients, optimizer), R what each of them has whole, A what one micro-batch of a
device saves for backward, and f the part of A that devices share too. For ZeRO-3 / FSDP with Adam in float32 S is 16
bytes a parameter and R is 0; for ZeRO-1 S is 8 (Adam's two states) and R is 8 (weights and gradients); for DDP S is 0
(Rajbhandari et al., arXiv 1910.02054, with master weights and gradients in float32).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
"""By strategy: bytes a parameter that devices share, and that each has whole; Adam, everything in float32."""


@dataclass(frozen=True)
class ModelStates:
    """Bytes of weights, gradients and optimizer.

    Attributes:
        shared: S, what n devices have between them.
        whole: R, what each of them has.
    """

    shared: float
    whole: float = 0.0

    @classmethod
    def of(cls, parameters: int, strategy: str = "fsdp") -> ModelStates:
        """Return those of a model trained with Adam in float32.

        Args:
            parameters: of the model.
            strategy: one of `STATES`.

        Raises:
            UsageError: there is no such strategy.

        Example:
            >>> States.of(1_000_000, "zero1")
            States(shared=8000000, whole=8000000)
        """
        if strategy not in STATES:
            raise unknown("strategy", strategy, STATES)
        shared, whole = STATES[strategy]
        return cls(shared * parameters, whole * parameters)


def device_nbytes(states: ModelStates, activations: float, devices: int, shared: float = 0.0) -> float:
    """Return m(n), the bytes that each device holds.

    Args:
        states: S and R. activations: A, bytes. devices: n. shared: f, the part of A that devices share.

    Example:
        >>> device_nbytes(States(1600.0), 100.0, devices=4, shared=0.5)
        462.5
    """
    return (states.shared + shared * activations) / devices + states.whole + (1.0 - shared) * activations


def devices_needed(states: ModelStates, activations: float, memory: float, shared: float = 0.0) -> int | None:
    """Return the least n with m(n) ≤ memory; None if no number of devices is enough.

    n ≥ (S + f·A) / (memory − R − (1 − f)·A): what every device holds by itself is taken off its memory first.

    Args:
        states: S and R. activations: A, bytes. memory: of a device, bytes that may be used.
        shared: f, the part of A that devices share, 0 to 1.

    Raises:
        UsageError: a number makes no sense.

    Example:
        >>> devices_for(States(3517.6e9), activations=0.0, memory=80e9)
        44
        >>> devices_for(States(3517.6e9), activations=300e9, memory=80e9, shared=0.5) is None
        True
    """
    for name, value in (("states", states.shared + states.whole), ("activations", activations)):
        if not 0 <= value < math.inf:
            raise UsageError(f"{name} of {value!r} bytes", remedy="give bytes of 0 or more")
    if not 0 < memory < math.inf:
        raise UsageError(f"a device with {memory!r} bytes of memory", remedy="give bytes above 0")
    if not 0 <= shared <= 1:
        raise UsageError(
            f"{shared!r} of the activations are shared", remedy="give a part of the whole, 0 to 1"
        )
    left = memory - states.whole - (1.0 - shared) * activations
    together = states.shared + shared * activations
    if left < 0 or (left == 0 and together):
        return None
    return max(1, math.ceil(together / left)) if together else 1


def max_micro_batch(
    states: ModelStates, activations_of_sample: float, memory: float, devices: int, shared: float = 0.0
) -> int:
    """Return the largest micro-batch that fits on each of n devices; 0 if not even one sample does.

    Args:
        states: S and R. activations_of_sample: A of one sample, bytes above 0. memory: of a device, bytes.
        devices: n. shared: f.

    Example:
        >>> most_samples(States(1600.0), 10.0, memory=500.0, devices=4)
        10
    """
    left = memory - states.shared / devices - states.whole
    each = activations_of_sample * (shared / devices + 1.0 - shared)
    return max(0, math.floor(left / each * (1 + 1e-12)))  # a quotient that rounding put below a whole number


def transformer_token_nbytes(d_model: int, layers: int, vocabulary: int) -> float:
    """Return about what a token of a transformer saves for backward in 16 bits, its attention not materialised.

    34·d_model bytes a layer (Korthikanti et al., arXiv 2205.05198, without the scores, which fused attention does not
    keep) and 6 bytes a logit. ``paceline plan memory`` counts what a given model really saves.

    Example:
        >>> token_nbytes(1024, 24, 50257)
        1137126.0
    """
    return 34.0 * d_model * layers + 6.0 * vocabulary


@dataclass(frozen=True)
class BatchSplit:
    """A global batch as micro-batch × accumulation × ranks.

    Attributes:
        asked: the global batch that was asked for, in samples.
        micro: samples of a rank's largest micro-batch.
        accumulation: micro-batches of a rank in an optimizer step.
        ranks: that take part.
        idle: devices that are there and don't.
        missing: samples that are short of micro × accumulation × ranks; 0: it divides.
        below, above: the next global batches that divide by ranks × accumulation; 0: there is none below.
        exact: the split with the most ranks that divides without rest; None: this one does.
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
        """The least and the most samples of a rank in an optimizer step; both alike where it divides."""
        return self.samples // self.ranks, -(-self.samples // self.ranks)

    @property
    def label(self) -> str:
        """The split as people write it: micro-batch × accumulation × ranks."""
        return f"{self.micro} × {self.accumulation} × {self.ranks}"


def split_batch(samples: int, devices: int, most: int) -> BatchSplit:
    """Return how a global batch is dealt: over as many ranks as there are, then over micro-batches.

    Ranks come before accumulation, since they work at the same time and micro-batches one after another. Accumulation
    is as little as memory allows. Where it does not divide, shares differ by one sample, which Paceline counts exactly
    (`paceline.tools.plan.balance_report`); `below`, `above` and `exact` are the ways to have them all alike.

    Args:
        samples: the global batch. devices: how many there are. most: samples of a micro-batch that fit on a device.

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
    return _with_exact(_split(samples, ranks, devices, -(-samples // (ranks * most))), most)


def _split(samples: int, ranks: int, devices: int, accumulation: int) -> BatchSplit:
    unit = ranks * accumulation
    micro = -(-samples // unit)
    missing = micro * unit - samples
    below = samples // unit * unit
    return BatchSplit(
        samples,
        micro,
        accumulation,
        ranks,
        devices - ranks,
        missing,
        below,
        micro * unit if missing else samples,
    )


def _with_exact(split: BatchSplit, most: int) -> BatchSplit:
    """Add the split that divides, with the most ranks, and of these with the least accumulation."""
    if not split.missing:
        return split
    devices = split.ranks + split.idle
    ranks = next(count for count in range(split.ranks, 0, -1) if split.samples % count == 0)
    own = split.samples // ranks
    accumulation = next(parts for parts in range(-(-own // most), own + 1) if own % parts == 0)
    exact = _split(split.samples, ranks, devices, accumulation)
    return BatchSplit(**{**vars(split), "exact": exact})
