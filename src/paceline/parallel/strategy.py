"""How gradients are synchronised: `Sync`, and the strategies that have names.

| name                | alias   | bucket_mib | overlap | shard      | description                                      |
|---------------------|---------|-----------:|---------|------------|--------------------------------------------------|
| `naive`             |         |          0 | no      | none       | one all-reduce per parameter, after backward     |
| `flat`              |         |          ∞ | no      | none       | one all-reduce of everything, after backward     |
| `overlap`           |         |          0 | yes     | none       | one all-reduce per parameter, once it is ready   |
| `bucketed`          | `ddp`   |         25 | yes     | none       | one all-reduce per bucket, once it is full       |
| `sharded`           | `zero1` |         25 | yes     | optimizer  | ZeRO-1: reduce-scatter, each updates its 1/N     |
| `sharded-gradients` | `zero2` |         25 | yes     | gradients  | ZeRO-2: as before, and 1/N of gradients stays    |
| `full-shard`        | `fsdp`  |          – | yes     | parameters | PyTorch FSDP2: 1/N of parameters, too            |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from paceline._core.units import MIB
from paceline.cost_model.bucket_assignment import bucket_caps
from paceline.errors import UsageError, unknown
from paceline.parallel.compression.compression_config import Compression

__all__ = ["ALIASES", "STRATEGIES", "Shard", "Sync"]

Shard = Literal["none", "optimizer", "gradients", "parameters"]

_NAME_OF_SHARD = {"optimizer": "sharded", "gradients": "sharded-gradients", "parameters": "full-shard"}


@dataclass(frozen=True)
class Sync:
    """A way to synchronise gradients.

    Attributes:
        bucket_mib: bucket size in MiB (2**20 bytes) of gradients. Where they need several buckets, with overlap, the
            first has 1 MiB, each next one twice as much, up to this size: sending begins early. 0: one bucket per
            parameter; ``math.inf``: a single bucket.
        overlap: launch buckets during backward rather than after it.
        shard: what each rank keeps only 1/N of: ``"none"``, the ``"optimizer"`` state (ZeRO-1,
            arXiv 1910.02054 §5.1), also the ``"gradients"`` (ZeRO-2, §5.2: a bucket's memory is freed once it is
            reduced; gradients that are accumulated over several backwards stay whole until then) or also the
            ``"parameters"`` (PyTorch FSDP2).
        compression: of gradients: a name such as ``"int8"``, a `Compression`, or None. Not with FSDP2, which reduces
            its gradients itself.

    Raises:
        UsageError: a value is out of range.

    Example:
        >>> Sync.of("flat")
        Sync(bucket_mib=inf, overlap=False, shard='none', compression=None)
        >>> Sync(bucket_mib=4).name
        'bucketed'
    """

    bucket_mib: float = 25.0
    overlap: bool = True
    shard: Shard = "none"
    compression: Compression | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.bucket_mib, int | float) or math.isnan(self.bucket_mib) or self.bucket_mib < 0:
            raise UsageError(
                f"bucket_mib={self.bucket_mib!r} is no bucket size",
                remedy="give MiB > 0, 0 for one bucket per parameter, or math.inf for a single bucket",
            )
        if not isinstance(self.overlap, bool):
            raise UsageError(f"overlap={self.overlap!r}", remedy="give True or False")
        if self.shard not in get_args(Shard):
            raise unknown("shard", self.shard, get_args(Shard))
        object.__setattr__(self, "compression", Compression.of(self.compression))
        if self.compression is not None and self.shard == "parameters":
            raise UsageError(
                f"compression with shard='parameters': {self.compression}",
                remedy="PyTorch's FSDP2 reduces gradients itself: give DataParallel reduce_dtype=, or use 'sharded'",
            )

    @property
    def compression_config(self) -> Compression | None:
        """The compression of gradients."""
        return Compression.of(self.compression)

    @classmethod
    def of(cls, sync: str | Sync) -> Sync:
        """Return the strategy with a name or alias; a `Sync` is returned as it is.

        Args:
            sync: ``"naive"``, ``"flat"``, ``"overlap"``, ``"bucketed"`` (or ``"ddp"``), ``"sharded"`` (or ``"zero1"``),
                ``"sharded-gradients"`` (or ``"zero2"``), ``"full-shard"`` (or ``"fsdp"``), or a `Sync`.

        Raises:
            UsageError: no strategy has that name (the nearest one is suggested), or it is ``"auto"``, which searches
                for one.

        Example:
            >>> Sync.of("zero1").name
            'sharded'
        """
        if isinstance(sync, Sync):
            return sync
        if sync == "auto":
            raise UsageError(
                "sync='auto' searches for a strategy and is none itself",
                remedy="pass it to paceline.DataParallel",
            )
        name = ALIASES.get(sync, sync) if isinstance(sync, str) else sync
        if not isinstance(name, str) or name not in STRATEGIES:
            raise unknown("strategy", sync, [*STRATEGIES, "auto", *ALIASES])
        return STRATEGIES[name]

    @property
    def name(self) -> str:
        """The strategy's name."""
        if self.shard != "none":
            return _NAME_OF_SHARD[self.shard]
        if self.bucket_mib == 0:
            return "overlap" if self.overlap else "naive"
        return "bucketed" if self.overlap else "flat"

    @property
    def shards_buckets(self) -> bool:
        """Whether buckets are reduce-scattered, so that each rank updates its part."""
        return self.shard in ("optimizer", "gradients")

    @property
    def label(self) -> str:
        """The name with the bucket size: ``"bucketed, 25 MiB"``."""
        if self.shard == "parameters" or (self.bucket_mib in (0, math.inf) and self in STRATEGIES.values()):
            return self.name  # which implies the size
        size = {0.0: "per parameter", math.inf: "one bucket"}.get(self.bucket_mib, f"{self.bucket_mib:g} MiB")
        return f"{self.name}, {size}"

    @property
    def bucket_nbytes(self) -> float:
        """The bucket size in bytes; may be infinite."""
        return self.bucket_mib * MIB

    def bucket_caps(self, total: float) -> tuple[float, ...]:
        """Return the bytes of the first, second … bucket of `total` bytes of gradients; the last one repeats."""
        return bucket_caps(self.bucket_nbytes, total) if self.overlap else (self.bucket_nbytes,)


STRATEGIES: dict[str, Sync] = {
    "naive": Sync(bucket_mib=0, overlap=False),
    "flat": Sync(bucket_mib=math.inf, overlap=False),
    "overlap": Sync(bucket_mib=0),
    "bucketed": Sync(),
    "sharded": Sync(shard="optimizer"),
    "sharded-gradients": Sync(shard="gradients"),
    "full-shard": Sync(shard="parameters"),
}
ALIASES: dict[str, str] = {
    "ddp": "bucketed",
    "zero1": "sharded",
    "zero2": "sharded-gradients",
    "fsdp": "full-shard",
}
