"""Simulation of jobs with live recovery, failure by failure; see `live_recovery`.

All failures of a job are drawn at once, and its time is cut where training pauses, goes on, or the number of ranks
changes. A failure during a pause extends the pause. A failure during training undoes the part of the step since the
last one was complete.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.tools.simulate.cluster.failure_cost import STUCK
from paceline.tools.simulate.cluster.live_recovery import LiveFailures, expected_live_slowdown

__all__ = ["LiveTimes", "simulate_live_jobs"]

Numbers = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LiveTimes:
    """Seconds of simulated jobs, one element per job, apart from losses of state.

    Attributes:
        work: time without failures.
        paused: pauses for failures and for joining replacements.
        repeated: interrupted steps.
        slower: time lost because ranks were missing.
        failures: number of failures.
    """

    work: Numbers
    paused: Numbers
    repeated: Numbers
    slower: Numbers
    failures: NDArray[np.int64]

    @property
    def seconds(self) -> Numbers:
        """Total seconds."""
        return self.work + self.paused + self.repeated + self.slower


def simulate_live_jobs(
    failures: LiveFailures, computing: Numbers, step: Numbers, work: Numbers, seed: Sequence[int]
) -> LiveTimes | None:
    """Simulate jobs with random failures that don't lose state; return None if the jobs never end.

    Args:
        failures: the failures.
        computing: share of computing in the time of a step, of each job.
        step: seconds of a step, of each job.
        work: seconds of each job without failures.
        seed: seed of the failures.
    """
    rows: list[tuple[float, float, float, int]] = []
    for job, (share, each, needed) in enumerate(zip(computing, step, work, strict=True)):
        slowdown = expected_live_slowdown(failures, float(share), float(each))
        if slowdown > STUCK:
            return None
        found = None if failures.live_rate else (0.0, 0.0, 0.0, 0)
        count = 16 + math.ceil(1.1 * needed * slowdown * failures.live_rate)
        while found is None:
            found = _job(_Drawn(failures, count, [*seed, job]), float(share), float(each), float(needed))
            count *= 2
        rows.append(found)
    paused, repeated, slower, number = (np.array(column) for column in zip(*rows, strict=True))
    return LiveTimes(
        work=work, paused=paused, repeated=repeated, slower=slower, failures=number.astype(np.int64)
    )


class _Drawn:
    """The first failures of a job, the same however many are drawn.

    Attributes:
        at: time of every failure.
        kind: its index in `LiveFailures.kinds`.
    """

    def __init__(self, failures: LiveFailures, count: int, seed: Sequence[int]) -> None:
        self.failures = failures
        rates = np.array([kind.live_rate for kind in failures.kinds])
        gaps = np.random.default_rng([*seed, 0]).exponential(1.0, count)
        which = np.random.default_rng([*seed, 1]).random(count)
        self.at = np.cumsum(gaps) / rates.sum()
        self.kind = np.searchsorted(np.cumsum(rates)[:-1], which * rates.sum(), side="right")

    def of_kind(self, name: str) -> Numbers:
        """Return an attribute of the kind of every failure."""
        return np.array([getattr(kind, name) for kind in self.failures.kinds], float)[self.kind]

    def changes(self) -> tuple[Numbers, NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Return the times of changes, from 0 on: causes to pause and missing ranks from then on, failure or not."""
        pause, missing, ranks = (self.of_kind(name) for name in ("pause", "missing", "ranks"))
        later = missing > 0
        joins, lost = (self.at + missing)[later], ranks[later].astype(np.int64)
        on, off = np.ones(len(self.at), np.int64), np.ones(len(joins), np.int64)
        at = np.concatenate([[0.0], self.at, self.at + pause, joins, joins + self.of_kind("join")[later]])
        paused = np.concatenate([[0], on, -on, off, -off])
        absent = np.concatenate([[0], np.where(later, ranks, 0).astype(np.int64), 0 * on, -lost, 0 * off])
        fails = np.zeros(len(at), np.bool_)
        fails[1 : 1 + len(on)] = True
        order = np.argsort(at, kind="stable")
        return at[order], np.cumsum(paused[order]), np.cumsum(absent[order]), fails[order]


def _job(drawn: _Drawn, computing: float, step: float, work: float) -> tuple[float, float, float, int] | None:
    """Return a job's seconds of pauses, repeated steps and missing ranks, and its failures; None: too few are drawn."""
    at, paused, missing, fails = drawn.changes()
    speed = np.where(paused == 0, drawn.failures.speed(missing, computing), 0.0)
    lasts = np.append(np.diff(at), 0.0)
    trains = np.where(paused == 0, lasts, 0.0)
    # A failure undoes what has been computed since the last complete step.
    before = np.concatenate([[0], paused[:-1]])
    interrupts = np.flatnonzero(fails & (before == 0))
    since = np.diff((np.cumsum(trains) - trains)[interrupts], prepend=0.0)
    undone, lost = np.zeros_like(at), np.zeros_like(at)
    undone[interrupts] = since % step
    lost[interrupts] = undone[interrupts] * speed[interrupts - 1]
    gained = lasts * speed
    done = np.cumsum(gained) - gained - np.cumsum(lost)
    enough = (speed > 0) & (done + gained >= work)
    last = int(enough.argmax())
    if not enough[last] or at[last] >= drawn.at[-1]:
        return None
    seconds = float(at[last] + (work - done[last]) / speed[last])
    pauses = float((lasts - trains)[:last].sum())
    repeated = float(undone[: last + 1].sum())
    return pauses, repeated, max(0.0, seconds - work - pauses - repeated), int(fails[: last + 1].sum())
