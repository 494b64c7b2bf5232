"""Which gradients share a bucket, what a backward with these buckets takes, and which bucket size is best (pure).

`plan_buckets` is how the engine groups; `simulate_backward` plays a backward with the real sizes and ready
times of a model;
`best_bucket` tries bucket sizes. `paceline.cost_model.bucket_closed_form` has what is known without a simulation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from paceline._core.units import MIB
from paceline.cost_model.step_simulator import Call, Compute, Launch, SimulatedStep, Wait, simulate_step
from paceline.errors import UsageError

__all__ = [
    "Backward",
    "BestBucket",
    "CommChannel",
    "ReadyGradient",
    "best_bucket",
    "caps_for",
    "plan_buckets",
    "simulate_backward",
    "update_parts",
]

_PART_NBYTES = 4 << 20
"""Gradients that a sharded optimizer updates together: enough to outweigh the fixed cost of an optimizer's step."""

SecondsOf = Callable[[float], float]


@dataclass(frozen=True)
class ReadyGradient:
    """A parameter's gradient.

    Attributes:
        nbytes: its size.
        seconds: from the beginning of backward until it is ready, with nothing else running.
        kind: gradients of different kinds (device, dtype) don't share a bucket.
    """

    nbytes: int
    seconds: float
    kind: str = ""


@dataclass(frozen=True)
class CommChannel:
    """What carries the calls of a backward, and what they cost; see the notes in `paceline.cost_model.step_simulator`.

    Attributes:
        seconds_of: seconds of a call of so many bytes that runs alone.
        gap_of: seconds after which the next call can start, as far as there are lanes; None: when it has ended.
        lanes: calls that can be under way at once.
        launch_seconds: for which the rank itself is busy with launching a call.
        computing_slows: how many times longer computing takes while a call is under way.
        calls_slow: how many times longer calls take while the rank computes.
    """

    seconds_of: SecondsOf
    gap_of: SecondsOf | None = None
    lanes: float = 1
    launch_seconds: float = 0.0
    computing_slows: float = 1.0
    calls_slow: float = 1.0

    def launch(self, key: int, nbytes: float, phase: str = "") -> Launch:
        """Return the launch of a call of so many bytes."""
        gap = math.inf if self.gap_of is None else self.gap_of(nbytes)
        return Launch(key, self.seconds_of(nbytes), gap, self.launch_seconds, nbytes, phase)

    def run(self, program: Iterable[Compute | Launch | Wait]) -> SimulatedStep:
        """Return when the steps of a program and its calls begin and end."""
        return simulate_step(
            program, lanes=self.lanes, computing_slows=self.computing_slows, calls_slow=self.calls_slow
        )


@dataclass(frozen=True)
class Backward:
    """A backward with its calls.

    Attributes:
        buckets: indices of the gradients in each bucket, in launch order.
        calls: when each bucket was launched, started and ended.
        bare: seconds of backward without communication.
        computed: seconds until the last gradient is computed, with communication beside it.
        end: seconds until all calls have ended too.
    """

    buckets: tuple[tuple[int, ...], ...]
    calls: tuple[Call, ...]
    bare: float
    computed: float
    end: float

    @property
    def exposed(self) -> float:
        """Seconds that communication adds to backward."""
        return self.end - self.bare


@dataclass(frozen=True)
class BestBucket:
    """The bucket size with the shortest backward.

    Attributes:
        cap: bytes of a bucket; 0: one per parameter; infinite: one for all.
        backward: with these buckets.
        tried: every size and its backward, in ascending order of size.
    """

    cap: float
    backward: Backward
    tried: tuple[tuple[float, Backward], ...]


def plan_buckets(
    order: Iterable[int], nbytes: Sequence[int], kinds: Sequence[object], cap: float | Sequence[float]
) -> list[list[int]]:
    """Return the parameters of each bucket, buckets in the order in which they fill.

    A bucket is full when it reaches `cap`, as in torch's DistributedDataParallel; parameters are not split,
    so it may hold up to one parameter more.

    Args:
        order: parameter indices in the order in which their gradients become ready.
        nbytes: bytes of each parameter's gradient, by parameter index.
        kinds: what must not be mixed in one buffer (device, dtype), by parameter index.
        cap: bytes per bucket; 0: one parameter each; ``math.inf``: one bucket per kind. Several: of the first, the
            second … bucket of a kind, the last one for all that follow (torch's DDP by default: 1 MiB, then 25 MiB).

    Example:
        >>> plan_buckets([2, 1, 0], nbytes=[8, 6, 4], kinds=["f", "f", "f"], cap=10)
        [[2, 1], [0]]
    """
    caps = list(cap) if isinstance(cap, Sequence) else [cap]
    filling: dict[object, list[int]] = {}
    held: dict[object, int] = {}
    closed: dict[object, int] = {}
    full: list[list[int]] = []
    for index in order:
        kind = kinds[index]
        if kind not in filling:
            filling[kind], held[kind] = [], 0
        filling[kind].append(index)
        held[kind] += nbytes[index]
        if held[kind] >= caps[min(closed.get(kind, 0), len(caps) - 1)]:
            full.append(filling.pop(kind))
            closed[kind] = closed.get(kind, 0) + 1
    return full + list(filling.values())


