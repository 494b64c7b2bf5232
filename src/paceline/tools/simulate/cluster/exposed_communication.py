"""Communication not hidden by computing, in closed form.

Gradients become ready evenly over a window of computing and are sent in n sequential buckets of b = transfer/n + call
seconds. During communication, computing is slowed by s; during computing, communication is slowed by k. This is the
closed form of `paceline.cost_model.step_simulator` for equal buckets. The step is delayed by

    b + (n − 1)·b·k·(1 − 1/s)                 if each bucket is done before the next is ready: b·k ≤ s·window/n
    n·b − (1 − 1/n)·window·(1 + s/k − s)      otherwise: buckets queue from the first one on

The last bucket is never hidden. With s = k = 1 this is max(b, n·b − (1 − 1/n)·window), as in
`paceline.cost_model.bucket_closed_form`; with a window of 0 it is n·b: no overlap.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError, unknown
from paceline.tools.simulate.cluster.all_reduce_rounds import SPLIT_ALGORITHMS
from paceline.tools.simulate.cluster.cluster_network import AllReduceTime, NetworkModel

__all__ = ["STRATEGIES", "MessageGroup", "exposed_seconds", "fastest_all_reduce", "step_messages"]

Seconds = NDArray[np.float64]

STRATEGIES = ("flat", "bucketed", "sharded", "full-shard")


def exposed_seconds(
    call: float | Seconds,
    transfer: float | Seconds,
    buckets: int,
    window: Seconds,
    computing_slows: float = 1.0,
    calls_slow: float = 1.0,
) -> Seconds:
    """Return the seconds by which communication lengthens a step; shapes broadcast.

    Args:
        call: seconds of one bucket independent of its bytes.
        transfer: seconds for the bytes of all buckets.
        buckets: n.
        window: seconds of computing in which buckets become ready.
        computing_slows: s, slowdown of computing during communication, 1 or more.
        calls_slow: k, slowdown of communication during computing, 1 or more.

    Example:
        >>> exposed_seconds(0.0, 1.0, 4, np.array([0.0, 1.0, 10.0])).tolist()
        [1.0, 0.25, 0.25]
    """
    each, gap = transfer / buckets + call, window / buckets
    keeps_up = each + (buckets - 1) * each * calls_slow * (1 - 1 / computing_slows)
    queue = buckets * each - (buckets - 1) * gap * (1 + computing_slows / calls_slow - computing_slows)
    return np.where(each * calls_slow <= gap * computing_slows, keeps_up, queue)


@dataclass(frozen=True)
class MessageGroup:
    """Messages of a step that share an overlap window.

    Attributes:
        calls: seconds of one bucket independent of its bytes.
        transfer: seconds for all bytes.
        buckets: number of buckets.
        window: share of computing that they can overlap.
    """

    calls: float
    transfer: float
    buckets: int
    window: float

    @property
    def seconds(self) -> float:
        """Seconds of all messages in sequence."""
        return self.buckets * self.calls + self.transfer


def fastest_all_reduce(
    network: NetworkModel, nodes: int, nbytes: float, algorithm: str = "auto", *, halved: bool = False
) -> AllReduceTime:
    """Return the time of an all-reduce by a given algorithm or the fastest one.

    Args:
        network: the network.
        nodes: number of nodes.
        nbytes: size of one call.
        algorithm: ``"auto"``, or a name.
        halved: require a reduce-scatter followed by an all-gather.

    Raises:
        UsageError: the network does not support the algorithm, or it has no such halves.
    """
    names = network.default_algorithms() if algorithm == "auto" else (algorithm,)
    if halved:
        names = tuple(name for name in names if name.split(",")[0] in SPLIT_ALGORITHMS)
        if not names:
            raise UsageError(
                f"{algorithm} is not a reduce-scatter followed by an all-gather, which sharding requires",
                remedy=f"valid: {', '.join(SPLIT_ALGORITHMS)}",
            )
    return min(
        (network.time_all_reduce(name, nodes, nbytes) for name in names), key=lambda price: price.seconds
    )


def step_messages(
    strategy: str,
    nbytes: float,
    bucket: float,
    backward: float,
    price: Callable[[float, bool], AllReduceTime],
) -> tuple[list[MessageGroup], AllReduceTime]:
    """Return the messages of a step and the time of an all-reduce of one bucket.

    flat: one all-reduce after backward. bucketed: buckets during backward. sharded: gradients are reduce-scattered
    during backward, parameters gathered after the update. full-shard: parameters are gathered during forward and again
    during backward, where gradients are reduce-scattered.

    Args:
        strategy: one of `STRATEGIES`.
        nbytes: size of all gradients.
        bucket: size of a bucket.
        backward: share of backward in computing; the rest is forward.
        price: returns the time of an all-reduce for the bytes of a call and whether it must have halves.

    Raises:
        UsageError: the strategy is unknown.
    """
    if strategy not in STRATEGIES:
        raise unknown("strategy", strategy, STRATEGIES)
    buckets = 1 if strategy == "flat" else max(1, math.ceil(nbytes / bucket))
    halved = strategy in ("sharded", "full-shard")
    one = price(nbytes / buckets, halved)

    def part(halves: int, window: float) -> MessageGroup:
        return MessageGroup(halves / 2 * one.call, halves / 2 * one.transfer * buckets, buckets, window)

    found = {
        "flat": [part(2, 0.0)],
        "bucketed": [part(2, backward)],
        "sharded": [part(1, backward), part(1, 0.0)],
        "full-shard": [part(1, 1.0 - backward), part(2, backward)],
    }
    return found[strategy], one
