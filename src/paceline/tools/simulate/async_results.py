"""Results of simulated training: loss curves, a row per schedule, and sentences about the rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline._core.format import format_percent, format_ratio, format_seconds

__all__ = ["AsyncRow", "LossPoint", "async_findings", "seconds_to_loss", "with_times_to_target"]


@dataclass(frozen=True)
class LossPoint:
    """Held-out loss at a virtual time, with the local steps of all workers and the updates until then."""

    seconds: float
    steps: int
    updates: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class AsyncRow:
    """A schedule and its result.

    Attributes:
        name: name of the schedule.
        every: local steps between updates; None for DDP.
        delay: local steps from sending to merging; None for DDP.
        loss: loss of the global model at the end.
        best: best loss of a worker's own parameters at the end.
        seconds: virtual time until the last worker's last step.
        steps: local steps of all workers.
        nbytes: bytes sent and received per worker, network headers included.
        points: loss over time.
        digest: hash of the global model's parameters at the end.
        initial_loss: loss before the first step.
        staleness_median: staleness of accepted updates in rounds; None without updates.
        staleness_max: maximum staleness; None without updates.
        updates: number of accepted updates.
        refused: refused updates by reason.
        merges: number of merges by quorum.
        late: updates that missed a merge and took part in the next.
        grace: seconds that a merge waited for more than the quorum, on average.
        counts: counters of all workers together.
        hub_busy: utilisation of the busier direction of the hub's link.
        communication: share of a step in exposed communication (DDP).
        waiting: share of time that workers wait for the slowest one (DDP), on average.
        replaced: workers that adopted another's parameters, with the reason.
        seconds_to_target: time to the target loss; None if it was not reached.
        speedup: DDP's time to the target divided by this one's, if known.
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
    merges: int = 0
    late: int = 0
    grace: float = 0.0
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
        """Whether the final loss is above the initial one."""
        return not self.loss <= self.initial_loss

    @property
    def lowest(self) -> float:
        """The lowest loss of all points."""
        return min((point.loss for point in self.points if math.isfinite(point.loss)), default=self.loss)

    @property
    def regressed(self) -> bool:
        """Whether the final loss is over twice the lowest one and lost over 5 % of the total improvement."""
        lost = self.loss - self.lowest
        return not (lost <= self.lowest or lost <= 0.05 * (self.initial_loss - self.lowest))

    @property
    def steps_per_second(self) -> float:
        """Local steps of all workers per virtual second."""
        return self.steps / self.seconds if self.seconds else 0.0

    def to_record(self) -> dict[str, Any]:
        """Return the row for JSON; non-finite numbers are None."""
        record = asdict(self) | {"diverged": self.diverged, "steps_per_second": self.steps_per_second}
        record["points"] = [[each.seconds, each.steps, each.updates, each.loss] for each in self.points]
        return _finite(record)


def seconds_to_loss(points: Sequence[LossPoint], target: float) -> float | None:
    """Return when a curve first reaches a loss, linearly interpolated; None if it never does.

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
    """Return the rows with their times to a target loss and their speedups over DDP.

    Args:
        rows: the rows, with or without DDP.
        target: the loss; None leaves the rows unchanged.
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
    """Replace non-finite numbers, which JSON lacks, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


# ---------------------------------------------------------------------- findings

_LINK_FULL, _LINK_IDLE = 0.8, 0.01
"""Utilisation from which the hub's link counts as full, and below which it counts as idle."""
_MUCH_WAITING, _MUCH_SKIPPED = 0.125, 0.25
_SAME_SPEED = 1.05


def async_findings(
    rows: Sequence[AsyncRow], target: float | None = None, outer: str = "averaging"
) -> list[str]:
    """Return sentences about the rows: the best schedule, bottlenecks, failures.

    Args:
        rows: the rows, with or without DDP.
        target: the target loss; None: DDP's final loss.
        outer: outer optimizer of the hub.
    """
    ddp = next((row for row in rows if row.is_ddp), None)
    schedules = [row for row in rows if not row.is_ddp]
    findings = [_advice(schedules, ddp, target)]
    if ddp is not None:
        findings.append(_waiting_of_ddp(ddp))
    findings += _hub_link(schedules)
    findings += [_merging(row) for row in schedules]
    findings += [line for row in schedules for line in _problems(row, outer)]
    return [line for line in findings if line]


