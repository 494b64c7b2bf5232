"""What is simulated of a cluster, as plain values (pure)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.errors import UsageError, unknown
from paceline.simulate.cluster.machines import Machines
from paceline.simulate.cluster.network import Carrier
from paceline.simulate.cluster.overlap import STRATEGIES

__all__ = ["BACKWARD", "BATCHES", "DAY", "ClusterPlan"]

BACKWARD = 2 / 3
"""Of computing: backward has two products with each weight, forward one."""

BATCHES = ("per-rank", "fixed")
DAY = 86400.0


@dataclass(frozen=True)
class ClusterPlan:
    """A training, whatever the number of nodes.

    Attributes:
        carrier: the network, described or measured.
        step_seconds: of computing: of a rank's own batch (``per-rank``), or of the whole batch on one rank (``fixed``).
        nbytes: of the gradients, as they travel.
        machines: what nodes are like.
        batch: ``"per-rank"``: more ranks, more samples a step (weak scaling); ``"fixed"``: the same samples (strong).
        strategy: how gradients are synchronised, one of `paceline.simulate.cluster.overlap.STRATEGIES`.
        bucket_nbytes: of a bucket. backward: share of computing in which gradients become ready.
        computing_slows: how many times as long computing takes beside exchanges, 1 or more. calls_slow: exchanges
            beside computing.
        algorithm: of the all-reduce; ``"auto"``: the cheapest.
        every: H, steps between two exchanges; above 1 it is parameters that are exchanged, and nothing overlaps.
        node_mtbf: mean seconds between failures of a node. write: seconds of a checkpoint. restart: seconds after a
            failure. interval: seconds of training between checkpoints; None: Daly's.
        work: node-seconds of computing of the job, on nodes as fast as the fastest; None: a week of all nodes.
        price: of an hour of a node; None: not asked.
        jobs: how many are simulated for each number of nodes. draws: ranks' steps to draw for it, about.
        seed: of everything.

    Raises:
        UsageError: a number makes no sense.
    """

    carrier: Carrier
    step_seconds: float
    nbytes: float
    machines: Machines = field(default_factory=Machines)
    batch: str = "per-rank"
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
        if self.batch not in BATCHES:
            raise unknown("batch", self.batch, BATCHES)
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
                f"every={self.every} with {self.strategy}: ranks that train apart need whole parameters",
                remedy="use flat or bucketed, or exchange at every step",
            )
