"""Settings of a simulated asynchronous training: machines, links, hub rules, churn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import NormalDist

from paceline._core.keyed_random import derive_key
from paceline.async_dp.hub.hub_settings import HubRules
from paceline.async_dp.worker.score_based_selection import SelectionPolicy
from paceline.errors import UsageError
from paceline.parallel.local_sgd.sync_schedule import SyncSchedule
from paceline.transport.envelope import Envelope

__all__ = [
    "AsyncPlan",
    "ChurnEvent",
    "EnvelopeFault",
    "LrSchedule",
    "SimulatedMachine",
    "draw_churn",
    "jitter_factor",
    "relative_step_times",
]

LrSchedule = Callable[[float], float]
"""Maps training progress (0 to 1) to a factor of the learning rate."""


EnvelopeFault = Callable[[Envelope], list[tuple[float, Envelope]]]
"""Maps a sent envelope to the (delay in seconds, envelope) pairs that arrive instead; see `virtual_time.Network`."""


_UNIFORM_WIDTH = math.sqrt(12)
"""Width of a uniform distribution per standard deviation."""


def jitter_factor(jitter: float, key: int, step: int) -> float:
    """Return the random factor of a step's time, 0.1 or more.

    Args:
        jitter: relative standard deviation.
        key: random key of the worker.
        step: number of the step, from 0.
    """
    if not jitter:
        return 1.0
    drawn = derive_key(step, after=key) / 2**64
    return max(0.1, 1 + jitter * _UNIFORM_WIDTH * (drawn - 0.5))


@dataclass(frozen=True)
class SimulatedMachine:
    """A worker's machine.

    Attributes:
        step_seconds: time of a local step.
        jitter: relative standard deviation of step times.
        up: bytes per second sent.
        down: bytes per second received.
        lr: learning rate of its worker; None: the task's.
    """

    step_seconds: float = 0.1
    jitter: float = 0.0
    up: float = 125e6
    down: float = 125e6
    lr: float | None = None

    def __post_init__(self) -> None:
        for name in ("step_seconds", "up", "down"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise UsageError(f"{name}={value!r} of a machine", remedy="give a number above 0")
        if not 0 <= self.jitter < math.inf:
            raise UsageError(f"jitter={self.jitter!r} of a machine", remedy="give a share of 0 or more")


@dataclass(frozen=True)
class ChurnEvent:
    """A worker that crashes or joins at a time; worker −1 stands for the hub."""

    seconds: float
    worker: int
    joins: bool


@dataclass(frozen=True, kw_only=True)
class AsyncPlan:
    """Settings of an asynchronous simulation, which ends after `seconds` or `steps`, whichever is first.

    Attributes:
        machines: one per worker.
        seconds: virtual time.
        steps: local steps of each worker.
        cadence: steps between updates, delay, and fragments.
        rules: rules of the hub.
        policy: selection policy of the workers.
        compression: compression of updates.
        stagger: workers send in turns instead of all at once; see `AsyncWorker`.
        same_init: all workers start from the same parameters.
        warmup: local steps of a worker with frequent exchanges.
        schedule: learning-rate schedule; None: constant.
        hub_up: bytes per second sent by the hub.
        hub_down: bytes per second received by the hub.
        latency: seconds per message.
        score_every: virtual seconds between evaluations of the centre; 0: only at the end.
        parameters: size messages for a model of so many parameters; None: the task's model.
        churn: workers that leave and join.
        fault: faults injected into envelopes in transit, if any.
        seed: seed of the jitter.

    Raises:
        UsageError: there are no workers or no end, an absent worker leaves, or a present one joins.
    """

    machines: Sequence[SimulatedMachine]
    seconds: float = math.inf
    steps: int | None = None
    cadence: SyncSchedule = field(default_factory=lambda: SyncSchedule(10, 1, 5))
    rules: HubRules = field(default_factory=HubRules)
    policy: SelectionPolicy = field(default_factory=SelectionPolicy)
    compression: str | None = "int4"
    stagger: bool = True
    same_init: bool = True
    warmup: int = 0
    schedule: LrSchedule | None = None
    hub_up: float = 125e6
    hub_down: float = 125e6
    latency: float = 1e-4
    score_every: float = 0.0
    parameters: int | None = None
    churn: Sequence[ChurnEvent] = ()
    fault: EnvelopeFault | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.machines:
            raise UsageError("a simulation without workers", remedy="give one or more")
        if self.steps is None and self.seconds == math.inf:
            raise UsageError("a simulation without an end", remedy="give seconds or steps")
        if self.steps is not None and (type(self.steps) is not int or self.steps < 1):
            raise UsageError(f"steps={self.steps!r}", remedy="give a whole number of 1 or more")
        if self.parameters is not None and self.parameters < 1:
            raise UsageError(f"parameters={self.parameters!r}", remedy="give 1 or more, or None")
        if not self.seconds > 0:
            raise UsageError(f"{self.seconds!r} seconds of virtual time", remedy="give more than 0")
        for worker in {each.worker for each in self.churn}:
            self._check_turns(worker)

    def churn_of(self, worker: int) -> list[ChurnEvent]:
        """Return when a worker leaves and joins, in order."""
        return sorted((each for each in self.churn if each.worker == worker), key=lambda each: each.seconds)

    def starts_present(self, worker: int) -> bool:
        """Return whether a worker is present from the beginning: not if its first event is to join."""
        turns = self.churn_of(worker)
        return not turns or not turns[0].joins

    def _check_turns(self, worker: int) -> None:
        name = "the hub" if worker < 0 else f"worker {worker}"
        if worker >= len(self.machines):
            raise UsageError(
                f"{name} joins or leaves; there are {len(self.machines)} workers",
                remedy="workers are numbered from 0",
            )
        turns = self.churn_of(worker)
        for before, after in pairwise(turns):
            if before.joins == after.joins:
                event = "joins" if after.joins else "leaves"
                raise UsageError(
                    f"{name} {event} at {before.seconds:g} s and again at {after.seconds:g} s",
                    remedy="alternate between leaving and joining",
                )
        if worker < 0 and turns[0].joins:
            raise UsageError(
                f"the hub is started at {turns[0].seconds:g} s but is still running",
                remedy="it runs from the beginning: kill it first",
            )


_CHURN_PERIODS = 10
"""Periods of the whole time, for `draw_churn`."""


def relative_step_times(workers: int, speeds: Sequence[float], spread: float = 0.0) -> list[float]:
    """Return each worker's step time relative to the fastest one.

    Args:
        workers: number of workers.
        speeds: relative speeds, repeated for all workers; speed 2 halves the step time of speed 1.
        spread: standard deviation of the logarithm of an additional factor, at even quantiles; 0: none.

    Raises:
        UsageError: there are no workers, or a number is out of range.

    Example:
        >>> relative_step_times(5, [1, 2, 4])
        [4.0, 2.0, 1.0, 4.0, 2.0]
    """
    if workers < 1:
        raise UsageError(f"{workers} workers", remedy="give 1 or more")
    if not speeds or not all(0 < each < math.inf for each in speeds):
        raise UsageError(f"speeds {list(speeds)}", remedy="give numbers above 0, such as 1:1:2:4")
    if not 0 <= spread < math.inf:
        raise UsageError(f"spread={spread!r}", remedy="give a number from 0 on, such as 0.5")
    normal = NormalDist()
    times = [
        math.exp(spread * normal.inv_cdf((worker + 0.5) / workers)) / speeds[worker % len(speeds)]
        for worker in range(workers)
    ]
    fastest = min(times)
    return [each / fastest for each in times]


def draw_churn(share: float, workers: int, seconds: float, seed: int = 0) -> list[ChurnEvent]:
    """Return random churn with about a share of the workers absent at any time.

    In each tenth of the time except the first and the last two, that share of the workers (at least one, drawn from
    those present) crashes; each returns a tenth later. At least one worker is always present.

    Args:
        share: share of the workers, from 0 to 0.5.
        workers: number of workers.
        seconds: the whole time.
        seed: seed of the random choices.

    Raises:
        UsageError: the share is out of range.
    """
    if not 0 <= share <= 0.5:
        raise UsageError(f"{share:.0%} of the workers absent", remedy="give a share from 0 to 50%")
    if not share or workers < 2:
        return []
    period, count = seconds / _CHURN_PERIODS, math.ceil(share * workers)
    absent: set[int] = set()
    events: list[ChurnEvent] = []
    for number in range(1, _CHURN_PERIODS - 2):
        present = sorted(set(range(workers)) - absent, key=lambda worker: derive_key(seed, 6, number, worker))
        absent = set(present[: min(count, len(present) - 1)])
        for worker in sorted(absent):
            at = period * (number + derive_key(seed, 7, number, worker) / 2**64)
            events += [ChurnEvent(at, worker, False), ChurnEvent(at + period, worker, True)]
    return events
