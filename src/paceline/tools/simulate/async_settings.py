"""What is simulated, as plain values: machines, links, rules, who comes and goes (pure).

Machines that differ and workers that come and go, from a few numbers (pure).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import NormalDist

from paceline._core.keyed_random import derive_key
from paceline.async_dp.hub.hub_rules import HubRules
from paceline.async_dp.worker.selection_policy import SelectionPolicy
from paceline.errors import UsageError
from paceline.parallel.local_sgd.sync_schedule import SyncSchedule
from paceline.transport.transport_interface import Envelope

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
"""From the share of the training that is done to the share of the full learning rate."""


EnvelopeFault = Callable[[Envelope], list[tuple[float, Envelope]]]
"""From an envelope under way to what arrives in its place, each so many seconds later; see `Network`."""


_SPREAD = math.sqrt(12)
"""Of numbers evenly drawn from 0 to 1: their width beside their standard deviation."""


def jitter_factor(jitter: float, key: int, step: int) -> float:
    """Return how many times as long as usual a step takes, 0.1 or more.

    Args:
        jitter: standard deviation, as a share. key: of the worker. step: from 0.
    """
    if not jitter:
        return 1.0
    drawn = derive_key(step, after=key) / 2**64
    return max(0.1, 1 + jitter * _SPREAD * (drawn - 0.5))


@dataclass(frozen=True)
class SimulatedMachine:
    """A worker's machine.

    Attributes:
        step_seconds: of a local step. jitter: share by which steps differ at random, as a standard deviation.
        up, down: bytes per second. lr: learning rate of its worker, None: the task's.
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
    """A worker leaves without a word, or comes (back), at a time; worker −1: the hub is killed, or started again."""

    seconds: float
    worker: int
    joins: bool


@dataclass(frozen=True)
class AsyncPlan:
    """What is simulated.

    Attributes:
        machines: one for each worker.
        seconds: of virtual time; steps: local ones of each worker; whichever is over first ends it.
        cadence: k, d and fragments. rules: of the hub. policy: of the workers. compression: of updates.
        stagger: workers send in turns, rather than all at once; see `Worker`.
        alike: all begin from the same parameters. warmup: steps of a worker in which it exchanges often.
        schedule: learning rate as a share of the full one, by the share that is done; None: always the full one.
        hub_up, hub_down: bytes per second of the hub's link. latency: seconds.
        score_every: virtual seconds between two looks at the centre; 0: only at the end.
        parameters: messages are as long as those of a model of so many; None: of the task's own.
        churn: who leaves and comes when. spoil: what happens to envelopes under way, None: nothing.
        seed: of jitter.

    Raises:
        UsageError: it has no workers or no end; somebody leaves who is not there, or comes who is.
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
        """Return when a worker leaves and comes, in order."""
        return sorted((each for each in self.churn if each.worker == worker), key=lambda each: each.seconds)

    def starts_present(self, worker: int) -> bool:
        """Tell whether a worker is there from the beginning: one that first comes is not."""
        turns = self.churn_of(worker)
        return not turns or not turns[0].joins

    def _check_turns(self, worker: int) -> None:
        who = "the hub" if worker < 0 else f"worker {worker}"
        if worker >= len(self.machines):
            raise UsageError(
                f"{who} comes or leaves; there are {len(self.machines)}", remedy="workers are counted from 0"
            )
        turns = self.churn_of(worker)
        for before, after in pairwise(turns):
            if before.joins == after.joins:
                what = "comes" if after.joins else "leaves"
                raise UsageError(
                    f"{who} {what} at {before.seconds:g} s and again at {after.seconds:g} s",
                    remedy="have it leave and come in turns",
                )
        if worker < 0 and turns[0].joins:
            raise UsageError(
                f"the hub is started at {turns[0].seconds:g} s, and was never killed",
                remedy="it is there from the beginning: kill it first",
            )


_PARTS = 10
"""Of the time, for `draw_churn`."""


def relative_step_times(workers: int, speeds: Sequence[float], spread: float = 0.0) -> list[float]:
    """Return how long each worker's step takes beside the fastest one's.

    Args:
        workers: how many. speeds: relative ones, repeated until there are enough; 2 makes a step in half the time of 1.
        spread: standard deviation of the logarithm of what steps take beside, at even quantiles; 0: nothing.

    Raises:
        UsageError: there are no workers; a number is out of range.

    Example:
        >>> paces(5, [1, 2, 4])
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
    """Return who leaves and comes back, so that about a share of all is away at a time.

    In every tenth of the time but the first and the last two so many workers leave without a word, one at least, drawn
    from those that are there; each is back a tenth later. Never are all away.

    Args:
        share: of the workers, from 0 to 0.5. workers: how many. seconds: the whole time. seed: of what is drawn.

    Raises:
        UsageError: the share is out of range.
    """
    if not 0 <= share <= 0.5:
        raise UsageError(f"{share:.0%} of the workers away", remedy="give a share from 0 to 50%")
    if not share or workers < 2:
        return []
    part, many = seconds / _PARTS, math.ceil(share * workers)
    away: set[int] = set()
    turns: list[ChurnEvent] = []
    for number in range(1, _PARTS - 2):
        here = sorted(set(range(workers)) - away, key=lambda worker: derive_key(seed, 6, number, worker))
        away = set(here[: min(many, len(here) - 1)])
        for worker in sorted(away):
            at = part * (number + derive_key(seed, 7, number, worker) / 2**64)
            turns += [ChurnEvent(at, worker, False), ChurnEvent(at + part, worker, True)]
    return turns
