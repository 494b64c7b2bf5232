"""Reducing to rank 0: as rounds; their mirror images broadcast from rank 0."""

from __future__ import annotations

from paceline.collectives.algorithms.halve import fold, halves
from paceline.collectives.schedule import Rounds, Send

__all__ = [
    "chain_reduce",
    "gather_one_by_one",
    "gather_tree",
    "one_by_one_reduce",
    "rabenseifner_reduce",
    "tree_reduce",
]


def one_by_one_reduce(ranks: int) -> Rounds:
    """Return rounds in which every other rank in turn sends its vector to rank 0; one chunk."""
    return [[Send(rank, 0, 0, add=True)] for rank in range(1, ranks)]


def chain_reduce(ranks: int) -> Rounds:
    """Return rounds in which the last rank sends to the one before it, that one to its own, and so on; one chunk."""
    return [[Send(rank, rank - 1, 0, add=True)] for rank in reversed(range(1, ranks))]


def tree_reduce(ranks: int) -> Rounds:
    """Return the rounds of a binomial tree: neighbours first, then those 2, 4, 8 … apart; one chunk.

    Example:
        >>> [[(send.src, send.dst) for send in sends] for sends in tree_reduce(8)]
        [[(1, 0), (3, 2), (5, 4), (7, 6)], [(2, 0), (6, 4)], [(4, 0)]]
    """
    return [
        [Send(rank + apart, rank, 0, add=True) for rank in range(0, ranks - apart, 2 * apart)]
        for apart in _powers(ranks)
    ]


def rabenseifner_reduce(ranks: int) -> tuple[Rounds, int]:
    """Return rounds and chunks of Rabenseifner's reduce: halves are exchanged and added, then gathered by a tree."""
    folded, core = fold(ranks)
    return [*folded, *halves(core), *gather_tree(core)], core


def gather_tree(ranks: int) -> Rounds:
    """Return rounds in which rank 0 collects chunk r of every rank r, along a binomial tree; a chunk for each rank."""
    return [
        [
            Send(rank + apart, rank, rank + apart, width=min(apart, ranks - rank - apart))
            for rank in range(0, ranks - apart, 2 * apart)
        ]
        for apart in _powers(ranks)
    ]


def gather_one_by_one(ranks: int) -> Rounds:
    """Return rounds in which every other rank in turn sends its chunk to rank 0; a chunk for each rank."""
    return [[Send(rank, 0, rank)] for rank in range(1, ranks)]


def _powers(ranks: int) -> list[int]:
    """Return 1, 2, 4 … below `ranks`."""
    return [1 << k for k in range((ranks - 1).bit_length())]
