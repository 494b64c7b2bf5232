"""What of communication computing does not hide: the seam behind which a finer model of buckets may stand (pure).

Gradients become ready evenly over a window of computing and travel in n buckets, one after another; a bucket takes
b = transfer/n + call. Beside them computing takes s times as long, beside computing they take k times as long: the two
clocks of `paceline.cost_model.step_simulator`, whose closed form for equal buckets this is. The end of the step is
delayed by

    b + (n − 1)·b·k·(1 − 1/s)                             if each is through before the next is ready: b·k ≤ s·window/n
    n·b − (1 − 1/n)·window·(1 + s/k − s)                  else: a queue that began with the first bucket

The last bucket is never hidden. With s = k = 1 that is max(b, n·b − (1 − 1/n)·window), as in
`paceline.cost_model.bucket_closed_form`; with a window of 0 it is n·b: nothing overlaps.
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
    """Return by how much communication lengthens computing.

    Args:
        call: seconds of one bucket without its bytes. transfer: seconds of all bytes together. buckets: n.
        window: seconds of computing in which buckets become ready; shapes broadcast as numpy's do.
        computing_slows: s, how many times as long computing takes beside a bucket, 1 or more.
        calls_slow: k, how many times as long a bucket takes beside computing, 1 or more.

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
    """Messages of a step that share a window.

    Attributes:
        calls: seconds of one bucket without its bytes. transfer: seconds of all bytes. buckets: how many.
        window: share of computing in which they may hide.
    """

    calls: float
    transfer: float
    buckets: int
    window: float

    @property
    def seconds(self) -> float:
        """Of all its messages, one after another."""
        return self.buckets * self.calls + self.transfer


def fastest_all_reduce(
    network: NetworkModel, nodes: int, nbytes: float, algorithm: str = "auto", *, halved: bool = False
) -> AllReduceTime:
    """Return the price of an all-reduce, by the cheapest algorithm unless one is named.

    Args:
        carrier: what prices it. nodes: how many. nbytes: of one call. algorithm: ``"auto"``, or a name.
        halved: whether its halves must be a reduce-scatter and an all-gather.

    Raises:
        UsageError: the carrier has no such algorithm, or it has no such halves.
    """
    names = network.default_algorithms() if algorithm == "auto" else (algorithm,)
    if halved:
        names = tuple(name for name in names if name.split(",")[0] in SPLIT_ALGORITHMS)
        if not names:
            raise UsageError(
                f"{algorithm} is no reduce-scatter followed by an all-gather, which sharding needs",
                remedy=f"valid: {', '.join(SPLIT_ALGORITHMS)}",
            )
    return min((network.time_all_reduce(name, nodes, nbytes) for name in names), key=lambda price: price.seconds)


def step_messages(
    strategy: str,
    nbytes: float,
    bucket: float,
    backward: float,
    price: Callable[[float, bool], AllReduceTime],
) -> tuple[list[MessageGroup], AllReduceTime]:
    """Return what a step sends, and the price of one of its buckets.

    flat: one all-reduce after backward. bucketed: in buckets beside backward. sharded: gradients are reduce-scattered
    beside backward, parameters gathered after the update. full-shard: parameters are gathered beside forward, and
    gathered again beside backward, where gradients are reduce-scattered.

    Args:
        strategy: one of `STRATEGIES`. nbytes: of all gradients. bucket: bytes of a bucket.
        backward: share of computing that is backward; the rest is forward.
        price: from the bytes of a call, and whether it must have halves, to what an all-reduce costs.

    Raises:
        UsageError: there is no such strategy.
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
