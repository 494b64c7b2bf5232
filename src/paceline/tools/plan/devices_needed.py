"""Number of devices whose memory a training needs, and the largest micro-batch that fits (pure).

    m(n) = (S + f·A)/n + R + (1 − f)·A      bytes on each of n devices

S is divided among the devices (weights, gradients, optimizer state), R is replicated on each of them, A is what a
device saves for the backward pass of one micro-batch, and f the fraction of A that is divided too. For ZeRO-3 / FSDP
with Adam in float32 S is 16 bytes per parameter and R is 0; for ZeRO-1 S is 8 (Adam's two moments) and R is 8 (weights
and gradients); for DDP S is 0 (Rajbhandari et al., arXiv 1910.02054, with master weights and gradients in float32).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.errors import UsageError, unknown
from paceline.parallel.strategy import ALIASES

__all__ = [
    "STATES",
    "ModelStates",
    "device_nbytes",
    "devices_needed",
    "max_micro_batch",
    "transformer_token_nbytes",
]

STATES = {
    **dict.fromkeys(("naive", "flat", "overlap", "bucketed"), (0, 16)),
    "sharded": (8, 8),
    "sharded-gradients": (12, 4),
    "full-shard": (16, 0),
}
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
    def of(cls, parameters: int, strategy: str = "bucketed") -> ModelStates:
        """Return the states of a model that is trained with Adam in float32.

        Args:
            parameters: of the model.
            strategy: one of `STATES`, or an alias of `paceline.parallel.strategy.ALIASES`.

        Raises:
            UsageError: unknown strategy.

        Example:
            >>> ModelStates.of(1_000_000, "zero1")
            ModelStates(shared=8000000, whole=8000000)
        """
        name = ALIASES.get(strategy, strategy)
        if name not in STATES:
            raise unknown("strategy", strategy, [*STATES, *ALIASES])
        shared, whole = STATES[name]
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
    # Against quotients rounded below a whole number.
    return max(0, math.floor(free / per_sample * (1 + 1e-12)))


def transformer_token_nbytes(d_model: int, layers: int, vocabulary: int) -> float:
    """Return the approximate bytes that a transformer saves for backward per token, in 16 bits with fused attention.

    34·d_model bytes per layer (Korthikanti et al., arXiv 2205.05198, without the attention scores, which fused
    attention does not keep) and 6 bytes per logit. ``paceline plan memory`` counts what a given model really saves.

    Example:
        >>> transformer_token_nbytes(1024, 24, 50257)
        1137126.0
    """
    return 34.0 * d_model * layers + 6.0 * vocabulary
