"""Ways to synchronise a step whose time can be predicted: strategy, bucket size, compression (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline._core.units import MIB
from paceline.errors import UsageError, unknown

__all__ = ["NBYTES_A_NUMBER", "STRATEGIES", "StepStrategy", "usual_strategies"]

NBYTES_A_NUMBER = {"none": 4.0, "bf16": 2.0, "int8": 260 / 256, "int4": 132 / 256}
"""Bytes per gradient element, scales included: a block of 256 elements has one scale of 4 bytes."""

STRATEGIES = ("naive", "flat", "overlap", "bucketed", "sharded", "full-shard", "ddp")
"""Paceline's, as `paceline.parallel.strategy.STRATEGIES` names them, and torch's DistributedDataParallel."""

_BUCKETS = ("bucketed", "sharded", "ddp")
_DDP_FIRST_MIB, _DDP_MIB = 1.0, 25.0


@dataclass(frozen=True)
class StepStrategy:
    """A way to synchronise the gradients of a step.

    Attributes:
        strategy: one of `STRATEGIES`.
        bucket_mib: bucket size in MiB, ``math.inf`` for one bucket; None: the strategy's own (25; of torch's DDP 25
            with a first bucket of 1).
        compression: of gradients that Paceline sends in buckets: ``"none"``, ``"bf16"``, ``"int8"``, ``"int4"``.

    Raises:
        UsageError: a value is unknown or makes no sense with the strategy.

    Example:
        >>> StepStrategy("bucketed", 5).label, StepStrategy("ddp").label, StepStrategy("bucketed", 25, "bf16").label
        ('bucketed 5 MiB', 'torch DDP, its default', 'bucketed 25 MiB, bf16')
    """

    strategy: str
    bucket_mib: float | None = None
    compression: str = "none"

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise unknown("strategy", self.strategy, STRATEGIES)
        if self.compression not in NBYTES_A_NUMBER:
            raise unknown("compression", self.compression, NBYTES_A_NUMBER)
        if self.bucket_mib is not None and not self.bucket_mib > 0:
            raise UsageError(
                f"bucket_mib={self.bucket_mib}", remedy="give MiB above 0, or inf for one bucket"
            )
        if self.bucket_mib is not None and self.strategy not in _BUCKETS:
            raise UsageError(
                f"{self.strategy} has no bucket size", remedy=f"give one to {', '.join(_BUCKETS)}"
            )
        if self.compression != "none" and self.strategy not in ("bucketed", "sharded"):
            raise UsageError(
                f"{self.strategy} with {self.compression}: predicted are compressed buckets only",
                remedy="use bucketed or sharded",
            )

    @property
    def caps(self) -> float | tuple[float, ...]:
        """Bytes per bucket, as `paceline.cost_model.bucket_layout.plan_buckets` takes them."""
        if self.strategy in ("naive", "overlap"):
            return 0.0
        if self.strategy == "flat":
            return math.inf
        if self.strategy == "ddp" and self.bucket_mib is None:
            return _DDP_FIRST_MIB * MIB, _DDP_MIB * MIB
        return (_DDP_MIB if self.bucket_mib is None else self.bucket_mib) * MIB

    @property
    def overlaps(self) -> bool:
        """Whether buckets leave while backward runs."""
        return self.strategy not in ("naive", "flat", "full-shard")

    @property
    def shares(self) -> bool:
        """Whether each rank updates a part of the parameters only."""
        return self.strategy in ("sharded", "full-shard")

    @property
    def is_torchs(self) -> bool:
        """Whether torch's own engine makes the calls."""
        return self.strategy == "ddp"

    @property
    def default_ddp(self) -> bool:
        """Whether it is torch's DistributedDataParallel as it comes."""
        return self.strategy == "ddp" and self.bucket_mib is None

    @property
    def label(self) -> str:
        """The way in words."""
        name = "torch DDP" if self.is_torchs else self.strategy
        if self.default_ddp:
            return f"{name}, its default"
        if self.strategy in _BUCKETS:
            size = _DDP_MIB if self.bucket_mib is None else self.bucket_mib
            name += ", one bucket" if size == math.inf else f" {size:g} MiB"
        return name if self.compression == "none" else f"{name}, {self.compression}"


def usual_strategies(
    bucket_mib: Sequence[float], *, torchs: bool = True, compressions: Iterable[str] = ()
) -> list[StepStrategy]:
    """Return the ways that a table of points has: all strategies, those with buckets at every size.

    Args:
        bucket_mib: sizes in MiB. torchs: torch's DDP too. compressions: of buckets, at the usual 25 MiB.

    Example:
        >>> [way.label for way in usual_strategies([5.0], torchs=False)]
        ['naive', 'flat', 'overlap', 'bucketed 5 MiB', 'sharded 5 MiB', 'full-shard']
    """
    ways = [StepStrategy("naive"), StepStrategy("flat"), StepStrategy("overlap")]
    ways += [StepStrategy(strategy, size) for strategy in ("bucketed", "sharded") for size in bucket_mib]
    ways += [StepStrategy("bucketed", None, name) for name in compressions] + [StepStrategy("full-shard")]
    if torchs:
        ways += [StepStrategy("ddp"), *(StepStrategy("ddp", size) for size in bucket_mib)]
    return ways