def _advice(schedules: Sequence[AsyncRow], ddp: AsyncRow | None, target: float | None) -> str:
    aim = "DDP's final loss" if target is None else f"a loss of {target:g}"
    reached = [row for row in schedules if row.seconds_to_target is not None and not row.diverged]
    if not reached:
        converged = [row for row in schedules if not row.diverged]
        if not converged:
            return "All schedules diverged: lower --lr or --outer-lr, or use averaging."
        best = min(converged, key=lambda row: row.loss)
        if ddp is None and target is None:
            return f"Best at the end: {best.name}, loss {best.loss:.4g}."
        return (
            f"No schedule reaches {aim} in this time; the closest is {best.name} with {best.loss:.4g}. "
            "Simulate longer (--for), use a smaller k, or use DDP."
        )
    best = min(reached, key=lambda row: row.seconds_to_target or 0.0)
    when = f"reaches {aim} in {format_seconds(best.seconds_to_target or 0.0)}"
    if best.speedup is None:
        return f"Use {best.name}: it {when}. {_cheaper(best, reached)}".rstrip()
    if best.speedup < 1 / _SAME_SPEED:
        return f"Use DDP: {best.name} {when}, DDP is {format_ratio(1 / best.speedup)} faster."
    if best.speedup < _SAME_SPEED:
        return (
            f"No difference: {best.name} {when}, as fast as DDP, which is simpler and bitwise reproducible."
        )
    return (
        f"Use {best.name}: it {when}, {format_ratio(best.speedup)} faster than DDP. {_cheaper(best, reached)}"
    ).rstrip()


def _cheaper(best: AsyncRow, reached: Sequence[AsyncRow]) -> str:
    """Return a sentence on another schedule that is nearly as fast with far fewer bytes, if any."""
    near = [
        row
        for row in reached
        if row.nbytes < best.nbytes / 1.5
        and (row.seconds_to_target or 0) < 1.1 * (best.seconds_to_target or 0)
    ]
    if not near:
        return ""
    least = min(near, key=lambda row: row.nbytes)
    return f"{least.name} is nearly as fast with {format_percent(least.nbytes / best.nbytes)} of the bytes."


def _waiting_of_ddp(ddp: AsyncRow) -> str:
    shares = {"the network": ddp.communication, "the slowest machine": ddp.waiting}
    much = [f"{format_percent(share)} for {what}" for what, share in shares.items() if share >= _MUCH_WAITING]
    if not much:
        return "DDP waits little here: machines are similar, and the network is fast enough for it."
    return f"Of a worker's time, DDP waits {' and '.join(much)}."


def _hub_link(schedules: Sequence[AsyncRow]) -> list[str]:
    full = [row for row in schedules if row.hub_busy >= _LINK_FULL]
    if full:
        names = ", ".join(f"{row.name} ({format_percent(row.hub_busy)})" for row in full)
        return [
            f"The hub's link is full and limits the benefit of more workers: {names}. "
            "Use a larger k, stronger compression (--down int8), a faster --hub-link, or several hubs in shards; "
            "fragments smooth the peaks."
        ]
    busiest = max(schedules, key=lambda row: row.hub_busy, default=None)
    if busiest is None:
        return []
    if busiest.hub_busy < _LINK_IDLE:
        return ["The hub's link is nearly idle."]
    return [f"The hub's link is at most {format_percent(busiest.hub_busy)} utilised ({busiest.name})."]


def _merging(row: AsyncRow) -> str:
    """Return a sentence on merging by quorum; empty with merging on arrival."""
    if not row.merges:
        return ""
    return (
        f"{row.name}: {row.merges} merges of {row.updates / row.merges:.2g} updates on average, "
        f"{format_seconds(row.grace)} after the quorum; {row.late} updates were late."
    )


def _problems(row: AsyncRow, outer: str) -> list[str]:
    problems = []
    if row.diverged:
        problems.append(f"{row.name} diverged: {_why(outer)}")
    elif row.regressed:
        problems.append(f"{row.name} got worse again, from {row.lowest:.3g} to {row.loss:.3g}: {_why(outer)}")
    refused = {why: count for why, count in row.refused.items() if why not in ("repeated", "not in session")}
    if refused:
        reasons = ", ".join(f"{count} {why}" for why, count in refused.items())
        problems.append(f"{row.name}: the hub refused {reasons}.")
    problems += [f"{row.name}: replaced {each}." for each in row.replaced]
    skipped, sent = row.counts.get("skipped", 0), row.counts.get("sent", 0)
    if skipped > _MUCH_SKIPPED * sent and skipped > 1:
        problems.append(
            f"{row.name}: {skipped:.0f} updates were skipped because earlier ones were still pending: "
            + ("merges took longer than fast workers train for an update (--quorum), " if row.merges else "")
            + "the links are too slow for this k, messages were lost, or the hub was down."
        )
    faults = {
        name.removeprefix("spoilt: "): count
        for name, count in row.counts.items()
        if name.startswith("spoilt")
    }
    if faults:
        kinds = ", ".join(f"{count} {name}" for name, count in faults.items())
        problems.append(f"{row.name}: messages {kinds}; {row.counts.get('resent', 0):.0f} were resent.")
    return problems


def _why(outer: str) -> str:
    """Return why a schedule diverged with this outer optimizer, and a remedy."""
    if outer == "nesterov":
        return (
            "Nesterov at every arrival treats N similar updates as N successive steps and amplifies each. "
            "Use delayed-nesterov, or averaging."
        )
    return "steps are too large for so many local ones. Use a smaller --lr or --outer-lr, or a smaller k."
