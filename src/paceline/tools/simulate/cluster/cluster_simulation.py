"""Simulation of a training on any number of nodes: step time, efficiency and its losses, failures, cost.

Several jobs are simulated, each with its own machines, steps and failures. Their time is broken down into shares of the
total, which add up to 1:

    useful           time of the work if it were distributed by speed and no rank waited
    uneven machines  waiting for the slowest machine
    varying steps    waiting for the rank whose step happens to be longest
    communication    exposed communication
    checkpoints, lost work, restarts
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError, unknown
from paceline.tools.simulate.cluster.cluster_network import AllReduceTime, NetworkModel
from paceline.tools.simulate.cluster.compute_times import ClusterMachines, StepSamples, sample_steps
from paceline.tools.simulate.cluster.exposed_communication import (
    STRATEGIES,
    MessageGroup,
    exposed_seconds,
    fastest_all_reduce,
    step_messages,
)
from paceline.tools.simulate.cluster.failure_cost import (
    FailureModel,
    best_interval,
    daly_interval,
    simulate_jobs,
    young_interval,
)

__all__ = [
    "BACKWARD",
    "DAY",
    "LOSSES",
    "MOST_NODES",
    "SCALINGS",
    "CheckpointIntervals",
    "ClusterPlan",
    "ClusterRow",
    "Percentiles",
    "simulate_cluster",
    "sweep_nodes",
]

BACKWARD = 2 / 3
"""Share of backward in computing: it has two products with each weight, forward one."""

SCALINGS = ("weak", "strong")
DAY = 86400.0
MOST_NODES = 1_000_000
LOSSES: tuple[str, ...] = (
    "uneven machines",
    "varying steps",
    "communication",
    "checkpoints",
    "lost work",
    "restarts",
)

_MIN_JOBS = 32
"""Jobs per checkpoint interval in comparisons, at least."""
_P90 = 1.6449
"""90 % of a normal distribution is within this many standard deviations of the mean."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """A training, independent of the number of nodes.

    Attributes:
        network: the network, described or measured.
        step_seconds: computing time of a rank's own batch (``weak``), or of the whole batch on one rank
            (``strong``).
        nbytes: bytes of the gradients on the wire.
        machines: the machines.
        scaling: ``"weak"``, the batch of a rank stays, or ``"strong"``, that of all ranks does.
        strategy: how gradients are synchronised, one of `exposed_communication.STRATEGIES`.
        bucket_nbytes: size of a bucket.
        backward: share of computing in which gradients become ready.
        computing_slows: slowdown of computing during communication, 1 or more.
        calls_slow: slowdown of communication during computing, 1 or more.
        algorithm: algorithm of the all-reduce; ``"auto"``: the fastest.
        every: H, steps between exchanges; above 1, parameters are exchanged without overlap.
        node_mtbf: mean seconds between failures of a node.
        write: seconds of a checkpoint.
        restart: seconds of a restart after a failure.
        interval: seconds of training between checkpoints; None: Daly's.
        work: node-seconds of computing of the job on the fastest nodes; None: a week of all nodes.
        price: price of a node hour, if known.
        jobs: jobs simulated per number of nodes.
        draws: approximate number of rank steps drawn per number of nodes.
        seed: seed of all random numbers.

    Raises:
        UsageError: a number is out of range.
    """

    network: NetworkModel
    step_seconds: float
    nbytes: float
    machines: ClusterMachines = field(default_factory=ClusterMachines)
    scaling: str = "weak"
    strategy: str = "bucketed"
    bucket_nbytes: float = 25 * 2**20
    backward: float = BACKWARD
    computing_slows: float = 1.0
    calls_slow: float = 1.0
    algorithm: str = "auto"
    every: int = 1
    node_mtbf: float = math.inf
    write: float = 0.0
    restart: float = 0.0
    interval: float | None = None
    work: float | None = None
    price: float | None = None
    jobs: int = 32
    draws: int = 10_000_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.scaling not in SCALINGS:
            raise unknown("scaling", self.scaling, SCALINGS)
        if self.strategy not in STRATEGIES:
            raise unknown("strategy", self.strategy, STRATEGIES)
        for name in ("step_seconds", "bucket_nbytes", "node_mtbf", "interval", "work", "price"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name}={value!r}", remedy="give a number above 0")
        for name in ("nbytes", "write", "restart"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name}={getattr(self, name)!r}", remedy="give a number of 0 or more")
        if not 0 < self.backward < 1:
            raise UsageError(
                f"backward={self.backward!r}", remedy="give a share of computing, above 0 and below 1"
            )
        for name in ("computing_slows", "calls_slow"):
            if not 1 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name}={getattr(self, name)!r}", remedy="give a factor of 1 or more")
        for name in ("every", "jobs", "draws"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)!r}", remedy="give a whole number of 1 or more")
        if self.seed < 0:
            raise UsageError(f"seed={self.seed!r}", remedy="give a whole number of 0 or more")
        if self.every > 1 and self.strategy in ("sharded", "full-shard"):
            raise UsageError(
                f"every={self.every} with {self.strategy}: local steps require whole parameters on every rank",
                remedy="use flat or bucketed, or exchange at every step",
            )


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
    """Seconds of training between two checkpoints; all but `used` are None without failures.

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
        algorithm: algorithm of the all-reduce.
        compute_seconds: computing time of a step on one of the fastest ranks.
        comm_seconds: time of all messages of a step, hidden or not.
        step: seconds of a step, over steps and jobs.
        efficiency: useful share of all time, over jobs.
        ledger: mean share of all time of ``"useful"`` and each of `LOSSES`; they add up to 1.
        speedup: throughput relative to one of the fastest ranks alone.
        mtbf_seconds: mean time between failures of the job; None without failures.
        failures: mean number of failures of a job.
        intervals: checkpoint intervals; None without checkpoints.
        job_seconds: time of the job, over jobs.
        cost: cost of the job, over jobs; None without a price.
        stuck: whether failures are so frequent that the job never ends; efficiency is then 0.
    """

    nodes: int
    ranks: int
    algorithm: str
    compute_seconds: float
    comm_seconds: float
    step: Percentiles
    efficiency: Percentiles
    ledger: dict[str, float]
    speedup: float
    mtbf_seconds: float | None
    failures: float
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


def sweep_nodes(plan: ClusterPlan, nodes: Sequence[int]) -> Iterator[ClusterRow]:
    """Yield a row per number of nodes; see `simulate_cluster`."""
    for count in nodes:
        yield simulate_cluster(plan, count)


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
    if type(nodes) is not int or not 1 <= nodes <= MOST_NODES:
        raise UsageError(f"{nodes!r} nodes", remedy=f"give a whole number from 1 to {MOST_NODES}")
    ranks = nodes * plan.network.per_node
    compute = plan.step_seconds / (ranks if plan.scaling == "strong" else 1)
    traffic, price = _traffic(plan, nodes)
    steps = sample_steps(
        plan.machines, nodes, plan.network.per_node, plan.every, plan.jobs, plan.draws, [plan.seed, nodes, 1]
    )
    waiting = compute * steps.longest
    exposed = _exposed(plan, nodes, traffic, price, waiting)
    whole = waiting + exposed
    return _row(plan, nodes, price, compute, sum(each.seconds for each in traffic), steps, exposed, whole)


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


def _row(
    plan: ClusterPlan,
    nodes: int,
    price: AllReduceTime,
    compute: float,
    comm: float,
    steps: StepSamples,
    exposed: Numbers,
    whole: Numbers,
) -> ClusterRow:
    mean = whole.mean(axis=1)
    useful, slowest = compute * steps.useful, compute * steps.slowest
    parts = {
        "useful": useful,
        "uneven machines": slowest - useful,
        "varying steps": compute * steps.longest.mean(axis=1) - slowest,
        "communication": exposed.mean(axis=1),
    }
    ideal = (plan.work or 7 * DAY * nodes) / nodes
    work = ideal * mean / compute
    risk = FailureModel(plan.node_mtbf / nodes, plan.write, plan.restart)
    intervals = _intervals(plan, risk, nodes)
    took = simulate_jobs(risk, intervals.used if intervals else np.inf, work, [plan.seed, nodes, 3])
    total = took.seconds
    ledger = {name: part / mean * work / total for name, part in parts.items()}
    ledger |= {
        "checkpoints": took.writing / total,
        "lost work": took.lost / total,
        "restarts": took.restarting / total,
    }
    if took.stuck:
        ledger = {name: np.full(plan.jobs, float(name == "lost work")) for name in ledger}
    efficiency = ledger["useful"]
    hours = total / 3600.0 * nodes
    return ClusterRow(
        nodes=nodes,
        ranks=nodes * plan.network.per_node,
        algorithm=price.algorithm,
        compute_seconds=compute,
        comm_seconds=comm,
        step=Percentiles.of(whole.ravel()),
        efficiency=Percentiles.of(efficiency),
        ledger={name: float(part.mean()) for name, part in ledger.items()},
        speedup=float((efficiency * nodes * plan.network.per_node / steps.useful).mean()),
        mtbf_seconds=None if risk.mtbf == np.inf else risk.mtbf,
        failures=float(took.failures.mean()),
        intervals=intervals,
        job_seconds=None if took.stuck else Percentiles.of(total),
        cost=None if plan.price is None or took.stuck else Percentiles.of(hours * plan.price),
        stuck=took.stuck,
    )


def _intervals(plan: ClusterPlan, risk: FailureModel, nodes: int) -> CheckpointIntervals | None:
    """Return the checkpoint intervals; None without checkpoints."""
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
