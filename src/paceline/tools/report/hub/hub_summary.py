"""The numbers of an asynchronous run: who gave how much of it, and what torch DDP would have sent. Pure functions.

[Note: what DDP sends] Each of N ranks sends 2 (N − 1) / N × 4 bytes for every parameter and step (a ring, float32). For
the same samples the ranks make the local steps that the workers made, so each local step of a worker counts that much,
with N as it was when the step was taken in. Every fragment tells of the steps that it was learnt in, so where a model
has F fragments each step is told F times. What was learnt but not taken in is left out, as its samples are.
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
    """What a worker, or several together, gave.

    Attributes:
        name: of it. worker: its counts. share: of all samples, or where none are told of all updates, 0 to 1.
        weight: its share of all weights that updates were given.
    """

    name: str
    statistics: WorkerStatistics
    share: float
    weight: float


def contribution_rows(run: HubRun, most: int = 20) -> list[ContributionRow]:
    """Return the workers that gave most, first the largest; what is over `most` is one row at the end."""
    names, ranked = run.workers.names(), run.workers.ranked()
    rest = WorkerStatistics(0, "others", count=0)
    for each in [run.workers.others, *ranked[most:]]:
        rest.add(each)
    rows = [_row(run, names[each.number], each) for each in ranked[:most]]
    return [*rows, _row(run, f"{rest.count} others", rest)] if rest.count else rows


def _row(run: HubRun, name: str, worker: WorkerStatistics) -> ContributionRow:
    by_samples = 0 < run.samples < math.inf
    share = (
        finite_ratio(worker.samples, run.samples)
        if by_samples
        else finite_ratio(float(worker.updates), run.updates)
    )
    return ContributionRow(name, worker, share, finite_ratio(worker.weight, run.weight))


def finite_ratio(part: float, whole: float) -> float:
    """Return part / whole, 0 where that is no number."""
    share = part / whole if whole else 0.0
    return share if math.isfinite(share) else 0.0


def local_steps(run: HubRun) -> float:
    """Return how many steps of workers the centre was learnt from."""
    told = sum(each.steps for each in [*run.workers, run.workers.others])
    return told / max(1, len(run.fragments))


def ddp_nbytes(run: HubRun) -> float | None:
    """Return what torch DDP would have sent for the same steps, see [Note: what DDP sends]; None: it can't be told."""
    if run.parameters is None or not run.ddp_steps:
        return None
    nbytes = 4 * run.parameters * run.ddp_steps / max(1, len(run.fragments))
    return nbytes if math.isfinite(nbytes) else None


def dominant_row(rows: Sequence[ContributionRow]) -> ContributionRow | None:
    """Return the worker that gave more than half of all, and more than twice its part; None: there is none."""
    alone = [row for row in rows if row.statistics.count == 1]
    if len(rows) < 2 or not alone:
        return None
    first = max(alone, key=lambda row: row.share)
    workers = sum(row.statistics.count for row in rows)
    return first if first.share > 0.5 and first.share * workers > 2 else None
