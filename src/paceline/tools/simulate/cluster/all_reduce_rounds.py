"""What an all-reduce sends in each round, as arrays of ranks: for numbers of ranks that no list of sends could hold.

The same rounds as `paceline.collectives.catalogue`, which proves them; `tests/pure/test_cluster_network.py` holds one
against the other. Gathering is reducing turned round, and costs the same on links that are alike in both directions,
so a phase that comes back is counted twice rather than listed twice.
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
"""Those whose first half is a reduce-scatter and whose second half is an all-gather."""


@dataclass(frozen=True)
class AllReduceRounds:
    """Rounds that are alike.

    Attributes:
        src, dst: who sends to whom, all at the same time.
        share: of the vector that each message has.
        repeats: rounds.
    """

    src: Ranks
    dst: Ranks
    share: float
    repeats: int


def all_reduce_rounds(algorithm: str, ranks: int, per_node: int = 1) -> list[AllReduceRounds]:
    """Return the rounds of an all-reduce.

    Args:
        algorithm: one of `ALGORITHMS`.
        ranks: how many, 1 or more; one rank sends nothing.
        per_node: ranks of a node, numbered node by node; it divides `ranks`.

    Raises:
        UsageError: there is no such algorithm.

    Example:
        >>> [(phase.share, phase.repeats) for phase in phases("ring", 4)]
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
    found, apart = [], 1
    while apart < ranks:
        parents = np.arange(0, ranks - apart, 2 * apart)
        found.append(AllReduceRounds(parents + apart, parents, 1.0, 2))
        apart *= 2
    return found


def _halves(ranks: int, whole: bool) -> list[AllReduceRounds]:
    """Exchange with partners 1, 2, 4 … apart: whole vectors once, or halves there and back."""
    core = 1 << (ranks.bit_length() - 1)
    beyond, every = np.arange(core, ranks), np.arange(core)
    found = [AllReduceRounds(beyond, beyond - core, 1.0, 2)] if core < ranks else []
    apart = 1
    while apart < core:
        found.append(AllReduceRounds(every, every ^ apart, *((1.0, 1) if whole else (apart / core, 2))))
        apart *= 2
    return found


def _nested(nodes: int, per_node: int, halving: bool) -> list[AllReduceRounds]:
    """Sum inside nodes, then each place with its like in the other nodes, then give out inside nodes."""
    found = []
    if per_node > 1:  # every node does the same, and no link is shared by two: one stands for all
        src, dst = np.divmod(np.arange(per_node * per_node), per_node)
        found.append(AllReduceRounds(src[src != dst], dst[src != dst], 1 / per_node, 2))
    places = np.arange(per_node)
    for phase in all_reduce_rounds("halving-doubling" if halving else "ring", nodes):
        src, dst = ((of[:, None] * per_node + places).ravel() for of in (phase.src, phase.dst))
        found.append(AllReduceRounds(src, dst, phase.share / per_node, phase.repeats))
    return found
