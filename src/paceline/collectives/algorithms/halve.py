"""Exchanging halves: recursive halving and doubling, for a power of two; and the folding of other numbers into one."""

from __future__ import annotations

from paceline.collectives.schedule import Rounds, Send

__all__ = ["doubling_all_reduce", "fold", "halves", "halving_reduce_scatter"]


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
