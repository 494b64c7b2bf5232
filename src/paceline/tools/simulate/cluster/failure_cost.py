"""Cost of failures and checkpoints by simulation, job by job, and the best checkpoint interval found by it.

Jobs, failures and the formulas that these simulations are compared with: `paceline.checkpoint.save_interval`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoint.save_interval import (
    FailureModel,
    daly_interval,
    expected_slowdown,
    expected_undone,
)

__all__ = [
    "FAILURE_PARTS",
    "STUCK",
    "JobTimes",
    "best_interval",
    "restart_cost",
    "simulate_jobs",
]

Numbers = NDArray[np.float64]

FAILURE_PARTS: tuple[str, ...] = (
    "noticing",
    "new world",
    "state",
    "repeated step",
    "slower steps",
    "restart",
    "lost work",
)
"""What a failure costs: noticing it, forming a world without the lost ranks and one with their replacements, moving
state, repeating the interrupted step, training with fewer ranks; or restarting and repeating work (`restart_cost`)."""

STUCK = 1e4
"""Slowdown from which a job is assumed never to end."""
_REACH, _GRID = 4.0, 17
"""Intervals tried: `_GRID` from Daly's / `_REACH` to Daly's × `_REACH`."""
_MANY = 100
"""Expected failures of a job in comparisons of intervals."""
_NEAR, _ENOUGH = 1.02, 5
"""Ratio to the minimum of the times in the parabola fit, and the minimum number of them."""


def restart_cost(risk: FailureModel, interval: float) -> dict[str, float]:
    """Return the mean seconds that a failure during training costs, by `FAILURE_PARTS`.

    Args:
        risk: failures and their cost.
        interval: τ in seconds.
    """
    lost = expected_undone(risk.mtbf, interval + risk.write)
    return dict.fromkeys(FAILURE_PARTS, 0.0) | {"restart": risk.restart, "lost work": lost}


@dataclass(frozen=True, kw_only=True)
class JobTimes:
    """Seconds of simulated jobs, one element per job.

    Attributes:
        work: useful computing.
        writing: completed checkpoints.
        lost: computing and writing undone by failures.
        restarting: restarts.
        failures: number of failures.
        stuck: whether the jobs never end; the other fields are then meaningless.
    """

    work: Numbers
    writing: Numbers
    lost: Numbers
    restarting: Numbers
    failures: NDArray[np.int64]
    stuck: bool = False

    @property
    def seconds(self) -> Numbers:
        """Total seconds."""
        return self.work + self.writing + self.lost + self.restarting


def simulate_jobs(risk: FailureModel, interval: float, work: Numbers, seed: Sequence[int]) -> JobTimes:
    """Simulate jobs with random failures.

    Args:
        risk: failures and their cost.
        interval: τ in seconds; infinite: no checkpoints.
        work: seconds of computing of each job.
        seed: seed of the failures.
    """
    jobs = len(work)
    zero, none = np.zeros(jobs), np.zeros(jobs, np.int64)
    if interval == math.inf:
        interval = float(work.max())  # a single segment without a checkpoint
    segments = np.maximum(0, np.ceil(work / interval - 1e-9).astype(np.int64) - 1)
    writing = segments * risk.write
    if risk.mtbf == math.inf:
        return JobTimes(work=work, writing=writing, lost=zero, restarting=zero, failures=none)
    if expected_slowdown(risk, interval) > STUCK:
        return JobTimes(work=work, writing=zero, lost=zero, restarting=zero, failures=none, stuck=True)
    rng = np.random.default_rng(list(seed))
    period = interval + risk.write
    done, failures = none.copy(), none.copy()
    lost, restarting = zero.copy(), zero.copy()
    running = np.arange(jobs)
    while len(running):
        drawn = rng.exponential(risk.mtbf, jobs)  # for all jobs, so that the end of one changes no other
        until = drawn[running]
        left = segments[running] - done[running]
        needed = work[running] - done[running] * interval + left * risk.write
        failed = until < needed
        running, until, left = running[failed], until[failed], left[failed]
        complete = np.minimum((until // period).astype(np.int64), left)
        done[running] += complete
        lost[running] += until - complete * period
        failures[running] += 1
        seconds, more = _restart(risk, len(running), rng)
        restarting[running] += seconds
        failures[running] += more
    return JobTimes(work=work, writing=writing, lost=lost, restarting=restarting, failures=failures)


def _restart(risk: FailureModel, count: int, rng: np.random.Generator) -> tuple[Numbers, NDArray[np.int64]]:
    """Return the seconds of so many restarts and the number of failures during each."""
    seconds, failures = np.zeros(count), np.zeros(count, np.int64)
    if not risk.restart:
        return seconds, failures
    trying = np.arange(count)
    while len(trying):
        until = rng.exponential(risk.mtbf, len(trying))
        failed = until < risk.restart
        seconds[trying] += np.minimum(until, risk.restart)
        failures[trying[failed]] += 1
        trying = trying[failed]
    return seconds, failures


def best_interval(risk: FailureModel, jobs: int, seed: Sequence[int]) -> float:
    """Return the interval that minimises the time of simulated jobs, in seconds; infinite without failures.

    Jobs with many failures are simulated with intervals around Daly's and the same random numbers; a parabola through
    the best ones locates the minimum.

    Args:
        risk: failures and their cost.
        jobs: jobs simulated per interval.
        seed: seed of the failures.
    """
    if risk.mtbf == math.inf or not risk.write:
        return daly_interval(risk)
    work = np.full(jobs, _MANY * risk.mtbf)
    at = np.array([daly_interval(risk) * _REACH ** (2 * step / (_GRID - 1) - 1) for step in range(_GRID)])
    courses = [simulate_jobs(risk, float(interval), work, seed) for interval in at]
    took = np.array([math.inf if found.stuck else float(found.seconds.mean()) for found in courses])
    least = took.min()
    if least == math.inf:
        return daly_interval(risk)
    near = took <= _NEAR * least
    if near.sum() < _ENOUGH:
        near = np.isin(np.arange(_GRID), np.argsort(took)[:_ENOUGH])
    bend, slope, _ = np.polyfit(np.log(at[near]), took[near], 2)
    return float(np.exp(-slope / (2 * bend))) if bend > 0 else float(at[took.argmin()])
