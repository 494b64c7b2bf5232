"""Simulation of a backward whose gradients are reduced in buckets, and the best bucket size.

`simulate_backward` runs a backward with a model's real sizes and ready times, `best_bucket` tries bucket sizes.
`paceline.cost_model.bucket_closed_form` has the results that need no simulation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass

from paceline._core.units import MIB
from paceline.cost_model.bucket_assignment import bucket_caps, plan_buckets
from paceline.cost_model.step_simulator import Call, Compute, Launch, SimulatedStep, Wait, simulate_step
from paceline.errors import UsageError

__all__ = [
    "BestBucket",
    "CommChannel",
    "ReadyGradient",
    "SimulatedBackward",
    "best_bucket",
    "candidate_caps",
    "simulate_backward",
]


SecondsOf = Callable[[float], float]


@dataclass(frozen=True)
class ReadyGradient:
    """Gradient of a parameter.

    Attributes:
        nbytes: its size.
        seconds: from the beginning of backward until it is ready, with nothing else running.
        kind: device and dtype; gradients of different kinds don't share a bucket.
    """

    nbytes: int
    seconds: float
    kind: str = ""


@dataclass(frozen=True)
class CommChannel:
    """Costs of the calls of a backward; see the notes in `paceline.cost_model.step_simulator`.

    Attributes:
        seconds_of: seconds of an isolated call, by its bytes.
        gap_of: seconds until the next call can start, by the bytes; None: the call must have ended.
        lanes: limit of concurrent calls.
        launch_seconds: for which launching a call occupies the rank.
        computing_slows: factor by which computing is slower while a call runs.
        calls_slow: factor by which calls are slower while the rank computes.
    """

    seconds_of: SecondsOf
    gap_of: SecondsOf | None = None
    _: KW_ONLY
    lanes: float = 1
    launch_seconds: float = 0.0
    computing_slows: float = 1.0
    calls_slow: float = 1.0

    def launch(self, key: int, nbytes: float, phase: str = "") -> Launch:
        """Return the launch of a call of `nbytes`."""
        gap = math.inf if self.gap_of is None else self.gap_of(nbytes)
        return Launch(
            key, self.seconds_of(nbytes), gap=gap, host=self.launch_seconds, nbytes=nbytes, phase=phase
        )

    def run(self, program: Iterable[Compute | Launch | Wait]) -> SimulatedStep:
        """Simulate a program over this channel."""
        return simulate_step(
            program, lanes=self.lanes, computing_slows=self.computing_slows, calls_slow=self.calls_slow
        )


@dataclass(frozen=True)
class SimulatedBackward:
    """Timeline of a backward with its calls.

    Attributes:
        buckets: indices of the gradients in each bucket, in launch order.
        calls: when each bucket was launched, started and ended.
        compute_seconds: of backward without communication.
        computed: seconds until the last gradient is computed, with communication alongside.
        end: seconds until all calls have ended too.
    """

    buckets: tuple[tuple[int, ...], ...]
    calls: tuple[Call, ...]
    compute_seconds: float
    computed: float
    end: float

    @property
    def exposed(self) -> float:
        """Seconds that communication adds to backward."""
        return self.end - self.compute_seconds


@dataclass(frozen=True)
class BestBucket:
    """Bucket size with the shortest backward.

    Attributes:
        cap: bytes of a bucket; 0: one per parameter; infinite: one for all.
        backward: with these buckets.
        tried: every size and its backward, in ascending order of size.
    """

    cap: float
    backward: SimulatedBackward
    tried: tuple[tuple[float, SimulatedBackward], ...]


def simulate_backward(
    ready: Sequence[ReadyGradient],
    cap: float | Sequence[float],
    channel: CommChannel,
    *,
    overlap: bool = True,
    backward_seconds: float | None = None,
) -> SimulatedBackward:
    """Simulate a backward that sends its gradients in buckets.

    A bucket is launched when its last gradient is ready and all earlier buckets are launched; the last bucket when
    backward has ended, because it carries the ranks' status. Without overlap, each is launched after backward, when the
    one before has arrived.

    Args:
        ready: the gradients in the order in which they become ready.
        cap: bytes per bucket, as for `plan_buckets`.
        channel: costs of the calls.
        overlap: launch buckets while backward runs.
        backward_seconds: of the whole backward without communication; by default until the last gradient is ready.

    Raises:
        UsageError: there is no gradient, or they are not in order.

    Example:
        >>> channel = CommChannel(lambda nbytes: 0.1 + nbytes / 100)
        >>> gradients = [ReadyGradient(50, 1.0), ReadyGradient(50, 2.0)]
        >>> [round(simulate_backward(gradients, cap, channel).exposed, 9) for cap in (0, math.inf)]
        [0.6, 1.1]
    """
    whole = _checked(ready, backward_seconds)
    buckets = plan_buckets(range(len(ready)), [each.nbytes for each in ready], [r.kind for r in ready], cap)
    program: list[Compute | Launch | Wait] = []
    now = 0.0
    for key, members in enumerate(buckets):
        full = max(ready[index].seconds for index in members)
        launched = full if overlap and key < len(buckets) - 1 else whole
        if launched > now:
            program.append(Compute(launched - now))
            now = launched
        program.append(channel.launch(key, sum(ready[index].nbytes for index in members)))
        if not overlap:
            program.append(Wait(key))
    program += [Wait(key) for key in range(len(buckets))]
    timeline = channel.run(program)
    steps = zip(program, timeline.spans, strict=True)
    computed = max((end for step, (_, end) in steps if isinstance(step, Compute)), default=0.0)
    return SimulatedBackward(tuple(map(tuple, buckets)), timeline.calls, whole, computed, timeline.end)


def best_bucket(
    ready: Sequence[ReadyGradient],
    channel: CommChannel,
    caps: Iterable[float] | None = None,
    *,
    backward_seconds: float | None = None,
) -> BestBucket:
    """Return the bucket size with the shortest backward, the largest of equally good ones (fewest calls).

    Args:
        ready: as for `simulate_backward`.
        channel: as for `simulate_backward`.
        caps: bytes per bucket to try; by default those of `candidate_caps`.
        backward_seconds: as for `simulate_backward`.

    Raises:
        UsageError: there is no gradient or no size, or gradients are not in order.

    Example:
        >>> gradients = [ReadyGradient(1000, 0.01 * place) for place in range(1, 101)]
        >>> best_bucket(gradients, CommChannel(lambda nbytes: 0.01 + nbytes / 1e5), [0, 10_000, math.inf]).cap
        10000
    """
    sizes = sorted(set(candidate_caps(ready) if caps is None else caps))
    if not sizes:
        raise UsageError("no bucket size to try", remedy="give one or more, in bytes")
    total = sum(each.nbytes for each in ready)
    tried = [
        (cap, simulate_backward(ready, bucket_caps(cap, total), channel, backward_seconds=backward_seconds))
        for cap in sizes
    ]
    least = min(backward.end for _, backward in tried)
    cap, backward = max(
        (each for each in tried if each[1].end <= least * (1 + 1e-12)), key=lambda each: each[0]
    )
    return BestBucket(cap, backward, tuple(tried))


def candidate_caps(ready: Sequence[ReadyGradient]) -> list[float]:
    """Return the bucket sizes to try: 0, two per doubling from 1/4 MiB to the whole model, and infinity.

    Of sizes that group the gradients alike, only the smallest is kept.
    """
    whole = sum(each.nbytes for each in ready)
    steps = max(0, math.ceil(2 * math.log2(max(1.0, whole / (MIB / 4)))))
    ladder = [0.0, *(MIB / 4 * 2 ** (step / 2) for step in range(steps)), math.inf]
    nbytes, kinds = [each.nbytes for each in ready], [each.kind for each in ready]
    of_grouping = {}
    for cap in ladder:
        grouping = tuple(map(tuple, plan_buckets(range(len(ready)), nbytes, kinds, bucket_caps(cap, whole))))
        of_grouping.setdefault(grouping, cap)
    return list(of_grouping.values())


def _checked(ready: Sequence[ReadyGradient], backward_seconds: float | None) -> float:
    """Return the seconds of the whole backward."""
    if not ready:
        raise UsageError(
            "no gradient to send", remedy="give one or more, in the order in which they are ready"
        )
    if any(later.seconds < each.seconds for each, later in itertools.pairwise(ready)):
        raise UsageError("gradients are not in the order in which they are ready", remedy="sort them")
    last = ready[-1].seconds
    whole = last if backward_seconds is None else backward_seconds
    if whole < last or ready[0].seconds < 0 or any(each.nbytes < 0 for each in ready):
        raise UsageError(
            f"a backward of {whole} s with gradients from {ready[0].seconds} to {last} s",
            remedy="give sizes and seconds of 0 or more, and a backward at least as long as the last gradient",
        )
    return whole
