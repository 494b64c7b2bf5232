"""What runs in virtual time came to, as plain values: points of a curve, a row for each setting (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

__all__ = ["AsyncRow", "LossPoint", "seconds_to_loss", "with_times_to_target"]


@dataclass(frozen=True)
class LossPoint:
    """What is learnt until a time: virtual seconds, local steps of all workers until then, updates, held-out loss."""

    seconds: float
    steps: int
    updates: int
    loss: float


@dataclass(frozen=True)
class AsyncRow:
    """A setting and what came of it.

    Attributes:
        name: of the setting. every, delay: k and d; None: gradients are averaged at every step, as DDP does.
        loss: of the centre at the end. best: the best of a worker's own parameters then.
        seconds: of virtual time until the last worker's last step. steps: local ones, of all workers.
        nbytes: sent and received by a worker on average, headers of the network included.
        points: loss over time. digest: of the centre's numbers at the end.
        initial_loss: before the first step.
        staleness_median, staleness_max: of updates that were taken in, in rounds; None: there were none.
        updates: taken in. refused: by reason. counts: of all workers together.
        hub_busy: share of the time in which the busier direction of the hub's link was in use.
        communication: share of the time of a step in which all wait for the network (DDP).
        waiting: share of the time that workers wait for the slowest (DDP), on average.
        replaced: workers that took another's parameters: who and why.
        seconds_to_target: None: it never came to it. speedup: DDP's time to the target ÷ this one's; None: not known.
    """

    name: str
    every: int | None
    delay: int | None
    loss: float
    best: float
    seconds: float
    steps: int
    nbytes: float
    points: Sequence[LossPoint]
    digest: str
    initial_loss: float
    staleness_median: float | None = None
    staleness_max: float | None = None
    updates: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    hub_busy: float = 0.0
    communication: float = 0.0
    waiting: float = 0.0
    replaced: Sequence[str] = ()
    seconds_to_target: float | None = None
    speedup: float | None = None

    @property
    def is_ddp(self) -> bool:
        """Whether gradients are averaged at every step."""
        return self.every is None

    @property
    def diverged(self) -> bool:
        """Whether it ends worse than it began."""
        return not self.loss <= self.initial_loss

    @property
    def lowest(self) -> float:
        """The lowest loss of all points."""
        return min((point.loss for point in self.points if math.isfinite(point.loss)), default=self.loss)

    @property
    def regressed(self) -> bool:
        """Whether it ends well above the lowest loss that it had: twice that, and a twentieth of what was gained."""
        lost = self.loss - self.lowest
        return not (lost <= self.lowest or lost <= 0.05 * (self.initial_loss - self.lowest))

    @property
    def steps_per_second(self) -> float:
        """Local steps of all workers in a virtual second."""
        return self.steps / self.seconds if self.seconds else 0.0

    def to_record(self) -> dict[str, Any]:
        """Return all of it for JSON; a number that is not finite is None."""
        record = asdict(self) | {"diverged": self.diverged, "steps_per_second": self.steps_per_second}
        record["points"] = [[each.seconds, each.steps, each.updates, each.loss] for each in self.points]
        return _finite(record)


def seconds_to_loss(points: Sequence[LossPoint], target: float) -> float | None:
    """Return when a curve first comes to a loss, straight between its points; None: it never does.

    Example:
        >>> seconds_to_loss([LossPoint(0.0, 0, 0, 4.0), LossPoint(10.0, 9, 1, 2.0)], 3.0)
        5.0
    """
    before: LossPoint | None = None
    for point in points:
        if point.loss <= target:
            if before is None or not math.isfinite(before.loss):
                return point.seconds
            share = (before.loss - target) / (before.loss - point.loss)
            return before.seconds + share * (point.seconds - before.seconds)
        before = point
    return None


def with_times_to_target(rows: Sequence[AsyncRow], target: float | None) -> list[AsyncRow]:
    """Return the rows with their times to a target, and how many times as soon as DDP they are there.

    Args:
        rows: of which one may be DDP's. target: None: none is known.
    """
    if target is None:
        return list(rows)
    times = [seconds_to_loss(row.points, target) for row in rows]
    ddp = next((time for row, time in zip(rows, times, strict=True) if row.is_ddp), None)
    return [
        replace(row, seconds_to_target=time, speedup=ddp / time if ddp and time else None)
        for row, time in zip(rows, times, strict=True)
    ]


def _finite(value: Any) -> Any:
    """Return the same without numbers that JSON has not."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
