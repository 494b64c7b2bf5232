"""Cost of failures with live recovery: survivors keep their processes, and no work is lost unless state is.

A failure takes one process or a whole node. Survivors notice it, form a new world, re-divide shards, and repeat the
interrupted step. Until the replacement joins, fewer ranks train; it joins between two steps, in one more change of the
world, and receives its state.

State is lost if nobody is left who holds it; then all go back to the checkpoint, as with a restart:

    replicated  every rank holds everything: only if all of them die
    sharded     a rank holds a copy of the next rank's shard: if two adjacent ranks die before the copies are
                renewed; so always, if a node of several ranks dies

Failures of a kind are a Poisson process with rate λ. Training pauses while one of them is younger than P, its pause, or
its replacement joins, which takes J; the number of missing replacements has a Poisson distribution too. So the job
takes longer by the factor

    e^(Σ λ·(P + J)) · M·(e^(T/M) − 1)/T / E[speed]     T: a step, M: mean time between failures, 1/Σ λ

which is Daly's formula (`paceline.checkpoint.save_interval`) with a checkpoint after every step that takes no time, and
a restart of P + J.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoint.save_interval import FailureModel, expected_undone
from paceline.errors import UsageError
from paceline.tools.simulate.cluster.cluster_network import NetworkModel
from paceline.tools.simulate.cluster.failure_cost import FAILURE_PARTS

__all__ = [
    "FailureKind",
    "LiveFailures",
    "LiveRecovery",
    "expected_live_slowdown",
    "live_cost",
    "live_failures",
    "state_risk",
]

Numbers = NDArray[np.float64]

_REBUILD_ONE_NODE, _REBUILD_NODES = 0.5, 1.0
"""Measured seconds until a new world has formed, on one node and between nodes."""
_TAIL = 12.0
"""Standard deviations of a Poisson distribution beyond which its probability is neglected."""
_NEVER = 1e-15
"""Losses of state per second that are neglected: one in 30 million years."""


@dataclass(frozen=True, kw_only=True)
class LiveRecovery:
    """How ranks recover live, independent of the number of nodes.

    Attributes:
        node_share: share of failures that take a whole node; the others take one process.
        notice_process: seconds until a lost process is noticed.
        notice_node: seconds until a lost node is noticed.
        rebuild: seconds in which a new world forms; None: as measured, 0.5 on one node, 1 between nodes.
        replacement: seconds from a failure until the replacement is ready; None: as long as a restart.
        virtual_ranks: virtual ranks per rank; 0: none, so that the global batch shrinks while ranks are missing.
        whole_nbytes: bytes of state of which every rank holds the whole.
        divided_nbytes: bytes of state of which every rank holds a shard and a copy of the next rank's shard.

    Raises:
        UsageError: a number is out of range.
    """

    node_share: float = 0.2
    notice_process: float = 0.01
    notice_node: float = 5.0
    rebuild: float | None = None
    replacement: float | None = None
    virtual_ranks: int = 0
    whole_nbytes: float = 0.0
    divided_nbytes: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.node_share <= 1:
            raise UsageError(f"node_share={self.node_share!r}", remedy="give a share from 0 to 100%")
        for name in (
            "notice_process", "notice_node", "rebuild", "replacement", "whole_nbytes", "divided_nbytes",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise UsageError(f"{name}={value!r}", remedy="give a number of 0 or more")
        if type(self.virtual_ranks) is not int or self.virtual_ranks < 0:
            raise UsageError(
                f"virtual_ranks={self.virtual_ranks!r}", remedy="give a whole number of 0 or more"
            )


@dataclass(frozen=True, kw_only=True)
class FailureKind:
    """Failures of one process, or of a whole node.

    Attributes:
        rate: failures per second of the job.
        ranks: ranks that are lost.
        notice: seconds until survivors notice it.
        rebuild: seconds in which the new world forms.
        transfer: seconds in which state moves before training goes on.
        join: seconds in which training pauses for the replacement; 0: it is ready before the new world forms.
        missing: seconds from the failure until the replacement joins; 0: it is part of the new world.
        loses_state: probability that state is lost, so that training goes back to the checkpoint.
    """

    rate: float
    ranks: int
    notice: float
    rebuild: float
    transfer: float
    join: float
    missing: float
    loses_state: float

    @property
    def pause(self) -> float:
        """Seconds from the failure until training goes on."""
        return self.notice + self.rebuild + self.transfer

    @property
    def live_rate(self) -> float:
        """Failures per second that are recovered from live."""
        return self.rate * (1.0 - self.loses_state)


@dataclass(frozen=True)
class LiveFailures:
    """Failures of a job on a number of nodes.

    Attributes:
        kinds: failures of a process, and of a node.
        ranks: N, ranks of the job.
        virtual_ranks: virtual ranks per rank; 0: none.
    """

    kinds: tuple[FailureKind, ...]
    ranks: int
    virtual_ranks: int = 0

    @property
    def live_rate(self) -> float:
        """Failures per second that are recovered from live."""
        return math.fsum(kind.live_rate for kind in self.kinds)

    @property
    def state_mtbf(self) -> float:
        """Mean seconds between losses of state; infinite if there are practically none."""
        rate = math.fsum(kind.rate * kind.loses_state for kind in self.kinds)
        return 1.0 / rate if rate > _NEVER else math.inf

    def speed(self, missing: NDArray[np.int64], computing: float) -> Numbers:
        """Return the speed with missing ranks, relative to all ranks.

        With V virtual ranks the slowest of N − m ranks computes ⌈V/(N − m)⌉ micro-batches instead of V/N. Without
        them, steps take the same time and have (N − m)/N of the samples.

        Args:
            missing: numbers of missing ranks.
            computing: share of computing in the time of a step.

        Example:
            >>> LiveFailures((), ranks=8, virtual_ranks=2).speed(np.array([0, 1, 4, 8]), computing=0.5).tolist()
            [1.0, 0.8, 0.6666666666666666, 0.0]
        """
        left = np.maximum(self.ranks - missing, 0)
        if not self.virtual_ranks:
            return left / self.ranks
        most = -(-self.virtual_ranks * self.ranks // np.maximum(left, 1))
        return np.where(left > 0, 1.0 / (1.0 + computing * (most / self.virtual_ranks - 1.0)), 0.0)


def live_failures(
    live: LiveRecovery, network: NetworkModel, nodes: int, node_mtbf: float, restart: float
) -> LiveFailures:
    """Return the failures of a job on a number of nodes.

    Args:
        live: how ranks recover.
        network: the network, for the time of transfers.
        nodes: number of nodes.
        node_mtbf: mean seconds between failures of a node.
        restart: seconds of a restart, in which a replacement is ready by default.
    """
    ranks = nodes * network.per_node
    process, node = (1.0 - live.node_share) / node_mtbf, live.node_share / node_mtbf
    rebuild = live.rebuild
    if rebuild is None:
        rebuild = _REBUILD_ONE_NODE if nodes == 1 else _REBUILD_NODES
    # Each rank receives at most its new shard and a copy of the next one's; ranks of a node share its link.
    shares = nodes if nodes > 1 else ranks
    divide = _send_seconds(network, nodes, 2 * live.divided_nbytes / shares)
    give = _send_seconds(network, nodes, live.whole_nbytes)
    replacement = restart if live.replacement is None else live.replacement
    kinds: list[FailureKind] = []
    for whole_node, rate, notice in ((False, process, live.notice_process), (True, node, live.notice_node)):
        later = replacement > notice + rebuild + divide
        transfer = divide if later else divide + give
        risk = _state_loss(
            bool(live.divided_nbytes),
            whole_node=whole_node,
            nodes=nodes,
            per_node=network.per_node,
            process=process / network.per_node,
            node=node,
            exposure=notice + rebuild + transfer,
        )
        kinds.append(
            FailureKind(
                rate=nodes * rate,
                ranks=network.per_node if whole_node else 1,
                notice=notice,
                rebuild=rebuild,
                transfer=transfer,
                join=rebuild + divide + give if later else 0.0,
                missing=replacement if later else 0.0,
                loses_state=risk,
            )
        )
    return LiveFailures(tuple(kinds), ranks, live.virtual_ranks)


def _send_seconds(network: NetworkModel, nodes: int, nbytes: float) -> float:
    return network.send_seconds(nodes, nbytes) if nbytes and nodes * network.per_node > 1 else 0.0


def _state_loss(
    sharded: bool,
    *,
    whole_node: bool,
    nodes: int,
    per_node: int,
    process: float,
    node: float,
    exposure: float,
) -> float:
    """Return the probability that a failure loses state.

    Args:
        sharded: whether ranks divide state.
        whole_node: whether the failure takes a node.
        nodes: number of nodes.
        per_node: ranks per node.
        process: failures per second of one rank's process.
        node: failures per second of one node.
        exposure: seconds until all state has as many copies as before.
    """
    alone = nodes * per_node == 1 or (whole_node and (nodes == 1 or (sharded and per_node > 1)))
    if alone or (nodes == 1 and not sharded):
        return float(alone)
    if not sharded:  # all other nodes must die too, and the own one if it lost a process only
        dies = -math.expm1(-(node + process * (per_node == 1)) * exposure)
        return dies ** (nodes - 1 + (per_node > 1 and not whole_node))
    neighbours = min(2, nodes * per_node - 1)
    # A failure of a node of several ranks loses state by itself, so it does not count as one that a process leads to.
    return -math.expm1(-neighbours * (process + node * (per_node == 1)) * exposure)


def expected_live_slowdown(failures: LiveFailures, computing: float, step: float) -> float:
    """Return the expected time of a job relative to one without failures, apart from losses of state.

    Infinite if the job never ends.

    Args:
        failures: the failures.
        computing: share of computing in the time of a step.
        step: seconds of a step, repeated after a failure.
    """
    rate = failures.live_rate
    if not rate:
        return 1.0
    pauses = math.fsum(kind.live_rate * (kind.pause + kind.join) for kind in failures.kinds)
    if pauses + step * rate > 500:
        return math.inf
    missing, chance = np.zeros(1, np.int64), np.ones(1)
    for kind in failures.kinds:
        count, of_count = _poisson(kind.live_rate * max(0.0, kind.missing - kind.pause))
        missing = np.add.outer(missing, kind.ranks * count).ravel()
        chance = np.multiply.outer(chance, of_count).ravel()
    speed = float((chance * failures.speed(missing, computing)).sum())
    if speed <= 0.0:
        return math.inf
    return math.exp(pauses) * math.expm1(step * rate) / (step * rate) / speed


def state_risk(failures: LiveFailures, write: float, restart: float) -> FailureModel:
    """Return how often state is lost, and what checkpoints and restarts cost then.

    Args:
        failures: the failures.
        write: seconds of a checkpoint.
        restart: seconds of a restart; other failures during one begin it again.
    """
    rate = failures.live_rate
    if rate:
        restart = math.expm1(min(restart * rate, 500.0)) / rate
    return FailureModel(failures.state_mtbf, write, restart)


def live_cost(
    failures: LiveFailures, computing: float, step: float, risk: FailureModel, interval: float
) -> dict[str, float]:
    """Return the mean seconds that a failure during training costs, by `FAILURE_PARTS`.

    Args:
        failures: the failures.
        computing: share of computing in the time of a step.
        step: seconds of a step.
        risk: losses of state (`state_risk`).
        interval: τ, seconds of training between checkpoints.
    """
    cost = dict.fromkeys(FAILURE_PARTS, 0.0)
    rate = math.fsum(kind.rate for kind in failures.kinds)
    for kind in failures.kinds:
        share, lost = kind.live_rate / rate, kind.rate * kind.loses_state / rate
        slow = 1.0 - float(failures.speed(np.array([kind.ranks]), computing)[0])
        worlds = 2 if kind.join else 1
        cost["noticing"] += share * kind.notice
        cost["new world"] += share * kind.rebuild * worlds
        cost["state"] += share * (kind.pause + kind.join - kind.notice - kind.rebuild * worlds)
        cost["slower steps"] += share * max(0.0, kind.missing - kind.pause) * slow
        cost["restart"] += lost * risk.restart
        cost["lost work"] += lost * expected_undone(risk.mtbf, interval + risk.write) if lost else 0.0
    if failures.live_rate:
        cost["repeated step"] = failures.live_rate / rate * expected_undone(1 / failures.live_rate, step)
    return cost


def _poisson(mean: float) -> tuple[NDArray[np.int64], Numbers]:
    """Return the counts of a Poisson distribution that are not negligible, and their probabilities."""
    if not mean:
        return np.zeros(1, np.int64), np.ones(1)
    reach = _TAIL * math.sqrt(mean) + 2 * _TAIL
    counts = range(max(0, math.floor(mean - reach)), math.ceil(mean + reach) + 1)
    chance = np.array([math.exp(n * math.log(mean) - mean - math.lgamma(n + 1)) for n in counts])
    return np.array(counts, np.int64), chance / chance.sum()
