"""Simulation of a training on any number of nodes: step time, efficiency and its losses, failures, cost.

Several jobs are simulated, each with its own machines, steps and failures. Their time is broken down into shares of the
total, which add up to 1:

    useful           time of the work if it were distributed by speed and no rank waited
    uneven machines  waiting for the slowest machine
    varying steps    waiting for the rank whose step happens to be longest
    communication    exposed communication
    checkpoints, lost work, restarts
    recoveries       pauses of live recovery: until survivors go on, and while replacements join
    missing ranks    slower steps, or smaller batches, until replacements have joined
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoint.save_interval import FailureModel, daly_interval, young_interval
from paceline.errors import UsageError
from paceline.tools.simulate.cluster.cluster_network import AllReduceTime
from paceline.tools.simulate.cluster.cluster_plan import MOST_NODES, ClusterPlan
from paceline.tools.simulate.cluster.compute_times import StepSamples, sample_steps
from paceline.tools.simulate.cluster.exposed_communication import (
    MessageGroup,
    exposed_seconds,
    fastest_all_reduce,
    step_messages,
)
from paceline.tools.simulate.cluster.failure_cost import (
    JobTimes,
    best_interval,
    restart_cost,
    simulate_jobs,
)
from paceline.tools.simulate.cluster.live_jobs import LiveTimes, simulate_live_jobs
from paceline.tools.simulate.cluster.live_recovery import live_cost, live_failures, state_risk

__all__ = [
    "DAY",
    "LOSSES",
    "CheckpointIntervals",
    "ClusterRow",
    "Percentiles",
    "simulate_cluster",
    "sweep_nodes",
]

DAY = 86400.0
LOSSES: tuple[str, ...] = (
    "uneven machines",
    "varying steps",
    "communication",
    "checkpoints",
    "lost work",
    "restarts",
    "recoveries",
    "missing ranks",
)

_MIN_JOBS = 32
"""Jobs per checkpoint interval in comparisons, at least."""
_P90 = 1.6449
"""90 % of a normal distribution is within this many standard deviations of the mean."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Percentiles:
    """Mean and percentiles over jobs or steps."""

    mean: float
    p5: float
    p50: float
    p95: float

    @classmethod
    def of(cls, values: Numbers) -> Percentiles:
        """Return the mean and percentiles of values."""
        low, middle, high = np.percentile(values, [5, 50, 95])
        return cls(float(values.mean()), float(low), float(middle), float(high))


@dataclass(frozen=True)
class CheckpointIntervals:
    """Seconds of training between two checkpoints; all but `used` are None if none is ever needed.

    Attributes:
        used: the interval of the simulation.
        young: Young's formula.
        daly: Daly's formula.
        simulated: the best interval of simulated jobs.
    """

    used: float
    young: float | None = None
    daly: float | None = None
    simulated: float | None = None


