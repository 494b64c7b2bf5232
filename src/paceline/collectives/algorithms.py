"""The algorithms: pure functions from a number of ranks to rounds.

Exchanging halves: recursive halving and doubling, for a power of two; and the folding of other numbers into one.

All-reduce in two levels, inside nodes and between them; and through one rank at the switch.

Reducing to rank 0: as rounds; their mirror images broadcast from rank 0.

Every rank gets a share: reduce-scatter, all-gather and all-to-all around rings and between pairs.
"""

from __future__ import annotations

from paceline.collectives.schedule import Rounds, Send, mirrored

__all__ = [
    "bruck_all_gather",
    "chain_reduce",
    "direct_all_to_all",
    "doubling_all_reduce",
    "fold",
    "gather_one_by_one",
    "gather_tree",
    "halves",
    "halving_reduce_scatter",
    "one_by_one_reduce",
    "pairwise_all_to_all",
    "pairwise_reduce_scatter",
    "rabenseifner_reduce",
    "ring_all_gather",
    "ring_reduce_scatter",
    "shift",
    "switch_reduce",
    "tree_reduce",
    "two_level_all_reduce",
]


def fold(ranks: int) -> tuple[Rounds, int]:
    """Return the round in which ranks beyond the largest power of two q add their vectors to others', and q.

    The vector has q chunks. Rank q + i hands over to rank i and has nothing more to do until the end.
    """
    core = 1 << (ranks.bit_length() - 1)
    if core == ranks:
        return [], core
    return [[Send(rank, rank - core, 0, add=True, width=core) for rank in range(core, ranks)]], core


def halves(ranks: int) -> Rounds:
    """Return the rounds of recursive halving: a reduce-scatter of `ranks` chunks, `ranks` being a power of two.

    At distance d each rank keeps the half of its chunks in which its own is, and sends the other one to its
    partner d away, who adds it.
    """
    rounds, apart = [], ranks // 2
    while apart:
        rounds.append(
            [
                Send(rank, rank ^ apart, (rank ^ apart) // apart * apart, add=True, width=apart)
                for rank in range(ranks)
            ]
        )
        apart //= 2
    return rounds


def doubling_all_reduce(ranks: int) -> Rounds:
    """Return the rounds of recursive doubling: whole vectors are exchanged and added 1, 2, 4 … apart; one chunk."""
    core = 1 << (ranks.bit_length() - 1)
    before = [[Send(rank, rank - core, 0, add=True) for rank in range(core, ranks)]]
    after = [[Send(rank - core, rank, 0) for rank in range(core, ranks)]]
    exchanges = [
        [Send(rank, rank ^ (1 << k), 0, add=True) for rank in range(core)]
        for k in range(core.bit_length() - 1)
    ]
    return [*before, *exchanges, *after] if core < ranks else exchanges


def halving_reduce_scatter(ranks: int) -> Rounds:
    """Return the rounds of a reduce-scatter by recursive halving, for any number of ranks; a chunk for each rank.

    Beyond a power of two q, each of the first p − q pairs of neighbours acts as one: the odd one hands its vector
    to the even one, and gets its own chunk from it at the end.
    """
    core = 1 << (ranks.bit_length() - 1)
    pairs = ranks - core
    first = [
        2 * v if v < pairs else v + pairs for v in range(core + 1)
    ]  # chunk and rank where the v-th actor begins
    before = [[Send(2 * v + 1, 2 * v, 0, add=True, width=ranks) for v in range(pairs)]]
    after = [[Send(2 * v, 2 * v + 1, 2 * v + 1) for v in range(pairs)]]
    rounds: Rounds = []
    for sends in halves(core):
        rounds.append([])
        for send in sends:
            begin, end = first[send.chunk], first[send.chunk + send.width]
            rounds[-1].append(Send(first[send.src], first[send.dst], begin, add=True, width=end - begin))
    return [*before, *rounds, *after] if pairs else rounds


def switch_reduce(ranks: int) -> Rounds:
    """Return the round in which all send their vectors to rank 0 at once; fast where rank 0 stands at the switch."""
    return [[Send(rank, 0, 0, add=True) for rank in range(1, ranks)]] if ranks > 1 else []


def two_level_all_reduce(ranks: int, per_node: int) -> tuple[Rounds, int]:
    """Return rounds and chunks of an all-reduce inside nodes, between nodes, and inside nodes again.

    The vector has as many slots as the smallest node has ranks, and each slot a chunk for each node. Inside every
    node, the rank at place j adds up slot j; then the ranks at place j of all nodes, one in each, complete slot j as
    a ring; then each of them gives it to the others of its node.

    Args:
        ranks: how many in all.
        per_node: ranks of a node; the last node may have fewer.
    """
    nodes = [list(range(first, min(first + per_node, ranks))) for first in range(0, ranks, per_node)]
    slots, width = min(map(len, nodes)), len(nodes)
    inside = [
        [
            Send(rank, node[slot], slot * width, add=True, width=width)
            for node in nodes
            for slot in range(slots)
            for rank in node
            if rank != node[slot]
        ]
    ]
    between = [
        [
            Send(nodes[send.src][slot], nodes[send.dst][slot], slot * width + send.chunk, send.add)
            for slot in range(slots)
            for send in sends
        ]
        for sends in [*ring_reduce_scatter(width), *ring_all_gather(width)]
    ]
    inside = inside if inside[0] else []
    return [*inside, *between, *mirrored(inside)], slots * width


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
