"""Machines of a simulated asynchronous training: their speeds and links, and when they leave and return (churn)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from paceline._core.keyed_random import derive_key
from paceline.errors import UsageError

__all__ = ["ChurnEvent", "SimulatedMachine", "draw_churn", "jitter_factor", "relative_step_times"]


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
