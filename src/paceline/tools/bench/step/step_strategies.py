"""Who takes part in `paceline bench step`: Paceline's strategies, torch's, and no synchronisation at all.

Two entries always take part, because the others are measured against them: `no-sync` tells what computing
alone takes, and `ddp` (torch's DistributedDataParallel at its best settings) is what ratios are relative to.
Each of our strategies also has a *peer*, torch doing the same kind of work:

| strategy   | peer                                                                                   |
|------------|----------------------------------------------------------------------------------------|
| naive      | DDP with one bucket per parameter (torch always overlaps)                              |
| flat       | DDP with one bucket for everything                                                     |
| overlap    | DDP with one bucket per parameter                                                      |
| bucketed   | DDP with the same bucket size                                                          |
| sharded    | DDP with the same bucket size + ZeroRedundancyOptimizer                                |
| full-shard | torch's fully_shard with the same units                                                |
| auto       | DDP with its default buckets                                                           |

On the CPU ours run on the paceline backend and torch's on gloo, which is what they have without Paceline;
`ddp-paceline` shows DDP, unchanged, on our backend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import UsageError, unknown

__all__ = ["AUTO", "DDP", "DDP_PACELINE", "NO_SYNC", "OURS", "TITLES", "Entry", "entries", "parse_bucket"]

NO_SYNC = "no-sync"
OURS = ("naive", "flat", "overlap", "bucketed", "sharded", "full-shard")
DDP = ("ddp", "ddp-static")
DDP_PACELINE = "ddp-paceline"
AUTO = "auto"
TITLES = {name: name for name in OURS} | {
    AUTO: "auto, once settled",
    NO_SYNC: "no synchronisation",
    "ddp": "torch DDP",
    "ddp-static": "torch DDP static",
    DDP_PACELINE: "torch DDP on paceline",
    "ddp-zero": "torch DDP + ZeRO",
    "fully-shard": "torch fully_shard",
}
_HAS_BUCKETS = ("bucketed", "sharded", "ddp", "ddp-static", DDP_PACELINE, "ddp-zero")


@dataclass(frozen=True)
class Entry:
    """One contestant.

    Attributes:
        strategy: a name in `TITLES`.
        bucket_mib: bucket size in MiB, 0 for one bucket per parameter, infinity for a single one; None where
            there is no size to choose, and for DDP's own default (25 MiB, the first bucket 1 MiB).
    """

    strategy: str
    bucket_mib: float | None = None

    @property
    def bucket(self) -> str:
        """The bucket size in words; empty where there is none to choose."""
        if self.bucket_mib is None:
            return "default" if self.strategy in DDP else ""
        return {0.0: "parameter", math.inf: "all"}.get(self.bucket_mib, f"{self.bucket_mib:g} MiB")

    @property
    def label(self) -> str:
        """The entry in words: ``"bucketed, 5 MiB"``."""
        return ", ".join(filter(None, (TITLES[self.strategy], self.bucket)))

    @property
    def synchronises(self) -> bool:
        """Whether the ranks hold the same parameters after a step."""
        return self.strategy != NO_SYNC

    def to_json(self) -> dict[str, Any]:
        """Return the entry for JSON, which has no infinity."""
        size = "inf" if self.bucket_mib == math.inf else self.bucket_mib
        return {"strategy": self.strategy, "bucket_mib": size}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Entry:
        """Return the entry that `to_json` wrote."""
        size = record["bucket_mib"]
        return cls(record["strategy"], None if size is None else float(size))


def entries(strategies: Sequence[str], bucket_mib: Sequence[float], nbytes: int) -> dict[Entry, Entry | None]:
    """Return who takes part, in the order of the table, each with its peer or None.

    Bucket sizes that hold the whole model all do the same, so only the smallest of them is kept.

    Args:
        strategies: names of `OURS` or of torch's (in `TITLES`); peers join by themselves.
        bucket_mib: bucket sizes to try, in MiB, above 0.
        nbytes: bytes of the model's gradients.

    Raises:
        UsageError: an unknown strategy, or a bucket size that is none.
    """
    for name in strategies:
        if name not in TITLES:
            raise unknown("strategy", name, TITLES)
    if not bucket_mib or any(not size > 0 for size in bucket_mib):
        raise UsageError(f"bucket sizes {list(bucket_mib)}", remedy="give MiB above 0, or inf for one bucket")
    sizes = sorted(set(bucket_mib))
    parts = [size for size in sizes if size * 2**20 < nbytes]
    whole = next((size for size in sizes if size * 2**20 >= nbytes), math.inf)
    kept = parts + [whole] if len(parts) < len(sizes) else parts
    peer_of: dict[Entry, Entry | None] = {}
    for name in OURS:
        if name in strategies:
            for size in kept if name in _HAS_BUCKETS else [None]:
                peer_of[Entry(name, size)] = _peer(name, size, whole)
    if AUTO in strategies:
        peer_of[Entry(AUTO)] = Entry("ddp")
    wanted = {peer for peer in peer_of.values() if peer is not None}
    for name in (*DDP, DDP_PACELINE, "ddp-zero", "fully-shard"):
        own: set[Entry] = {peer for peer in wanted if peer.strategy == name}
        if name in strategies or name == "ddp":
            own |= {Entry(name, size) for size in kept} if name in _HAS_BUCKETS else set()
            own |= {Entry(name)} if name not in ("ddp-zero", DDP_PACELINE) else set()
        for entry in sorted(own, key=lambda entry: -1 if entry.bucket_mib is None else entry.bucket_mib):
            peer_of[entry] = None
    return {Entry(NO_SYNC): None} | peer_of


def _peer(strategy: str, bucket_mib: float | None, whole: float) -> Entry:
    """Return torch's way to do what `strategy` does; see the table above."""
    match strategy:
        case "naive" | "overlap":
            return Entry("ddp", 0)
        case "flat":
            return Entry("ddp", whole)
        case "sharded":
            return Entry("ddp-zero", bucket_mib)
        case "full-shard":
            return Entry("fully-shard")
    return Entry("ddp", bucket_mib)


def parse_bucket(text: str) -> float:
    """Return a bucket size in MiB from ``"5"`` or ``"inf"``.

    Raises:
        UsageError: `text` is no number above 0.
    """
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not size > 0:
        raise UsageError(
            f"{text!r} is no bucket size in MiB", remedy="give numbers above 0, or inf for one bucket"
        )
    return size