@dataclass(frozen=True, kw_only=True)
class ClusterRow:
    """Result for one number of nodes.

    Attributes:
        nodes: number of nodes.
        ranks: number of ranks.
        recovery: recovery from failures, ``"restart"`` or ``"live"``; None without failures.
        algorithm: algorithm of the all-reduce.
        compute_seconds: computing time of a step on one of the fastest ranks.
        comm_seconds: time of all messages of a step, hidden or not.
        step: seconds of a step, over steps and jobs.
        efficiency: useful share of all time, over jobs.
        ledger: mean share of all time of ``"useful"`` and each of `LOSSES`; they add up to 1.
        speedup: throughput relative to one of the fastest ranks alone.
        mtbf_seconds: mean time between failures of the job; None without failures.
        rollback_seconds: mean time between failures that undo work since the last checkpoint; None without them.
        failures: mean number of failures of a job.
        failure_cost: mean seconds that a failure during training costs, by `failure_cost.FAILURE_PARTS`.
        intervals: checkpoint intervals; None without checkpoints.
        job_seconds: time of the job, over jobs.
        cost: cost of the job, over jobs; None without a price.
        stuck: whether failures are so frequent that the job never ends; efficiency is then 0.
    """

    nodes: int
    ranks: int
    recovery: str | None
    algorithm: str
    compute_seconds: float
    comm_seconds: float
    step: Percentiles
    efficiency: Percentiles
    ledger: dict[str, float]
    speedup: float
    mtbf_seconds: float | None
    rollback_seconds: float | None
    failures: float
    failure_cost: dict[str, float]
    intervals: CheckpointIntervals | None
    job_seconds: Percentiles | None
    cost: Percentiles | None
    stuck: bool

    def to_record(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return asdict(self)

    @property
    def worst(self) -> str:
        """The largest loss."""
        return max(LOSSES, key=lambda name: self.ledger[name])


def sweep_nodes(
    plan: ClusterPlan, nodes: Sequence[int], recoveries: Sequence[str] = ()
) -> Iterator[ClusterRow]:
    """Yield a row per number of nodes and way of recovery; see `simulate_cluster`.

    Args:
        plan: the training.
        nodes: numbers of nodes.
        recoveries: ways of recovery from failures; none: that of the plan.
    """
    for count in nodes:
        steps = _steps(plan, count)
        for recovery in recoveries or (plan.recovery,):
            yield _row(replace(plan, recovery=recovery), count, steps)


def simulate_cluster(plan: ClusterPlan, nodes: int) -> ClusterRow:
    """Simulate a training on a number of nodes.

    Args:
        plan: the training.
        nodes: number of nodes.

    Raises:
        UsageError: the number of nodes is out of range, or the network does not support the algorithm.

    Example:
        >>> from paceline.tools.simulate.cluster.cluster_network import ClusterNetwork
        >>> plan = ClusterPlan(network=ClusterNetwork(link=25e6), step_seconds=1.0, nbytes=80e6, strategy="flat")
        >>> row = simulate_cluster(plan, 4)
        >>> row.algorithm, round(row.step.mean, 3), round(row.ledger["communication"], 3)
        ('halving-doubling', 5.8, 0.828)
    """
    return _row(plan, nodes, _steps(plan, nodes))


@dataclass(frozen=True)
class _Steps:
    """Steps of a number of nodes, in seconds: `[job]` or `[job, step]`."""

    price: AllReduceTime
    compute: float
    comm: float
    samples: StepSamples
    exposed: Numbers

    @property
    def computing(self) -> Numbers:
        """Time until the last rank has computed."""
        return self.compute * self.samples.longest

    @property
    def whole(self) -> Numbers:
        """Time of a step."""
        return self.computing + self.exposed


def _steps(plan: ClusterPlan, nodes: int) -> _Steps:
    if type(nodes) is not int or not 1 <= nodes <= MOST_NODES:
        raise UsageError(f"{nodes!r} nodes", remedy=f"give a whole number from 1 to {MOST_NODES}")
    ranks = nodes * plan.network.per_node
    compute = plan.step_seconds / (ranks if plan.scaling == "strong" else 1)
    traffic, price = _traffic(plan, nodes)
    samples = sample_steps(
        plan.machines, nodes, plan.network.per_node, plan.every, plan.jobs, plan.draws, [plan.seed, nodes, 1]
    )
    exposed = _exposed(plan, nodes, traffic, price, compute * samples.longest)
    return _Steps(price, compute, sum(each.seconds for each in traffic), samples, exposed)


def _traffic(plan: ClusterPlan, nodes: int) -> tuple[list[MessageGroup], AllReduceTime]:
    """Return the messages per step, averaged over H steps, and the time of one call."""

    def price(nbytes: float, halved: bool) -> AllReduceTime:
        return fastest_all_reduce(plan.network, nodes, nbytes, plan.algorithm, halved=halved)

    if plan.every == 1:
        return step_messages(plan.strategy, plan.nbytes, plan.bucket_nbytes, plan.backward, price)
    (all_at_once,), one = step_messages("flat", plan.nbytes, plan.bucket_nbytes, plan.backward, price)
    return [
        MessageGroup(all_at_once.calls / plan.every, all_at_once.transfer / plan.every, 1, all_at_once.window)
    ], one


def _exposed(
    plan: ClusterPlan, nodes: int, traffic: Sequence[MessageGroup], price: AllReduceTime, computing: Numbers
) -> Numbers:
    """Return the exposed communication of each step, with a random prediction error per job."""
    off = np.ones((plan.jobs, 1))
    if price.error:
        rng = np.random.default_rng([plan.seed, nodes, 2])
        off = np.exp(rng.normal(0.0, np.log1p(price.error) / _P90, (plan.jobs, 1)))
    exposed = np.zeros_like(computing)
    for part in traffic:
        exposed += exposed_seconds(
            part.calls * off,
            part.transfer * off,
            part.buckets,
            part.window * computing,
            plan.computing_slows,
            plan.calls_slow,
        )
    return exposed


@dataclass(frozen=True)
class _Course:
    """Course of the jobs: with restarts from checkpoints and, if they recover live, without."""

    took: JobTimes
    live: LiveTimes | None
    rollback: FailureModel
    intervals: CheckpointIntervals | None
    failure_cost: dict[str, float]

    @property
    def failures(self) -> Numbers:
        """Number of failures of each job; also while checkpoints are written and lost work is repeated."""
        found = self.took.failures.astype(np.float64)
        return (
            found if self.live is None else found + self.live.failures * self.took.seconds / self.live.seconds
        )

    @property
    def losses(self) -> dict[str, Numbers]:
        """Seconds by which failures lengthen each job, by their names in the ledger."""
        zero = np.zeros_like(self.took.work)
        live = self.live
        return {
            "checkpoints": self.took.writing,
            "lost work": self.took.lost + (live.repeated if live else zero),
            "restarts": self.took.restarting,
            "recoveries": live.paused if live else zero,
            "missing ranks": live.slower if live else zero,
        }


def _course(plan: ClusterPlan, nodes: int, work: Numbers, steps: _Steps) -> _Course:
    """Return the course of jobs that take `work` without failures."""
    seed = [plan.seed, nodes]
    risk = FailureModel(plan.node_mtbf / nodes, plan.write, plan.restart)
    if plan.recovery == "restart" or risk.mtbf == math.inf:
        intervals = _intervals(plan, risk, nodes)
        interval = intervals.used if intervals else math.inf
        cost = {} if risk.mtbf == math.inf else restart_cost(risk, interval)
        return _Course(simulate_jobs(risk, interval, work, [*seed, 3]), None, risk, intervals, cost)
    failures = live_failures(plan.live, plan.network, nodes, plan.node_mtbf, plan.restart)
    risk = state_risk(failures, plan.write, plan.restart)
    intervals = _live_intervals(plan, risk, nodes)
    mean, round_seconds = steps.whole.mean(axis=1), plan.every * steps.whole.mean(axis=1)
    computing = steps.computing.mean(axis=1) / mean
    cost = live_cost(failures, float(computing.mean()), float(round_seconds.mean()), risk, intervals.used)
    live = simulate_live_jobs(failures, computing, round_seconds, work, [*seed, 5])
    if live is None:
        none = np.zeros(plan.jobs)
        took = JobTimes(
            work=work, writing=none, lost=none, restarting=none, failures=none.astype(np.int64), stuck=True
        )
    else:
        took = simulate_jobs(risk, intervals.used, live.seconds, [*seed, 3])
    return _Course(took, live, risk, intervals, cost)


def _row(plan: ClusterPlan, nodes: int, steps: _Steps) -> ClusterRow:
    compute, samples, mean = steps.compute, steps.samples, steps.whole.mean(axis=1)
    useful, slowest = compute * samples.useful, compute * samples.slowest
    parts = {
        "useful": useful,
        "uneven machines": slowest - useful,
        "varying steps": compute * samples.longest.mean(axis=1) - slowest,
        "communication": steps.exposed.mean(axis=1),
    }
    work = (plan.work or 7 * DAY * nodes) / nodes * mean / compute
    course = _course(plan, nodes, work, steps)
    took, total = course.took, course.took.seconds
    ledger = {name: part / mean * work / total for name, part in parts.items()}
    ledger |= {name: part / total for name, part in course.losses.items()}
    if took.stuck:
        ledger = {name: np.full(plan.jobs, float(name == "lost work")) for name in ledger}
    efficiency = ledger["useful"]
    failing = plan.node_mtbf < math.inf
    return ClusterRow(
        nodes=nodes,
        ranks=nodes * plan.network.per_node,
        recovery=plan.recovery if failing else None,
        algorithm=steps.price.algorithm,
        compute_seconds=compute,
        comm_seconds=steps.comm,
        step=Percentiles.of(steps.whole.ravel()),
        efficiency=Percentiles.of(efficiency),
        ledger={name: float(part.mean()) for name, part in ledger.items()},
        speedup=float((efficiency * nodes * plan.network.per_node / samples.useful).mean()),
        mtbf_seconds=plan.node_mtbf / nodes if failing else None,
        rollback_seconds=None if course.rollback.mtbf == math.inf else course.rollback.mtbf,
        failures=float(course.failures.mean()),
        failure_cost=course.failure_cost,
        intervals=course.intervals,
        job_seconds=None if took.stuck else Percentiles.of(total),
        cost=None if plan.price is None or took.stuck else Percentiles.of(total / 3600 * nodes * plan.price),
        stuck=took.stuck,
    )


def _intervals(plan: ClusterPlan, risk: FailureModel, nodes: int) -> CheckpointIntervals | None:
    """Return the checkpoint intervals of recovery by restart; None without checkpoints."""
    if risk.mtbf == np.inf:
        return None if plan.interval is None else CheckpointIntervals(plan.interval)
    if not plan.write and plan.interval is None:
        raise UsageError(
            "with failures and checkpoints that take no time, the best interval is 0",
            remedy="give the time of a checkpoint or the interval",
        )
    return CheckpointIntervals(
        plan.interval or daly_interval(risk),
        young_interval(risk),
        daly_interval(risk),
        best_interval(risk, max(_MIN_JOBS, plan.jobs), [plan.seed, nodes, 4]),
    )


def _live_intervals(plan: ClusterPlan, risk: FailureModel, nodes: int) -> CheckpointIntervals:
    """Return the checkpoint intervals of live recovery: a day at most, since not all failures are modelled."""
    found = _intervals(plan, risk, nodes)
    if found is None or (plan.interval is None and found.used > DAY):
        return replace(found or CheckpointIntervals(DAY), used=DAY)
    return found
