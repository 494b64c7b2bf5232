"""Contributions of workers to an asynchronous run, and the traffic of torch DDP for the same steps.

[Note: traffic of DDP] Each of N ranks sends 2 (N − 1) / N × 4 bytes per parameter and step (ring all-reduce, float32).
For the same samples, the ranks take the local steps of the workers, so each local step of a worker counts that much,
with the N at the time its update was accepted. Every fragment reports the steps it was trained for, so with F fragments
each step is reported F times. Steps whose updates were not accepted are excluded, like their samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.tools.report.hub.hub_records import HubRun
from paceline.tools.report.hub.worker_statistics import WorkerStatistics

__all__ = [
    "ContributionRow",
    "contribution_rows",
    "ddp_nbytes",
    "dominant_row",
    "finite_ratio",
    "local_steps",
]


@dataclass(frozen=True)
class ContributionRow:
    """The contribution of a worker, or of several together.

    Attributes:
        name: its name.
        worker: its counts.
        share: its share of all samples, or of all updates if samples are unknown; 0 to 1.
        weight: its share of the weights of all updates.
    """

    name: str
    worker: WorkerStatistics
    share: float
    weight: float


def contribution_rows(run: HubRun, limit: int = 20) -> list[ContributionRow]:
    """Return a row per worker, largest contribution first; workers beyond `limit` share the last row."""
    names, ranked = run.workers.names(), run.workers.ranked()
    rest = WorkerStatistics(number=0, name="others", count=0)
    for each in [run.workers.others, *ranked[limit:]]:
        rest.add(each)
    rows = [_row(run, names[each.number], each) for each in ranked[:limit]]
    return [*rows, _row(run, f"{rest.count} others", rest)] if rest.count else rows


def _row(run: HubRun, name: str, worker: WorkerStatistics) -> ContributionRow:
    by_samples = 0 < run.samples < math.inf
    part, whole = (worker.samples, run.samples) if by_samples else (float(worker.updates), run.updates)
    return ContributionRow(name, worker, finite_ratio(part, whole), finite_ratio(worker.weight, run.weight))


def finite_ratio(part: float, whole: float) -> float:
    """Return part / whole, or 0 if that is not finite."""
    ratio = part / whole if whole else 0.0
    return ratio if math.isfinite(ratio) else 0.0


def local_steps(run: HubRun) -> float:
    """Return the number of local steps behind all accepted updates."""
    steps = sum(each.steps for each in [*run.workers, run.workers.others])
    return steps / max(1, len(run.fragments))


def ddp_nbytes(run: HubRun) -> float | None:
    """Return the bytes torch DDP sends for the same steps ([Note: traffic of DDP]); None if unknown."""
    if run.parameters is None or not run.ddp_steps:
        return None
    nbytes = 4 * run.parameters * run.ddp_steps / max(1, len(run.fragments))
    return nbytes if math.isfinite(nbytes) else None


def dominant_row(rows: Sequence[ContributionRow]) -> ContributionRow | None:
    """Return the worker with more than half of all contributions and more than twice its fair share, if any."""
    single = [row for row in rows if row.worker.count == 1]
    if len(rows) < 2 or not single:
        return None
    first = max(single, key=lambda row: row.share)
    workers = sum(row.worker.count for row in rows)
    return first if first.share > 0.5 and first.share * workers > 2 else None
