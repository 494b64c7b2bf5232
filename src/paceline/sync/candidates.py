"""Which plans are worth a turn on the real run: the default, and what the bucket simulation ranks first (pure).

What a rank saw in one backward (when each gradient was ready) and in a few calls (what one costs) is enough to rank
bucket sizes. It is not enough to trust the ranking to a few per cent, so candidates differ by a factor of two or more
in the number of their buckets, and the run decides among them. Sharding is first tried at the usual size: what it
gains, a shorter update, does not depend on the buckets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.plan.bucket import Channel, Ready, plan_buckets, simulate
from paceline.sync.plan import STRATEGIES, Shard, Sync
from paceline.units import MIB

__all__ = ["CallPrice", "candidates"]

_CAPS_MIB = (0.0, 1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, math.inf)
_APART = 2.0


@dataclass(frozen=True)
class CallPrice:
    """Seconds of an all-reduce: `call_seconds` + `seconds_per_byte` · its bytes."""

    call_seconds: float
    seconds_per_byte: float

    def reduce_scatter(self, nbytes: float) -> float:
        """Return the seconds of a reduce-scatter of so many bytes: one of an all-reduce's two passes."""
        return self.call_seconds + self.seconds_per_byte * nbytes / 2

    def all_reduce(self, nbytes: float) -> float:
        """Return the seconds of an all-reduce of so many bytes."""
        return self.call_seconds + self.seconds_per_byte * nbytes


def candidates(
    ready: Sequence[Ready], price: CallPrice, *, may_shard: bool, most: int = 5
) -> tuple[Sync, ...]:
    """Return the plans to try, the default first.

    Args:
        ready: the gradients in the order in which they become ready.
        price: of a call.
        may_shard: whether the optimizer can update shards.
        most: plans, 2 or more.

    Example:
        >>> layers = [Ready(4 << 20, 0.01 * place) for place in range(1, 21)]
        >>> [plan.name for plan in candidates(layers, CallPrice(1e-3, 1e-9), may_shard=True)][:2]
        ['bucketed', 'sharded']
    """
    picked: list[tuple[Sync, int]] = [(Sync(), _buckets(ready, Sync()))]
    whole = _ranked(ready, Channel(price.all_reduce), "none")
    rows = [whole]
    if may_shard:
        usual = Sync(shard="optimizer")
        ranked = _ranked(ready, Channel(price.reduce_scatter), "optimizer")
        rows = [[(usual, _buckets(ready, usual)), *ranked], whole]
    flat = STRATEGIES["flat"]
    while rows and len(picked) < most - 1:
        for row in list(rows):
            best = next((each for each in row if _differs(each, picked)), None)
            if best is None:
                rows.remove(row)
            elif len(picked) < most - 1:
                picked.append(best)
    return (*(plan for plan, _ in picked), flat)


def _ranked(ready: Sequence[Ready], channel: Channel, shard: Shard) -> list[tuple[Sync, int]]:
    """Return plans with their numbers of buckets, the one with the shortest backward first."""
    found = []
    for plan in (Sync(bucket_mib=mib, shard=shard) for mib in _CAPS_MIB):
        backward = simulate(ready, plan.bucket_nbytes, channel)
        found.append((backward.end, len(backward.buckets), plan))
    return [(plan, count) for _, count, plan in sorted(found, key=lambda each: each[:2])]


def _buckets(ready: Sequence[Ready], plan: Sync) -> int:
    nbytes, kinds = [each.nbytes for each in ready], [each.kind for each in ready]
    return len(plan_buckets(range(len(ready)), nbytes, kinds, plan.bucket_mib * MIB))


def _differs(candidate: tuple[Sync, int], picked: Sequence[tuple[Sync, int]]) -> bool:
    """Tell whether a plan has at least twice as many or half as many buckets as any that was picked of its kind."""
    plan, count = candidate
    alike = [other for one, other in picked if one.shard == plan.shard]
    return all(max(count, other) >= _APART * min(count, other) for other in alike)
