"""Cost of failures and checkpoints, and the best checkpoint interval by formula and by simulation.

A job computes for τ seconds, writes a checkpoint for δ seconds, and repeats. Failures are a Poisson process with a mean
interval of M seconds (a node's MTBF divided by the number of nodes); each costs R seconds of restart and the work since
the last checkpoint. Restarts and writes can fail too.

    Young   τ = √(2·δ·M)                                             (CACM 17(9), 1974)
    Daly    τ = √(2·δ·M)·[1 + ⅓·√(δ/2M) + ⅑·δ/2M] − δ,  M if δ ≥ 2M  (FGCS 22(3), 2006, eq. 37)
    time    M·e^(R/M)·(e^((τ+δ)/M) − 1) for each τ of work           (the same, eq. 13: exact for such failures)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError

__all__ = [
    "FAILURE_PARTS",
    "STUCK",
    "FailureModel",
    "JobTimes",
    "best_interval",
    "daly_interval",
    "expected_slowdown",
    "expected_undone",
    "restart_cost",
    "simulate_jobs",
    "young_interval",
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


@dataclass(frozen=True)
class FailureModel:
    """Frequency of failures and cost of checkpoints and restarts.

    Attributes:
        mtbf: M, mean seconds between failures of the whole job; infinite without failures.
        write: δ, seconds that training waits for a checkpoint.
        restart: R, seconds from a failure until training resumes.

    Raises:
        UsageError: a number is out of range.
    """

    mtbf: float
    write: float
    restart: float = 0.0

    def __post_init__(self) -> None:
        if not self.mtbf > 0:
            raise UsageError(f"mtbf={self.mtbf!r} seconds", remedy="give a time above 0")
        for name in ("write", "restart"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name}={getattr(self, name)!r} seconds", remedy="give a time of 0 or more")


def young_interval(risk: FailureModel) -> float:
    """Return Young's interval in seconds; infinite without failures.

    Example:
        >>> young_interval(FailureModel(mtbf=7200.0, write=16.0))
        480.0
    """
    return math.sqrt(2 * risk.write * risk.mtbf)


def daly_interval(risk: FailureModel) -> float:
    """Return Daly's higher-order interval in seconds; infinite without failures.

    Example:
        >>> round(daly_interval(FailureModel(mtbf=7200.0, write=16.0)), 1)
        469.4
    """
    if risk.mtbf == math.inf:
        return math.inf
    if risk.write >= 2 * risk.mtbf:
        return risk.mtbf
    part = risk.write / (2 * risk.mtbf)
    return young_interval(risk) * (1 + math.sqrt(part) / 3 + part / 9) - risk.write


def expected_slowdown(risk: FailureModel, interval: float) -> float:
    """Return the expected time of a job divided by its computing time; infinite if it never ends.

    Args:
        risk: failures and their cost.
        interval: τ in seconds; infinite (no checkpoints) only without failures.
    """
    if risk.mtbf == math.inf:
        return 1.0 if interval == math.inf else 1.0 + risk.write / interval
    exponent = (interval + risk.write) / risk.mtbf
    if exponent + risk.restart / risk.mtbf > 500:
        return math.inf
    return risk.mtbf * math.exp(risk.restart / risk.mtbf) * math.expm1(exponent) / interval


def expected_undone(mtbf: float, period: float) -> float:
    """Return the mean seconds since the last period was complete when a failure happens.

    Args:
        mtbf: mean seconds between failures.
        period: seconds of a period: a step, or training between checkpoints with its checkpoint.

    Example:
        >>> expected_undone(1e9, 60.0), round(expected_undone(60.0, 60.0), 2)
        (30.0, 25.08)
    """
    failures = period / mtbf
    if failures < 1e-6:
        return period / 2
    return mtbf - period / math.expm1(min(failures, 500.0))


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
