"""Settings of a simulated asynchronous training: machines, hub rules, schedules, churn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from paceline.async_dp.hub.hub_settings import HubRules
from paceline.async_dp.worker.score_based_selection import SelectionPolicy
from paceline.errors import UsageError
from paceline.parallel.local_sgd.sync_schedule import SyncSchedule
from paceline.tools.simulate.simulated_machines import ChurnEvent, SimulatedMachine
from paceline.transport.envelope import Envelope

__all__ = [
    "AsyncPlan",
    "EnvelopeFault",
    "LrSchedule",
]

LrSchedule = Callable[[float], float]
"""Maps training progress (0 to 1) to a factor of the learning rate."""


EnvelopeFault = Callable[[Envelope], list[tuple[float, Envelope]]]
"""Maps a sent envelope to the (delay in seconds, envelope) pairs that arrive instead; see `virtual_time.Network`."""


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
        score_every: virtual seconds between evaluations of the global model; 0: only at the end.
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
