"""Buckets on their way: launched in one fixed order, and waited for when they are needed.

What one synchronised step cost on this rank.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline._core.step_state import step_state
from paceline.parallel.compression.compressed_bucket import CompressedBucket
from paceline.parallel.engine.bucket import Bucket
from paceline.parallel.engine.comm import Comm, PendingCollective
from paceline.parallel.engine.finite_check import FiniteCheck

__all__ = ["LaunchQueue", "SyncTimings"]


class LaunchQueue:
    """Launches the buckets of one round and waits for them.

    Args:
        comm: the ranks.
        sharded: reduce-scatter rather than all-reduce. (A bucket for the ledger alone is gathered.)
        overlap: launch without waiting for the one before.
    """

    def __init__(self, comm: Comm, *, sharded: bool, overlap: bool) -> None:
        self.comm, self.sharded, self.overlap = comm, sharded, overlap
        self.buckets: list[Bucket] = []
        self.timings = SyncTimings()
        self.step = 0  # the round
        self._next = 0  # all buckets before this one are launched
        self._under_way: dict[int, tuple[PendingCollective | CompressedBucket, float]] = {}
        self._factor = 1.0  # for results that are still under way
        self._looked = 0.0

    def open(self, step: int) -> None:
        """Begin round number `step`: nothing is launched yet."""
        self._next, self.step = 0, step
        self.timings = SyncTimings()
        if (recorder := step_state.recorder_of(self.comm)) is not None and self.buckets:
            recorder.planned(self.buckets, self._told)

    def _told(self) -> dict[str, object]:
        """Return what a timeline's reader needs to know of the buckets, in launch order."""
        call = "reduce-scatter" if self.sharded else "all-reduce"
        buckets = [
            {
                "call": call if bucket.slots else "all-gather",
                "nbytes": bucket.flat.nbytes,
                "parameters": len(bucket.slots),
                "first": bucket.slots[0].name if bucket.slots else "",
            }
            for bucket in self.buckets
        ]
        return {"step": self.step, "overlap": self.overlap, "buckets": buckets}

    def launch_full(self, mean: bool, finite_check: FiniteCheck | None = None) -> None:
        """Launch the buckets that are full, in order; the last one with gradients waits for the ledger.

        A launched bucket's parameters let go of their views; see [Note: late gradients] in `reducer`. `finite_check`
        measures what leaves.
        """
        last = sum(bool(bucket.slots) for bucket in self.buckets) - 1
        while self._next < last and self.buckets[self._next].pending == 0:
            bucket = self.buckets[self._next]
            bucket.await_writers()
            for slot in bucket.slots:
                slot.param.grad = None
            if finite_check is not None:
                self._measure(bucket, finite_check)
            self._launch(bucket, mean)
            self._next += 1

    def measure_rest(self, finite_check: FiniteCheck) -> None:
        """Measure what is about to leave with the ledger."""
        for bucket in self.buckets[self._next :]:
            self._measure(bucket, finite_check)

    @staticmethod
    def _measure(bucket: Bucket, finite_check: FiniteCheck) -> None:
        for slot in bucket.slots:
            slot.zero_if_needed()
        if bucket.slots:
            finite_check.record_peak(bucket.grads)

    def launch_rest(self, mean: bool) -> None:
        """Launch what is left, and wait for the ledger.

        A ledger of its own goes right before the last gradients: at the same place on all ranks, however many
        buckets each has launched by then, and without waiting for all of them.
        """
        self._factor = 1.0
        rest, last = self.buckets[self._next :], self.buckets[-1]
        if not last.slots:
            rest = [*rest[:-2], last, *rest[-2:-1]]
        for bucket in rest:
            self._launch(bucket, mean)
            if not self.overlap:
                self.wait_for(bucket)
        self._next = len(self.buckets)
        self.wait_for(last)

    def takes_mean(self, bucket: Bucket, mean: bool) -> bool:
        """Tell whether `bucket` is averaged by its collective rather than summed."""
        return mean and bool(bucket.slots)

    def _launch(self, bucket: Bucket, mean: bool) -> None:
        started = time.perf_counter()
        bucket.launched = True
        for slot in bucket.slots:
            slot.zero_if_needed()
        pending = self._send(bucket, mean)
        self._under_way[bucket.index] = pending, started
        freight, others = bucket.compressed, (self.comm.size - 1) / self.comm.size
        nbytes = bucket.flat.nbytes if freight is None else freight.payload_nbytes
        ways = 2 if bucket.slots and not self.sharded else 1
        sent = ways * others * bucket.flat.nbytes if freight is None else freight.sent_nbytes
        if (recorder := step_state.recorder_of(self.comm)) is not None:
            recorder.launched("reduce", bucket.index, nbytes, sent, bucket.ready, started)
        self.timings.calls += 1 if freight is None else freight.calls
        self.timings.nbytes += nbytes
        self.timings.sent_nbytes += sent

    def _send(self, bucket: Bucket, mean: bool) -> PendingCollective | CompressedBucket:
        if not bucket.slots:
            return self.comm.all_gather(bucket.flat)
        mean = self.takes_mean(bucket, mean)
        if bucket.compressed is not None:
            return bucket.compressed.launch(self.step, mean=mean)
        if self.sharded:
            return self.comm.reduce_scatter(bucket.flat, mean=mean)
        return self.comm.all_reduce(bucket.flat, mean=mean)

    def wait_for(self, bucket: Bucket) -> float:
        """Wait for `bucket` and finish its result; return the seconds that took."""
        if bucket.index not in self._under_way:
            return 0.0
        before = time.perf_counter()
        pending, started = self._under_way.pop(bucket.index)
        step_state.begin_wait(bucket.index)
        pending.wait()
        step_state.end_wait()
        self._scale(bucket)
        now = time.perf_counter()
        if (recorder := step_state.recorder_of(self.comm)) is not None:
            recorder.completed("reduce", bucket.index, pending.ended, now)
            self.poll()
        self.timings.call_seconds.append(now - started)
        return now - before

    def poll(self, apart: float = 0.0) -> None:
        """Take note of what has ended, for a timeline; not if this was done less than `local_only` seconds ago."""
        now = time.perf_counter()
        if now - self._looked >= apart:
            self._looked = now
            for pending, _ in self._under_way.values():
                pending.poll()

    def wait_all(self) -> float:
        """Wait for every bucket; return the seconds that took."""
        return sum(self.wait_for(bucket) for bucket in self.buckets) if self._under_way else 0.0

    def scale(self, factor: float) -> None:
        """Multiply the results: what has arrived now, the rest when it arrives."""
        self._factor = factor
        for bucket in self.buckets:
            if bucket.index not in self._under_way:
                self._scale(bucket)

    def _scale(self, bucket: Bucket) -> None:
        """Multiply a result that has arrived; what compression left out of it is in the same unit."""
        if self._factor == 1.0 or not bucket.slots:
            return
        low, high = self.owned_range(bucket)
        bucket.flat[low:high].mul_(self._factor)
        if bucket.compressed is not None and bucket.launched:
            bucket.compressed.rescale(self._factor)

    def read_ledger(self, mean: bool) -> list[float]:
        """Return the ledger, summed over ranks."""
        last = self.buckets[-1]
        if not last.slots:
            return self.comm.read_status(last.flat.view(self.comm.size, -1).sum(0))
        scale = self.comm.size if self.takes_mean(last, mean) else 1
        return [value * scale for value in self.comm.read_status(last.ledger)]

    def owned_range(self, bucket: Bucket) -> tuple[int, int]:
        """Return start and stop of what this rank holds reduced: its shard, or all of the bucket."""
        return bucket.span(self.comm.rank, self.comm.size) if self.sharded else bucket.span(0, 1)

    def owned_ranges(self) -> Sequence[tuple[Bucket, int, int]]:
        """Return (bucket, start, stop) of what this rank holds reduced."""
        return [(bucket, *self.owned_range(bucket)) for bucket in self.buckets if bucket.slots]


@dataclass
class SyncTimings:
    """The cost of the latest synchronised backward and the `step()` behind it.

    Attributes:
        calls: collectives launched by this rank.
        nbytes: bytes of the buffers handed to them; of compressed ones, the packets'.
        sent_nbytes: what this rank sends for them where it sends no more than it must: 2(N-1)/N of a buffer that is
            all-reduced, (N-1)/N of one that is reduce-scattered or gathered, and exactly that of packets.
        exposed_seconds: time in which this rank did nothing but wait for collectives or complete them.
        call_seconds: per collective, from its launch until this rank saw its end. With overlap that
            includes the work done in between, so it is an upper bound; without, it is the call itself.
    """

    calls: int = 0
    nbytes: float = 0
    sent_nbytes: float = 0.0
    exposed_seconds: float = 0.0
    call_seconds: list[float] = field(default_factory=list)
