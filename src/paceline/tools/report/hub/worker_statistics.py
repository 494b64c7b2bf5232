"""Statistics per worker from a hub's decision ledger: contributions, staleness, presence.

Any number of worker numbers can occur; beyond a limit, the workers with the smallest contributions are merged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.tools.report.hub.downsample import QuantileSketch

__all__ = ["WorkerStatistics", "WorkerTable", "printable"]

_MAX_NAME_LENGTH = 40


@dataclass(kw_only=True)
class WorkerStatistics:
    """Statistics of a worker, or of several merged ones.

    Attributes:
        number: number of the worker.
        name: its display name.
        count: number of workers that this stands for.
        updates: accepted updates.
        samples: samples behind the accepted updates.
        steps: local steps behind the accepted updates.
        weight: sum of the weights of the accepted updates.
        refused: refused updates by reason.
        staleness: staleness of its updates, in rounds.
        replacements: how often it was replaced by another worker.
        speeds: sum and number of its reported speeds, in steps per second.
        present_seconds: time present until `since`.
        since: when it was last marked present; None: absent.
        last_seen: time of the last record about it.
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
        """Mean reported speed in steps per second."""
        total, count = self.speeds
        return total / count if count else None

    def mark_present(self, t: float) -> None:
        """Mark it present from `t` on; if it was present already, it has been absent since it was last seen."""
        self.mark_gone(self.last_seen)
        self.since = self.last_seen = t

    def mark_gone(self, t: float) -> None:
        """Mark it absent since `t`."""
        if self.since is not None:
            self.present_seconds += max(0.0, t - self.since)
            self.since = None

    def add(self, other: WorkerStatistics) -> None:
        """Merge another worker's counts into this one."""
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
    """Statistics of all workers.

    Args:
        limit: number of workers to keep separately; those with the smallest contributions beyond it are merged.

    Attributes:
        others: the merged workers.
    """

    def __init__(self, limit: int = 5000) -> None:
        self._limit = limit
        self._workers: dict[int, WorkerStatistics] = {}
        self.others = WorkerStatistics(number=0, name="others", count=0)

    def __iter__(self) -> Iterator[WorkerStatistics]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers) + self.others.count

    def mark_seen(self, number: int, t: float) -> WorkerStatistics:
        """Return a worker, marked as present and seen at `t`."""
        worker = self.get_or_add(number, t)
        if worker.since is None:
            worker.since = t
        worker.last_seen = t
        return worker

    def get_or_add(self, number: int, t: float) -> WorkerStatistics:
        """Return a worker; a new one was last seen at `t`."""
        worker = self._workers.get(number)
        if worker is None:
            if len(self._workers) >= self._limit:
                self._merge_smallest()
            worker = self._workers[number] = WorkerStatistics(number=number, last_seen=t)
        return worker

    def get(self, number: int) -> WorkerStatistics | None:
        """Return a worker, None if it is unknown or merged."""
        return self._workers.get(number)

    def mark_hub_down(self, since: float) -> None:
        """Register a downtime of the hub: workers that have not returned left when they were last seen."""
        for worker in self:
            if worker.since is not None and worker.since <= since:
                worker.mark_gone(worker.last_seen)

    def finish(self, t: float) -> None:
        """Register the end of the ledger."""
        for worker in self:
            worker.mark_gone(t)

    def ranked(self) -> list[WorkerStatistics]:
        """Return the workers, largest contribution first."""
        return sorted(self, key=_contribution, reverse=True)

    def names(self) -> dict[int, str]:
        """Return a unique name per worker number."""
        names = {each.number: each.name or str(each.number) for each in self}
        uses = Counter(names.values())
        return {
            number: f"{name} #{number}" if uses[name] > 1 and name != str(number) else name
            for number, name in names.items()
        }

    def _merge_smallest(self) -> None:
        for worker in self.ranked()[self._limit // 2 :]:
            worker.mark_gone(worker.last_seen)
            self.others.add(self._workers.pop(worker.number))


def printable(text: object, length: int = _MAX_NAME_LENGTH) -> str:
    """Return a worker's name or another text of the ledger without control characters, shortened to `length`.

    Example:
        >>> printable("gpu\\u202e-1\\x00")
        'gpu-1'
    """
    shown = "".join(each for each in str(text)[: 10 * length] if each.isprintable()).strip()
    return shown if len(shown) <= length else f"{shown[: length - 1]}…"


def _contribution(worker: WorkerStatistics) -> tuple[float, int, int, str]:
    return worker.samples, worker.updates, sum(worker.refused.values()), worker.name
