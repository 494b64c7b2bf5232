"""Settings of a simulated training, independent of the number of nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.errors import UsageError, unknown
from paceline.tools.simulate.cluster.cluster_network import NetworkModel
from paceline.tools.simulate.cluster.compute_times import ClusterMachines
from paceline.tools.simulate.cluster.exposed_communication import STRATEGIES
from paceline.tools.simulate.cluster.live_recovery import LiveRecovery

__all__ = ["BACKWARD", "MOST_NODES", "RECOVERIES", "SCALINGS", "ClusterPlan"]

BACKWARD = 2 / 3
"""Share of backward in computing: it has two products with each weight, forward one."""

SCALINGS = ("weak", "strong")
RECOVERIES = ("restart", "live")
MOST_NODES = 1_000_000


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
        recovery: from failures: ``"restart"`` of all ranks from the last checkpoint, or ``"live"``.
        live: how ranks recover live.
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
    recovery: str = "restart"
    live: LiveRecovery = field(default_factory=LiveRecovery)
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
        if self.recovery not in RECOVERIES:
            raise unknown("recovery", self.recovery, RECOVERIES)
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
