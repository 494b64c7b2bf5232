"""Every rank gets a share: reduce-scatter, all-gather and all-to-all around rings and between pairs."""

from __future__ import annotations

from paceline.collectives.schedule import Rounds, Send

__all__ = [
    "bruck_all_gather",
    "direct_all_to_all",
    "pairwise_all_to_all",
    "pairwise_reduce_scatter",
    "ring_all_gather",
    "ring_reduce_scatter",
    "shift",
]


def ring_reduce_scatter(ranks: int) -> Rounds:
    """Return the rounds of a ring: each rank passes a partial sum to the next, and ends with chunk r complete."""
    return [
        [Send(rank, (rank + 1) % ranks, (rank - 1 - step) % ranks, add=True) for rank in range(ranks)]
        for step in range(ranks - 1)
    ]


def ring_all_gather(ranks: int) -> Rounds:
    """Return the rounds of a ring: each rank passes on what it got last, beginning with its own chunk r."""
    return [
        [Send(rank, (rank + 1) % ranks, (rank - step) % ranks) for rank in range(ranks)]
        for step in range(ranks - 1)
    ]


def pairwise_reduce_scatter(ranks: int) -> Rounds:
    """Return rounds in which each rank sends to the one k places further that one's chunk, k = 1, 2 …"""
    return [
        [Send(rank, (rank + k) % ranks, (rank + k) % ranks, add=True) for rank in range(ranks)]
        for k in range(1, ranks)
    ]


def bruck_all_gather(ranks: int) -> Rounds:
    """Return the rounds of Bruck's all-gather: what each rank has doubles, for any number of ranks."""
    rounds: Rounds = []
    for k in range((ranks - 1).bit_length()):
        have = 1 << k
        count = min(have, ranks - have)
        rounds.append(
            [send for rank in range(ranks) for send in _around(rank, (rank - have) % ranks, count, ranks)]
        )
    return rounds


def _around(src: int, dst: int, count: int, ranks: int) -> list[Send]:
    """Return the sends of `count` chunks from number `src` on, past the last to the first."""
    until_end = min(count, ranks - src)
    sends = [Send(src, dst, src, width=until_end)]
    if count > until_end:
        sends.append(Send(src, dst, 0, width=count - until_end))
    return sends


def pairwise_all_to_all(ranks: int) -> Rounds:
    """Return rounds in which each rank sends to the one k places further, k = 1, 2 …; chunk src·ranks + dst."""
    return [
        [Send(rank, (rank + k) % ranks, rank * ranks + (rank + k) % ranks) for rank in range(ranks)]
        for k in range(1, ranks)
    ]


def direct_all_to_all(ranks: int) -> Rounds:
    """Return the round in which everybody sends to everybody."""
    sends = [send for sends in pairwise_all_to_all(ranks) for send in sends]
    return [sends] if sends else []


def shift(ranks: int) -> Rounds:
    """Return the round in which each rank sends its chunk to the next."""
    return [[Send(rank, (rank + 1) % ranks, rank) for rank in range(ranks)]] if ranks > 1 else []
