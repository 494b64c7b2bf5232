"""The workers of a hub as its ledger tells of them: what each gave, how old that was, how long it was there (pure).

Numbers are drawn by workers, so there can be any number of them: those beyond the most that gave least are one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.tools.report.hub.downsample import QuantileSketch

__all__ = ["WorkerStatistics", "WorkerTable", "printable"]

_NAME_LENGTH = 40


@dataclass
class WorkerStatistics:
    """A worker, or several together.

    Attributes:
        number: of it. name: for people. count: how many workers this is.
        updates, samples, steps, weight: of what was taken in: how many, learnt from how many samples in how many
            steps, and the sum of the weights that they were given.
        refused: how often, by reason. staleness: of its updates, in rounds. replaced: how often by another.
        speeds: sum and number of the speeds that it told, in steps per second.
        alive: seconds in which it was there, up to `since`. since: it is there; None: it is not.
        heard: when the ledger names it last.
    """

    number: int
    name: str = ""
    count: int = 1
    updates: int = 0
    samples: float = 0.0
    steps: float = 0.0
    weight: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)
    staleness: QuantileSketch = field(default_factory=QuantileSketch)
    replacements: int = 0
    speeds: tuple[float, int] = (0.0, 0)
    present_seconds: float = 0.0
    since: float | None = None
    last_seen: float = 0.0

    @property
    def speed(self) -> float | None:
        """Mean of the speeds that it told, in steps per second."""
        total, count = self.speeds
        return total / count if count else None

    def mark_present(self, t: float) -> None:
        """Note that it is there from now on; one that was there already has been away since it was heard."""
        self.mark_gone(self.last_seen)
        self.since = self.last_seen = t

    def mark_gone(self, t: float) -> None:
        """Note that it is not there any more since `t`."""
        if self.since is not None:
            self.present_seconds += max(0.0, t - self.since)
            self.since = None

    def add(self, other: WorkerStatistics) -> None:
        """Count another one with this one."""
        self.count += other.count
        self.updates += other.updates
        self.samples += other.samples
        self.steps += other.steps
        self.weight += other.weight
        self.refused.update(other.refused)
        self.staleness.merge(other.staleness)
        self.replacements += other.replacements
        self.speeds = self.speeds[0] + other.speeds[0], self.speeds[1] + other.speeds[1]
        self.present_seconds += other.present_seconds


class WorkerTable:
    """All workers.

    Args:
        most: that are known one by one; of more, those that gave least are counted together.

    Attributes:
        others: those that are counted together.
    """

    def __init__(self, limit: int = 5000) -> None:
        self._most = limit
        self._workers: dict[int, WorkerStatistics] = {}
        self.others = WorkerStatistics(0, "others", count=0)

    def __iter__(self) -> Iterator[WorkerStatistics]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers) + self.others.count

    def mark_seen(self, number: int, t: float) -> WorkerStatistics:
        """Return a worker of which the ledger tells at `t`, and which is there."""
        worker = self.get_or_add(number, t)
        if worker.since is None:
            worker.since = t
        worker.last_seen = t
        return worker

    def get_or_add(self, number: int, t: float) -> WorkerStatistics:
        """Return a worker, known from now on."""
        worker = self._workers.get(number)
        if worker is None:
            if len(self._workers) >= self._most:
                self._fold()
            worker = self._workers[number] = WorkerStatistics(number, heard=t)
        return worker

    def get(self, number: int) -> WorkerStatistics | None:
        """Return a worker, None if it is not known."""
        return self._workers.get(number)

    def downtimes(self, since: float) -> None:
        """Note that the hub was away: who has not come again by now went when it was heard last."""
        for worker in self:
            if worker.since is not None and worker.since <= since:
                worker.mark_gone(worker.last_seen)

    def end(self, t: float) -> None:
        """Note that the ledger ends."""
        for worker in self:
            worker.mark_gone(t)

    def ranked(self) -> list[WorkerStatistics]:
        """Return the workers, those that gave most first."""
        return sorted(self, key=_given, reverse=True)

    def names(self) -> dict[int, str]:
        """Return a name for each worker that no other one has."""
        told = {each.number: each.name or str(each.number) for each in self}
        often = Counter(told.values())
        return {
            number: f"{name} #{number}" if often[name] > 1 and name != str(number) else name
            for number, name in told.items()
        }

    def _fold(self) -> None:
        """Count half of all workers together: those that gave least."""
        for worker in self.ranked()[self._most // 2 :]:
            worker.mark_gone(worker.last_seen)
            self.others.add(self._workers.pop(worker.number))


def printable(text: object, length: int = _NAME_LENGTH) -> str:
    """Return what a worker calls itself, or another text of the ledger, as one that can be shown.

    Example:
        >>> plain("gpu\\u202e-1\\x00")
        'gpu-1'
    """
    shown = "".join(each for each in str(text)[: 10 * length] if each.isprintable()).strip()
    return shown if len(shown) <= length else f"{shown[: length - 1]}…"


def _given(worker: WorkerStatistics) -> tuple[float, int, int, str]:
    return worker.samples, worker.updates, sum(worker.refused.values()), worker.name
