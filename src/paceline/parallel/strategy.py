"""How gradients are synchronised, as a point in a plane: :class:`Sync`.

The names that people know are points of it:

| name         | bucket_mib | overlap | shard        | what happens                                              |
|--------------|-----------:|---------|--------------|-----------------------------------------------------------|
| `naive`      |          0 | no      | none         | one all-reduce per parameter, after backward              |
| `flat`       |          ∞ | no      | none         | one all-reduce of everything, after backward              |
| `overlap`    |          0 | yes     | none         | one all-reduce per parameter, as soon as it is ready      |
| `bucketed`   |         25 | yes     | none         | one all-reduce per bucket, as soon as it is full          |
| `sharded`    |         25 | yes     | optimizer    | reduce-scatter per bucket, each rank updates 1/N (ZeRO-1) |
| `full-shard` |          – | yes     | parameters   | PyTorch FSDP2: parameters, gradients, state are 1/N       |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from paceline.errors import UsageError, unknown
from paceline.parallel.compression.compression_config import Compression

__all__ = ["STRATEGIES", "Shard", "Sync"]

Shard = Literal["none", "optimizer", "parameters"]


@dataclass(frozen=True)
class Sync:
    """A way to synchronise gradients.

    Attributes:
        bucket_mib: bucket size in MiB (2**20 bytes) of gradients. 0: one bucket per parameter;
            ``math.inf``: a single bucket.
        overlap: launch a bucket while backward still runs, rather than after it.
        shard: what each rank keeps only 1/N of: ``"none"``, the ``"optimizer"`` state (ZeRO-1,
            arXiv 1910.02054 §5.1) or the ``"parameters"`` too (PyTorch FSDP2).
        compression: how gradients are made smaller before they are sent: a name such as ``"int8"``, a `Compression`,
            or None. Not with FSDP2, which reduces its gradients itself.

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
        if self.shard not in ("none", "optimizer", "parameters"):
            raise unknown("shard", self.shard, ["none", "optimizer", "parameters"])
        object.__setattr__(self, "compression", Compression.of(self.compression))
        if self.compression is not None and self.shard == "parameters":
            raise UsageError(
                f"compression with shard='parameters': {self.compression}",
                remedy="PyTorch's FSDP2 reduces gradients itself: give DataParallel reduce_dtype=, or use 'sharded'",
            )

    @property
    def compression_config(self) -> Compression | None:
        """How gradients are made smaller."""
        return Compression.of(self.compression)

    @classmethod
    def of(cls, sync: str | Sync) -> Sync:
        """Return the point that `sync` names; a `Sync` is returned as it is.

        Raises:
            UsageError: no strategy has that name (the nearest one is suggested); ``"auto"`` is a search for one.
        """
        if isinstance(sync, Sync):
            return sync
        if sync == "auto":
            raise UsageError(
                "sync='auto' is a search for a strategy, not one", remedy="it goes to paceline.DataParallel"
            )
        if not isinstance(sync, str) or sync not in STRATEGIES:
            raise unknown("strategy", sync, [*STRATEGIES, "auto"])
        return STRATEGIES[sync]

    @property
    def name(self) -> str:
        """The strategy's usual name."""
        if self.shard != "none":
            return "sharded" if self.shard == "optimizer" else "full-shard"
        if self.bucket_mib == 0:
            return "overlap" if self.overlap else "naive"
        return "bucketed" if self.overlap else "flat"

    @property
    def words(self) -> str:
        """The plan in words: ``"bucketed, 25 MiB"``."""
        if self.shard == "parameters" or (self.bucket_mib in (0, math.inf) and self in STRATEGIES.values()):
            return self.name  # that says it all
        size = {0.0: "per parameter", math.inf: "one bucket"}.get(self.bucket_mib, f"{self.bucket_mib:g} MiB")
        return f"{self.name}, {size}"

    @property
    def bucket_nbytes(self) -> float:
        """The bucket size in bytes; may be infinite."""
        return self.bucket_mib * 2**20


STRATEGIES: dict[str, Sync] = {
    "naive": Sync(bucket_mib=0, overlap=False),
    "flat": Sync(bucket_mib=math.inf, overlap=False),
    "overlap": Sync(bucket_mib=0),
    "bucketed": Sync(),
    "sharded": Sync(shard="optimizer"),
    "full-shard": Sync(shard="parameters"),
}
