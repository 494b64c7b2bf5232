"""Launches the buckets of a round in one fixed order, and waits for each where its result is needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline._core.step_state import step_state
from paceline.parallel.buckets.bucket import Bucket
from paceline.parallel.buckets.neighbour_exchange import NeighbourExchange
from paceline.parallel.comm_hook import CommHook, GradBucket
from paceline.parallel.engine.engine_protocols import InFlight
from paceline.parallel.engine.gradient_finite_check import FiniteCheck
from paceline.parallel.engine.loss_weights import Factor, multiply_by
from paceline.parallel.gradient_collectives import Comm

__all__ = ["LaunchQueue", "RoundMoments", "SyncTimings"]


@dataclass
class SyncTimings:
    """The cost of the latest synchronised backward and the `step()` after it, on this rank.

    Attributes:
        calls: collectives launched.
        nbytes: bytes of their buffers; for compressed buckets, bytes of the packets.
        sent_nbytes: the least that this rank has to send for them: 2(N-1)/N of a buffer that is all-reduced, (N-1)/N
            of one that is reduce-scattered or gathered, and exactly that of packets.
        exposed_seconds: time in which this rank only waited for collectives or completed them.
        call_seconds: per collective, from its launch until this rank saw its end. With overlap that includes the work
            done in between, so it is an upper bound; without, it is the duration of the call.
    """

    calls: int = 0
    nbytes: float = 0
    sent_nbytes: float = 0.0
    exposed_seconds: float = 0.0
    call_seconds: list[float] = field(default_factory=list)


@dataclass
class RoundMoments:
    """When the latest backward reached its stages on this rank, in seconds of ``time.perf_counter()``.

    Attributes:
        began: the first gradient was computed next.
        launched: the first bucket was launched.
        computed: all gradients were there.
        reduced: the round was closed; 0 before the first one.
    """

    began: float = 0.0
    launched: float = 0.0
    computed: float = 0.0
    reduced: float = 0.0


class LaunchQueue:
    """Launches the buckets of one round and waits for them.

    Args:
        comm: the ranks.
        sharded: reduce-scatter instead of all-reduce. (A bucket that holds only the round status is all-reduced.)
        overlap: launch without waiting for the previous bucket.

    Attributes:
        hook: reduces the buckets instead of `comm`.
        neighbours: if sharded and ranks keep copies of their neighbours' shards, their exchanges.
        moments: of the latest round.
    """

    def __init__(self, comm: Comm, *, sharded: bool, overlap: bool) -> None:
        self.comm, self.sharded, self.overlap = comm, sharded, overlap
        self.buckets: list[Bucket] = []
        self.hook: CommHook | None = None
        self.neighbours: NeighbourExchange | None = None
        self.moments = RoundMoments()
        self.timings = SyncTimings()
        self.step = 0  # the round
        self._next = 0  # all buckets before this one are launched
        self._in_flight: dict[int, tuple[InFlight, float]] = {}
        self._factor: Factor = 1.0  # for results that are still in flight
        self._polled = 0.0
        self._launching = threading.Lock()

    def begin_round(self, step: int) -> None:
        """Begin round `step`: nothing is launched yet."""
        self._next, self.step, self._factor = 0, step, 1.0
        self.moments.began, self.moments.launched = time.perf_counter(), 0.0
        self.timings = SyncTimings()
        if (recorder := step_state.recorder_of(self.comm)) is not None and self.buckets:
            recorder.planned(self.buckets, self._describe)

    def _describe(self) -> dict[str, object]:
        """Return the buckets in launch order, for a timeline."""
        call = "reduce-scatter" if self.sharded else "all-reduce"
        buckets = [
            {
                "call": call if bucket.slots else "all-reduce",
                "nbytes": bucket.flat.nbytes,
                "parameters": len(bucket.slots),
                "first": bucket.slots[0].name if bucket.slots else "",
            }
            for bucket in self.buckets
        ]
        return {"step": self.step, "overlap": self.overlap, "buckets": buckets}

    # ------------------------------------------------------------------ launch

    def launch_full(self, mean: bool, finite_check: FiniteCheck | None = None) -> None:
        """Launch full buckets in order; the last one with gradients waits for the round status.

        A launched bucket's parameters lose their views; see [Note: late gradients] in `reducer`.

        Args:
            mean: average over ranks instead of summing.
            finite_check: measures what is sent.
        """
        # Autograd runs the hooks of each device in a thread, and a launch may let another thread run.
        with self._launching:
            self._launch_full(mean, finite_check)

    def _launch_full(self, mean: bool, finite_check: FiniteCheck | None) -> None:
        last = sum(bool(bucket.slots) for bucket in self.buckets) - 1
        while self._next < last and self.buckets[self._next].pending < 1:
            bucket = self.buckets[self._next]
            bucket.await_writers()
            if not bucket.collect(complete=False):
                break
            self._collected(bucket)
            bucket.attached = False
            for param in bucket.members:
                param.grad = None
            if finite_check is not None and bucket.slots:
                finite_check.record_peak(bucket.grads)
            self._launch(bucket, mean)
            self._next += 1
            if bucket.own is not None:
                self._free_before(bucket)

    def _collected(self, bucket: Bucket) -> None:
        """Complete the gradients of this backward in `bucket`, which is sent next."""

    def _free_before(self, bucket: Bucket) -> None:
        """Wait for all buckets but `bucket` and the one before, so that their memory is freed."""
        for index in [index for index in self._in_flight if index < bucket.index - 1]:
            self.wait_for(self.buckets[index])

    def complete_rest(self, finite_check: FiniteCheck | None) -> None:
        """Complete the buckets that are not launched yet; `finite_check` measures what is sent."""
        for bucket in self.buckets[self._next :]:
            bucket.collect()
            self._collected(bucket)
            if finite_check is not None and bucket.slots:
                finite_check.record_peak(bucket.grads)

    def launch_rest(self, mean: bool) -> None:
        """Launch the remaining buckets, which are complete, and wait for the round status.

        A separate status bucket goes right before the last gradients: at the same place on all ranks, however many
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
        if mean and self._sums_status(last):
            last.grads.div_(self.comm.size)

    def _sums_status(self, bucket: Bucket) -> bool:
        """Return whether `bucket` is never averaged, since that would divide the round status before it is added.

        Ranks that call for a sum by mistake would then read another status than those that call for a mean.
        """
        return bucket.status.numel() > 0 and self.comm.divides_before_sum(bucket.flat)

    def _launch(self, bucket: Bucket, mean: bool) -> None:
        started = time.perf_counter()
        if not self.moments.launched:
            self.moments.launched = started
        bucket.launched = True
        self._in_flight[bucket.index] = self._send(bucket, mean), started
        compressed, ranks = bucket.compressed, self.comm.size
        nbytes = bucket.flat.nbytes if compressed is None else compressed.payload_nbytes
        scatters = bucket.slots and self.sharded
        share = self.comm.scatter_share if scatters else 2 * (ranks - 1) / ranks
        sent = share * bucket.flat.nbytes if compressed is None else compressed.sent_nbytes
        if (recorder := step_state.recorder_of(self.comm)) is not None:
            recorder.launched("reduce", bucket.index, nbytes, sent, bucket.ready, started)
        self.timings.calls += 1 if compressed is None else compressed.calls
        self.timings.nbytes += nbytes
        self.timings.sent_nbytes += sent

    def _send(self, bucket: Bucket, mean: bool) -> InFlight:
        if not bucket.slots:
            return self.comm.all_reduce(bucket.flat)
        if self.hook is not None:
            return self.hook.reduce(self._seen_by_hook(bucket), bucket.grads, mean=mean)
        if bucket.compressed is not None:
            return bucket.compressed.launch(self.step, mean=mean)
        if self.neighbours is not None:
            return self.neighbours.reduce(bucket.flat, mean=mean)
        if self.sharded:
            return self.comm.reduce_scatter(bucket.flat, mean=mean)
        return self.comm.all_reduce(bucket.flat, mean=mean and not self._sums_status(bucket))

    def _seen_by_hook(self, bucket: Bucket) -> GradBucket:
        last = all(not later.slots for later in self.buckets[bucket.index + 1 :])
        views, params = [slot.view for slot in bucket.slots], [slot.param for slot in bucket.slots]
        return GradBucket(bucket.index, bucket.grads, views, params, last=last)

    # ------------------------------------------------------------------ wait

    def wait_for(self, bucket: Bucket) -> float:
        """Wait for `bucket` and complete its result; return the seconds that took."""
        if bucket.index not in self._in_flight:
            return 0.0
        before = time.perf_counter()
        pending, started = self._in_flight.pop(bucket.index)
        step_state.begin_wait(bucket.index)
        pending.wait()
        step_state.end_wait()
        bucket.keep_own()
        self._scale(bucket)
        now = time.perf_counter()
        if (recorder := step_state.recorder_of(self.comm)) is not None:
            recorder.completed("reduce", bucket.index, pending.ended, now)
            self.poll()
        self.timings.call_seconds.append(now - started)
        return now - before

    def wait_all(self) -> float:
        """Wait for every bucket; return the seconds that took."""
        return sum(self.wait_for(bucket) for bucket in self.buckets) if self._in_flight else 0.0

    def poll(self, interval: float = 0.0) -> None:
        """Record which collectives have completed, for a timeline, at most once per `interval` seconds."""
        now = time.perf_counter()
        if now - self._polled >= interval:
            self._polled = now
            for pending, _ in self._in_flight.values():
                pending.poll()

    # ------------------------------------------------------------------ results

    def scale(self, factor: Factor) -> None:
        """Multiply the results: those that are complete now, the others on completion."""
        self._factor = factor
        for bucket in self.buckets:
            if bucket.index not in self._in_flight:
                self._scale(bucket)

    def _scale(self, bucket: Bucket) -> None:
        """Multiply a complete result, and the residual that compression has left of it."""
        if not bucket.slots or (not isinstance(self._factor, torch.Tensor) and self._factor == 1.0):
            return
        held = [self.owned_range(bucket)]
        if self.neighbours is not None:
            held.append(bucket.span(self.neighbours.right, self.comm.shards))
        for low, high in held:
            multiply_by([bucket.result(low, high)], self._factor)
        if bucket.compressed is not None and bucket.launched:
            bucket.compressed.rescale(self._factor)

    def read_status(self, mean: bool) -> list[float]:
        """Return the round status, summed over ranks; `mean` as in `launch_rest`."""
        scale, numbers = self._status_scale(mean), self.comm.read_status(self.buckets[-1].status)
        return numbers if scale == 1 else [value * scale for value in numbers]

    def status_on_device(self, mean: bool) -> torch.Tensor:
        """Return the round status, summed over ranks, as float64 numbers where it is."""
        return self.buckets[-1].status.to(torch.float64) * self._status_scale(mean)

    def _status_scale(self, mean: bool) -> int:
        last = self.buckets[-1]
        return self.comm.size if last.slots and mean and not self._sums_status(last) else 1

    def owned_range(self, bucket: Bucket) -> tuple[int, int]:
        """Return start and stop of this rank's part of the result: its shard, or the whole bucket."""
        return bucket.span(self.comm.shard, self.comm.shards) if self.sharded else bucket.span(0, 1)

    def owned_ranges(self) -> Sequence[tuple[Bucket, int, int]]:
        """Return (bucket, start, stop) of every part of the result that this rank holds."""
        return [(bucket, *self.owned_range(bucket)) for bucket in self.buckets if bucket.slots]
