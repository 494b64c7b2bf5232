"""Rounds of all-reduce algorithms as arrays of ranks, for numbers of ranks too large for lists of messages.

The rounds are those of `paceline.collectives`, which proves them; `test_cluster_network` compares the two. A gather is
a reduction in reverse with the same cost on symmetric links, so such rounds are listed once and counted twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.errors import unknown

__all__ = ["ALGORITHMS", "SPLIT_ALGORITHMS", "TWO_LEVEL_ALGORITHMS", "AllReduceRounds", "all_reduce_rounds"]

Ranks = NDArray[np.int64]

TWO_LEVEL_ALGORITHMS = ("two-level", "two-level-halving")
"""Algorithms for nodes of several ranks."""

ALGORITHMS = ("ring", "tree", "doubling", "halving-doubling", *TWO_LEVEL_ALGORITHMS)

SPLIT_ALGORITHMS = ("ring", "halving-doubling", *TWO_LEVEL_ALGORITHMS)
"""Algorithms that are a reduce-scatter followed by an all-gather."""


@dataclass(frozen=True)
class AllReduceRounds:
    """Identical rounds.

    Attributes:
        src: sending ranks of the concurrent messages.
        dst: receiving ranks of the concurrent messages.
        share: share of the vector in each message.
        repeats: number of rounds.
    """

    src: Ranks
    dst: Ranks
    share: float
    repeats: int


def all_reduce_rounds(algorithm: str, ranks: int, per_node: int = 1) -> list[AllReduceRounds]:
    """Return the rounds of an all-reduce.

    Args:
        algorithm: one of `ALGORITHMS`.
        ranks: number of ranks; a single rank sends nothing.
        per_node: ranks per node, numbered node by node; divides `ranks`.

    Raises:
        UsageError: the algorithm is unknown.

    Example:
        >>> [(each.share, each.repeats) for each in all_reduce_rounds("ring", 4)]
        [(0.25, 6)]
    """
    if algorithm not in ALGORITHMS:
        raise unknown("algorithm", algorithm, ALGORITHMS)
    if ranks == 1:
        return []
    if algorithm in TWO_LEVEL_ALGORITHMS:
        return _nested(ranks // per_node, per_node, halving=algorithm == "two-level-halving")
    every = np.arange(ranks)
    if algorithm == "ring":
        return [AllReduceRounds(every, (every + 1) % ranks, 1 / ranks, 2 * (ranks - 1))]
    if algorithm == "tree":
        return _tree(ranks)
    return _halves(ranks, whole=algorithm == "doubling")


def _tree(ranks: int) -> list[AllReduceRounds]:
    rounds, distance = [], 1
    while distance < ranks:
        parents = np.arange(0, ranks - distance, 2 * distance)
        rounds.append(AllReduceRounds(parents + distance, parents, 1.0, 2))
        distance *= 2
    return rounds


def _halves(ranks: int, whole: bool) -> list[AllReduceRounds]:
    """Exchange with partners at distances 1, 2, 4 …: whole vectors once, or halves twice."""
    core = 1 << (ranks.bit_length() - 1)
    beyond, every = np.arange(core, ranks), np.arange(core)
    found = [AllReduceRounds(beyond, beyond - core, 1.0, 2)] if core < ranks else []
    apart = 1
    while apart < core:
        found.append(AllReduceRounds(every, every ^ apart, *((1.0, 1) if whole else (apart / core, 2))))
        apart *= 2
    return found


def _nested(nodes: int, per_node: int, halving: bool) -> list[AllReduceRounds]:
    """Reduce-scatter inside nodes, all-reduce between ranks of the same place, all-gather inside nodes."""
    found = []
    if per_node > 1:  # all nodes do the same on separate links: one stands for all
        src, dst = np.divmod(np.arange(per_node * per_node), per_node)
        found.append(AllReduceRounds(src[src != dst], dst[src != dst], 1 / per_node, 2))
    places = np.arange(per_node)
    for phase in all_reduce_rounds("halving-doubling" if halving else "ring", nodes):
        src, dst = ((of[:, None] * per_node + places).ravel() for of in (phase.src, phase.dst))
        found.append(AllReduceRounds(src, dst, phase.share / per_node, phase.repeats))
    return found
