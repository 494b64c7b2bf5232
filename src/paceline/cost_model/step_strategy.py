"""Strategies whose step time can be predicted: synchronisation strategy, bucket size, gradient compression."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline._core.units import MIB
from paceline.cost_model.bucket_assignment import bucket_caps
from paceline.errors import UsageError, unknown

__all__ = ["ELEMENT_NBYTES", "STRATEGIES", "StepStrategy", "standard_strategies"]

ELEMENT_NBYTES = {"none": 4.0, "bf16": 2.0, "int8": 260 / 256, "int4": 132 / 256}
"""Bytes per gradient element, scales included: a block of 256 elements has one scale of 4 bytes."""

STRATEGIES = ("naive", "flat", "overlap", "bucketed", "sharded", "sharded-gradients", "full-shard", "ddp")
"""Paceline's, as `paceline.parallel.strategy.STRATEGIES` names them, and torch's DistributedDataParallel."""

_ZERO = ("sharded", "sharded-gradients")
_COMPRESSIBLE = ("bucketed", *_ZERO)
_BUCKETED = (*_COMPRESSIBLE, "ddp")
_DDP_FIRST_MIB, _DEFAULT_MIB = 1.0, 25.0


@dataclass(frozen=True)
class StepStrategy:
    """How a step synchronises gradients.

    Attributes:
        name: one of `STRATEGIES`.
        bucket_mib: bucket size in MiB, ``math.inf`` for one bucket; None: the strategy's default (25; for torch's DDP
            25 with a first bucket of 1). Paceline's buckets grow to that size (`caps`).
        compression: of gradients that Paceline sends in buckets: ``"none"``, ``"bf16"``, ``"int8"``, ``"int4"``.

    Raises:
        UsageError: a value is unknown or does not apply to the strategy.

    Example:
        >>> StepStrategy("bucketed", 5).label, StepStrategy("ddp").label, StepStrategy("bucketed", 25, "bf16").label
        ('bucketed 5 MiB', 'torch DDP, its default', 'bucketed 25 MiB, bf16')
    """

    name: str
    bucket_mib: float | None = None
    compression: str = "none"

    def __post_init__(self) -> None:
        if self.name not in STRATEGIES:
            raise unknown("strategy", self.name, STRATEGIES)
        if self.compression not in ELEMENT_NBYTES:
            raise unknown("compression", self.compression, ELEMENT_NBYTES)
        if self.bucket_mib is not None and not self.bucket_mib > 0:
            raise UsageError(
                f"bucket_mib={self.bucket_mib}", remedy="give MiB above 0, or inf for one bucket"
            )
        if self.bucket_mib is not None and self.name not in _BUCKETED:
            raise UsageError(f"{self.name} has no bucket size", remedy=f"valid for {', '.join(_BUCKETED)}")
        if self.compression != "none" and self.name not in _COMPRESSIBLE:
            raise UsageError(
                f"{self.name} with {self.compression}: only compressed buckets can be predicted",
                remedy=f"use {' or '.join(_COMPRESSIBLE)}",
            )

    def caps(self, total: float) -> tuple[float, ...]:
        """Return the bytes of the first, second … bucket of `total` bytes of gradients, for `plan_buckets`."""
        if self.name in ("naive", "overlap"):
            return (0.0,)
        if self.name == "flat":
            return (math.inf,)
        if self.is_default_ddp:
            return _DDP_FIRST_MIB * MIB, _DEFAULT_MIB * MIB
        nbytes = (_DEFAULT_MIB if self.bucket_mib is None else self.bucket_mib) * MIB
        return (nbytes,) if self.is_torch_ddp else bucket_caps(nbytes, total)

    @property
    def overlaps(self) -> bool:
        """Whether buckets are launched while backward runs."""
        return self.name not in ("naive", "flat", "full-shard")

    @property
    def shards_update(self) -> bool:
        """Whether each rank updates only its shard of the parameters."""
        return self.reduce_scatters or self.name == "full-shard"

    @property
    def reduce_scatters(self) -> bool:
        """Whether buckets are reduce-scattered, and parameters gathered in the next forward."""
        return self.name in _ZERO

    @property
    def frees_gradients(self) -> bool:
        """Whether all but the two latest buckets are waited for during backward, to be freed."""
        return self.name == "sharded-gradients"

    @property
    def is_torch_ddp(self) -> bool:
        """Whether torch's DistributedDataParallel makes the calls."""
        return self.name == "ddp"

    @property
    def is_default_ddp(self) -> bool:
        """Whether it is torch's DistributedDataParallel with default settings."""
        return self.is_torch_ddp and self.bucket_mib is None

    @property
    def label(self) -> str:
        """Name, bucket size and compression as text."""
        name = "torch DDP" if self.is_torch_ddp else self.name
        if self.is_default_ddp:
            return f"{name}, its default"
        if self.name in _BUCKETED:
            size = _DEFAULT_MIB if self.bucket_mib is None else self.bucket_mib
            name += ", one bucket" if size == math.inf else f" {size:g} MiB"
        return name if self.compression == "none" else f"{name}, {self.compression}"


def standard_strategies(
    bucket_mib: Sequence[float], *, torch_ddp: bool = True, compressions: Iterable[str] = ()
) -> list[StepStrategy]:
    """Return every strategy, those with buckets at every size.

    Args:
        bucket_mib: sizes in MiB.
        torch_ddp: include torch's DDP.
        compressions: of buckets of the default 25 MiB.

    Example:
        >>> [strategy.label for strategy in standard_strategies([5.0], torch_ddp=False)]
        ['naive', 'flat', 'overlap', 'bucketed 5 MiB', 'sharded 5 MiB', 'full-shard']
    """
    strategies = [StepStrategy("naive"), StepStrategy("flat"), StepStrategy("overlap")]
    strategies += [StepStrategy(name, size) for name in ("bucketed", "sharded") for size in bucket_mib]
    strategies += [StepStrategy("bucketed", None, name) for name in compressions]
    strategies.append(StepStrategy("full-shard"))
    if torch_ddp:
        strategies += [StepStrategy("ddp"), *(StepStrategy("ddp", size) for size in bucket_mib)]
    return strategies
