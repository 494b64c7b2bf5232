"""Buckets on their way: launched in one fixed order, waited for in the same."""

from __future__ import annotations

import time
from collections.abc import Sequence

from paceline.sync.bucket import Bucket
from paceline.sync.timings import SyncTimings
from paceline.sync.wire import Pending, Wire

__all__ = ["Flight"]


class Flight:
    """Launches the buckets of one round and waits for them.

    Args:
        wire: the ranks.
        sharded: reduce-scatter rather than all-reduce. (A bucket for the ledger alone is gathered.)
        overlap: launch without waiting for the one before.
    """

    def __init__(self, wire: Wire, *, sharded: bool, overlap: bool) -> None:
        self.wire, self.sharded, self.overlap = wire, sharded, overlap
        self.buckets: list[Bucket] = []
        self.timings = SyncTimings()
        self._next = 0
        self._under_way: list[tuple[Pending, float]] = []

    def open(self) -> None:
        """Begin a round: nothing is launched yet."""
        self._next = 0
        self.timings = SyncTimings()

    def launch_full(self, mean: bool) -> None:
        """Launch the buckets that are full, in order; the last one waits for the ledger.

        A launched bucket's parameters let go of their views; see [Note: late gradients] in `reducer`.
        """
        while self._next < len(self.buckets) - 1 and self.buckets[self._next].pending == 0:
            bucket = self.buckets[self._next]
            for slot in bucket.slots:
                slot.param.grad = None
            self._launch(bucket, mean)

    def land(self, mean: bool) -> None:
        """Launch what is left and wait for everything."""
        for bucket in self.buckets[self._next :]:
            self._launch(bucket, mean)
            if not self.overlap:
                self._wait()
        self._wait()

    def takes_mean(self, bucket: Bucket, mean: bool) -> bool:
        """Tell whether `bucket` is averaged by its collective rather than summed."""
        return mean and not self.sharded and bool(bucket.slots)

    def _launch(self, bucket: Bucket, mean: bool) -> None:
        started = time.perf_counter()
        bucket.launched = True
        for slot in bucket.slots:
            slot.freshen()
        if not bucket.slots:
            pending = self.wire.all_gather(bucket.flat)
        elif self.sharded:
            pending = self.wire.reduce_scatter(bucket.flat)
        else:
            pending = self.wire.all_reduce(bucket.flat, mean=self.takes_mean(bucket, mean))
        self._under_way.append((pending, started))
        self._next = bucket.index + 1
        self.timings.calls += 1
        self.timings.nbytes += bucket.flat.nbytes

    def _wait(self) -> None:
        for pending, started in self._under_way:
            pending.wait()
            self.timings.call_seconds.append(time.perf_counter() - started)
        self._under_way.clear()

    def read_ledger(self, mean: bool) -> list[float]:
        """Return the ledger, summed over ranks, once everything has landed."""
        last = self.buckets[-1]
        if not last.slots:
            return last.flat.view(self.wire.size, -1).sum(0).tolist()
        scale = self.wire.size if self.takes_mean(last, mean) else 1
        return [value * scale for value in last.ledger.tolist()]

    def own_parts(self) -> Sequence[tuple[Bucket, int, int]]:
        """Return (bucket, start, stop) of what this rank holds reduced: its shard, or all of each bucket."""
        rank, shards = (self.wire.rank, self.wire.size) if self.sharded else (0, 1)
        return [(bucket, *bucket.span(rank, shards)) for bucket in self.buckets if bucket.slots]
