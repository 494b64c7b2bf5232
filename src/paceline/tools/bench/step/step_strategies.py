"""Strategies that `paceline bench step` compares: Paceline's, torch's, and no synchronisation.

Two always take part: `no-sync` shows the time of computing alone, and ratios are relative to `ddp`, torch's
DistributedDataParallel with its best settings. Each of Paceline's strategies also has a *peer*, torch doing the same
kind of work:

| strategy   | peer                                                                                   |
|------------|----------------------------------------------------------------------------------------|
| naive      | DDP with one bucket per parameter (torch always overlaps)                              |
| flat       | DDP with one bucket for everything                                                     |
| overlap    | DDP with one bucket per parameter                                                      |
| bucketed   | DDP with the same bucket size                                                          |
| sharded    | DDP with the same bucket size + ZeroRedundancyOptimizer                                |
| full-shard | torch's fully_shard with the same units                                                |
| auto       | DDP with its default buckets                                                           |

On the CPU, Paceline's strategies run on the paceline backend and torch's on gloo, its backend without Paceline;
`ddp-paceline` is unmodified DDP on the paceline backend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import UsageError, unknown

__all__ = [
    "AUTO",
    "DDP_PACELINE",
    "DDP_STRATEGIES",
    "NO_SYNC",
    "PACELINE_STRATEGIES",
    "STRATEGY_TITLES",
    "StrategyVariant",
    "strategy_variants",
]

NO_SYNC = "no-sync"
PACELINE_STRATEGIES = ("naive", "flat", "overlap", "bucketed", "sharded", "sharded-gradients", "full-shard")
DDP_STRATEGIES = ("ddp", "ddp-static")
DDP_PACELINE = "ddp-paceline"
AUTO = "auto"
STRATEGY_TITLES = {name: name for name in PACELINE_STRATEGIES} | {
    AUTO: "auto, once settled",
    NO_SYNC: "no synchronisation",
    "ddp": "torch DDP",
    "ddp-static": "torch DDP static",
    DDP_PACELINE: "torch DDP on paceline",
    "ddp-zero": "torch DDP + ZeRO",
    "fully-shard": "torch fully_shard",
}
_HAS_BUCKETS = ("bucketed", "sharded", "sharded-gradients", "ddp", "ddp-static", DDP_PACELINE, "ddp-zero")


@dataclass(frozen=True)
class StrategyVariant:
    """A strategy with its bucket size.

    Attributes:
        strategy: a name in `STRATEGY_TITLES`.
        bucket_mib: bucket size in MiB, 0 for one bucket per parameter, infinity for a single one; None if the
            strategy has no bucket size, and for DDP's own default (25 MiB, the first bucket 1 MiB).
    """

    strategy: str
    bucket_mib: float | None = None

    @property
    def bucket(self) -> str:
        """The bucket size as text; empty if the strategy has none."""
        if self.bucket_mib is None:
            return "default" if self.strategy in DDP_STRATEGIES else ""
        return {0.0: "parameter", math.inf: "all"}.get(self.bucket_mib, f"{self.bucket_mib:g} MiB")

    @property
    def label(self) -> str:
        """The variant as text: ``"bucketed, 5 MiB"``."""
        return ", ".join(filter(None, (STRATEGY_TITLES[self.strategy], self.bucket)))

    @property
    def synchronises(self) -> bool:
        """Whether the ranks have equal parameters after a step."""
        return self.strategy != NO_SYNC

    def to_json(self) -> dict[str, Any]:
        """Return the variant for JSON, which has no infinity."""
        size = "inf" if self.bucket_mib == math.inf else self.bucket_mib
        return {"strategy": self.strategy, "bucket_mib": size}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> StrategyVariant:
        """Return the variant that `to_json` wrote."""
        size = record["bucket_mib"]
        return cls(record["strategy"], None if size is None else float(size))


def strategy_variants(
    strategies: Sequence[str], bucket_mib: Sequence[float], nbytes: int
) -> dict[StrategyVariant, StrategyVariant | None]:
    """Return the variants to benchmark, in the order of the table, each with its peer or None.

    All bucket sizes that hold the whole model are equivalent, so only the smallest of them is kept.

    Args:
        strategies: names in `STRATEGY_TITLES`; the peers of Paceline's strategies are added.
        bucket_mib: bucket sizes in MiB, above 0.
        nbytes: bytes of the model's gradients.

    Raises:
        UsageError: a strategy is unknown, or a bucket size is not above 0.
    """
    for name in strategies:
        if name not in STRATEGY_TITLES:
            raise unknown("strategy", name, STRATEGY_TITLES)
    if not bucket_mib or any(not size > 0 for size in bucket_mib):
        given = ", ".join(f"{size:g}" for size in bucket_mib)
        raise UsageError(f"bucket sizes of {given} MiB", remedy="give MiB above 0, or inf for one bucket")
    sizes = sorted(set(bucket_mib))
    parts = [size for size in sizes if size * 2**20 < nbytes]
    whole = next((size for size in sizes if size * 2**20 >= nbytes), math.inf)
    kept = parts + [whole] if len(parts) < len(sizes) else parts
    peer_of: dict[StrategyVariant, StrategyVariant | None] = {}
    for name in PACELINE_STRATEGIES:
        if name in strategies:
            for size in kept if name in _HAS_BUCKETS else [None]:
                peer_of[StrategyVariant(name, size)] = _peer(name, size, whole)
    if AUTO in strategies:
        peer_of[StrategyVariant(AUTO)] = StrategyVariant("ddp")
    peers = {peer for peer in peer_of.values() if peer is not None}
    for name in (*DDP_STRATEGIES, DDP_PACELINE, "ddp-zero", "fully-shard"):
        own = {peer for peer in peers if peer.strategy == name}
        if name in strategies or name == "ddp":
            own |= {StrategyVariant(name, size) for size in kept} if name in _HAS_BUCKETS else set()
            own |= {StrategyVariant(name)} if name not in ("ddp-zero", DDP_PACELINE) else set()
        for variant in sorted(own, key=lambda each: -1 if each.bucket_mib is None else each.bucket_mib):
            peer_of[variant] = None
    return {StrategyVariant(NO_SYNC): None} | peer_of


def _peer(strategy: str, bucket_mib: float | None, whole: float) -> StrategyVariant:
    match strategy:
        case "naive" | "overlap":
            return StrategyVariant("ddp", 0)
        case "flat":
            return StrategyVariant("ddp", whole)
        case "sharded" | "sharded-gradients":
            return StrategyVariant("ddp-zero", bucket_mib)
        case "full-shard":
            return StrategyVariant("fully-shard")
    return StrategyVariant("ddp", bucket_mib)