def update_parts(nbytes: Iterable[float]) -> list[list[int]]:
    """Return which buckets a sharded optimizer updates together: runs of 4 MiB or more, as every update costs a call.

    Example:
        >>> update_parts([3 << 20, 3 << 20, 5 << 20, 1 << 20])
        [[0, 1], [2], [3]]
    """
    parts: list[list[int]] = [[]]
    held = 0.0
    for index, each in enumerate(nbytes):
        if held >= _PART_NBYTES:
            parts.append([])
            held = 0.0
        parts[-1].append(index)
        held += each
    return parts


def simulate_backward(
    ready: Sequence[ReadyGradient],
    cap: float | Sequence[float],
    channel: CommChannel,
    *,
    overlap: bool = True,
    backward_seconds: float | None = None,
) -> Backward:
    """Return what a backward takes whose gradients travel in buckets.

    A bucket leaves when its last gradient is ready and all buckets before it have left, the last bucket when backward
    has ended (it carries what ranks tell one another). Without overlap each leaves when the one before has arrived,
    after backward.

    Args:
        ready: the gradients in the order in which they become ready.
        cap: bytes per bucket, as for `plan_buckets`.
        channel: what calls cost.
        overlap: whether buckets leave while backward still runs.
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
    at = 0.0
    for key, members in enumerate(buckets):
        full = max(ready[index].seconds for index in members)
        leaves = full if overlap and key < len(buckets) - 1 else whole
        if leaves > at:
            program.append(Compute(leaves - at))
            at = leaves
        program.append(channel.launch(key, sum(ready[index].nbytes for index in members)))
        if not overlap:
            program.append(Wait(key))
    program += [Wait(key) for key in range(len(buckets))]
    timeline = channel.run(program)
    steps = zip(program, timeline.spans, strict=True)
    computed = max((end for step, (_, end) in steps if isinstance(step, Compute)), default=0.0)
    return Backward(tuple(map(tuple, buckets)), timeline.calls, whole, computed, timeline.end)


def best_bucket(
    ready: Sequence[ReadyGradient],
    channel: CommChannel,
    caps: Iterable[float] | None = None,
    *,
    backward_seconds: float | None = None,
) -> BestBucket:
    """Return the bucket size with the shortest backward; of equally good ones the largest, which has the fewest calls.

    Args:
        ready, channel, backward_seconds: as for `simulate_backward`.
        caps: bytes per bucket to try; by default those of `caps_for`.

    Raises:
        UsageError: there is no gradient or no size, or gradients are not in order.

    Example:
        >>> gradients = [ReadyGradient(1000, 0.01 * place) for place in range(1, 101)]
        >>> best_bucket(gradients, CommChannel(lambda nbytes: 0.01 + nbytes / 1e5), [0, 10_000, math.inf]).cap
        10000
    """
    sizes = sorted(set(caps_for(ready) if caps is None else caps))
    if not sizes:
        raise UsageError("no bucket size to try", remedy="give one or more, in bytes")
    tried = [
        (cap, simulate_backward(ready, cap, channel, backward_seconds=backward_seconds)) for cap in sizes
    ]
    least = min(backward.end for _, backward in tried)
    cap, backward = max(
        (each for each in tried if each[1].end <= least * (1 + 1e-12)), key=lambda each: each[0]
    )
    return BestBucket(cap, backward, tuple(tried))


def caps_for(ready: Sequence[ReadyGradient]) -> list[float]:
    """Return the bucket sizes worth trying: 0, two to each doubling from 1/4 MiB to the whole, and infinity.

    Sizes that group the gradients alike are there once, as the smallest of them.
    """
    whole = sum(each.nbytes for each in ready)
    steps = max(0, math.ceil(2 * math.log2(max(1.0, whole / (MIB / 4)))))
    ladder = [0.0, *(MIB / 4 * 2 ** (step / 2) for step in range(steps)), math.inf]
    nbytes, kinds = [each.nbytes for each in ready], [each.kind for each in ready]
    of_grouping = {}
    for cap in ladder:
        grouping = tuple(map(tuple, plan_buckets(range(len(ready)), nbytes, kinds, cap)))
        of_grouping.setdefault(grouping, cap)
    return list(of_grouping.values())


def _checked(ready: Sequence[ReadyGradient], backward_seconds: float | None) -> float:
    """Return the seconds of the whole backward."""
    if not ready:
        raise UsageError("no gradient to send", remedy="give one or more, in the order of their being ready")
    if any(later.seconds < each.seconds for each, later in itertools.pairwise(ready)):
        raise UsageError("gradients are not in the order of their being ready", remedy="sort them")
    last = ready[-1].seconds
    whole = last if backward_seconds is None else backward_seconds
    if whole < last or ready[0].seconds < 0 or any(each.nbytes < 0 for each in ready):
        raise UsageError(
            f"a backward of {whole} s with gradients from {ready[0].seconds} to {last} s",
            remedy="give sizes and seconds of 0 or more, the whole as long as the last gradient",
        )
    return whole
