"""The algorithms of every collective operation, as functions from a number of ranks to a schedule.

An algorithm's mirror image (`mirrored`) undoes it: that of a reduce is a broadcast, that of a gather a scatter, and
that of a reduce-scatter an all-gather. A reduction followed by its mirror image is an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from paceline.collectives.prove import OPS, ROOTED, check_op
from paceline.collectives.schedule import Rounds, Schedule, Send, mirrored, rotated
from paceline.errors import UsageError, unknown

__all__ = ["ALGORITHMS", "algorithms_of", "find_algorithm", "has_root", "make_schedule"]

Cut = tuple[Rounds, int]  # rounds, and the number of chunks that the vector is cut into
Algorithm = Callable[[int], Cut]


# To rank 0.


def _one_by_one_reduce(ranks: int) -> Rounds:
    """Every other rank in turn sends its vector to rank 0."""
    return [[Send(rank, 0, 0, add=True)] for rank in range(1, ranks)]


def _chain_reduce(ranks: int) -> Rounds:
    """The last rank sends to the one before it, which adds and sends on, down to rank 0."""
    return [[Send(rank, rank - 1, 0, add=True)] for rank in reversed(range(1, ranks))]


def _tree_reduce(ranks: int) -> Rounds:
    """Binomial tree: adjacent ranks first, then those at distance 2, 4, 8 …"""
    return [
        [Send(rank + distance, rank, 0, add=True) for rank in range(0, ranks - distance, 2 * distance)]
        for distance in _powers_of_two(ranks)
    ]


def _switch_reduce(ranks: int) -> Rounds:
    """All ranks send to rank 0 at once; fast where rank 0 is attached to the switch itself."""
    return [[Send(rank, 0, 0, add=True) for rank in range(1, ranks)]] if ranks > 1 else []


def _rabenseifner_reduce(ranks: int) -> Cut:
    """Rabenseifner: reduce-scatter by recursive halving, then gather along a binomial tree."""
    rounds, core = _folded_halving(ranks)
    return [*rounds, *_tree_gather(core)], core


def _one_by_one_gather(ranks: int) -> Rounds:
    """Every other rank in turn sends its chunk to rank 0."""
    return [[Send(rank, 0, rank)] for rank in range(1, ranks)]


def _tree_gather(ranks: int) -> Rounds:
    """Binomial tree along which rank 0 collects chunk r of every rank r."""
    return [
        [
            Send(rank + distance, rank, rank + distance, width=min(distance, ranks - rank - distance))
            for rank in range(0, ranks - distance, 2 * distance)
        ]
        for distance in _powers_of_two(ranks)
    ]


def _powers_of_two(ranks: int) -> list[int]:
    """Return 1, 2, 4 … below `ranks`."""
    return [1 << k for k in range((ranks - 1).bit_length())]


# Recursive halving and doubling, for any number of ranks.


def _core_size(ranks: int) -> int:
    """Return the largest power of two that is at most `ranks`."""
    return 1 << (ranks.bit_length() - 1)


def _halving(ranks: int) -> Rounds:
    """Recursive halving for a power of two: a reduce-scatter of a chunk per rank.

    At distance d each rank keeps the half of its chunks that contains its own, and sends the other half to its
    partner at distance d, which adds it.
    """
    rounds, distance = [], ranks // 2
    while distance:
        rounds.append(
            [
                Send(
                    rank, rank ^ distance, (rank ^ distance) // distance * distance, add=True, width=distance
                )
                for rank in range(ranks)
            ]
        )
        distance //= 2
    return rounds


def _folded_halving(ranks: int) -> Cut:
    """Recursive halving among the q ranks of the largest power of two; q chunks.

    In a first round each rank q + i sends its vector to rank i; it takes no further part.
    """
    core = _core_size(ranks)
    fold = [[Send(rank, rank - core, 0, add=True, width=core) for rank in range(core, ranks)]]
    return [*(fold if core < ranks else []), *_halving(core)], core


def _doubling_all_reduce(ranks: int) -> Rounds:
    """Recursive doubling: whole vectors are exchanged and added at distance 1, 2, 4 …"""
    core = _core_size(ranks)
    before = [[Send(rank, rank - core, 0, add=True) for rank in range(core, ranks)]]
    after = [[Send(rank - core, rank, 0) for rank in range(core, ranks)]]
    exchanges = [
        [Send(rank, rank ^ (1 << k), 0, add=True) for rank in range(core)]
        for k in range(core.bit_length() - 1)
    ]
    return [*before, *exchanges, *after] if core < ranks else exchanges


def _halving_reduce_scatter(ranks: int) -> Rounds:
    """Reduce-scatter by recursive halving; a chunk per rank.

    Beyond a power of two q, each of the first p − q pairs of adjacent ranks acts as one: the odd rank sends its
    vector to the even one, and receives its own chunk back at the end.
    """
    core = _core_size(ranks)
    pairs = ranks - core
    first = [2 * v if v < pairs else v + pairs for v in range(core + 1)]  # rank and first chunk of actor v
    before = [[Send(2 * v + 1, 2 * v, 0, add=True, width=ranks) for v in range(pairs)]]
    after = [[Send(2 * v, 2 * v + 1, 2 * v + 1) for v in range(pairs)]]
    rounds: Rounds = []
    for sends in _halving(core):
        rounds.append([])
        for send in sends:
            begin, end = first[send.chunk], first[send.chunk + send.width]
            rounds[-1].append(Send(first[send.src], first[send.dst], begin, add=True, width=end - begin))
    return [*before, *rounds, *after] if pairs else rounds


# Around rings and between pairs.


def _ring_reduce_scatter(ranks: int) -> Rounds:
    """Each rank passes a partial sum to the next, and ends with chunk r complete."""
    return [
        [Send(rank, (rank + 1) % ranks, (rank - 1 - step) % ranks, add=True) for rank in range(ranks)]
        for step in range(ranks - 1)
    ]


def _ring_all_gather(ranks: int) -> Rounds:
    """Each rank passes on the chunk that it received last, beginning with its own chunk r."""
    return [
        [Send(rank, (rank + 1) % ranks, (rank - step) % ranks) for rank in range(ranks)]
        for step in range(ranks - 1)
    ]


def _pairwise_reduce_scatter(ranks: int) -> Rounds:
    """In round k each rank sends the rank at distance k that rank's chunk."""
    return [
        [Send(rank, (rank + k) % ranks, (rank + k) % ranks, add=True) for rank in range(ranks)]
        for k in range(1, ranks)
    ]


def _bruck_all_gather(ranks: int) -> Rounds:
    """Bruck: the number of chunks that each rank holds doubles every round, for any number of ranks."""
    rounds: Rounds = []
    for held in _powers_of_two(ranks):
        count = min(held, ranks - held)
        rounds.append(
            [send for rank in range(ranks) for send in _wrapped(rank, (rank - held) % ranks, count, ranks)]
        )
    return rounds


def _wrapped(src: int, dst: int, count: int, ranks: int) -> list[Send]:
    """Return the sends of `count` chunks from number `src` on, past the last to the first."""
    until_end = min(count, ranks - src)
    sends = [Send(src, dst, src, width=until_end)]
    if count > until_end:
        sends.append(Send(src, dst, 0, width=count - until_end))
    return sends


def _pairwise_all_to_all(ranks: int) -> Rounds:
    """In round k each rank sends to the rank at distance k; chunk src·ranks + dst."""
    return [
        [Send(rank, (rank + k) % ranks, rank * ranks + (rank + k) % ranks) for rank in range(ranks)]
        for k in range(1, ranks)
    ]


def _direct_all_to_all(ranks: int) -> Rounds:
    """All ranks send to all others in one round."""
    sends = [send for sends in _pairwise_all_to_all(ranks) for send in sends]
    return [sends] if sends else []


def _shift(ranks: int) -> Rounds:
    """Each rank sends its chunk to the next."""
    return [[Send(rank, (rank + 1) % ranks, rank) for rank in range(ranks)]] if ranks > 1 else []


def _two_level_all_reduce(ranks: int, per_node: int = 2) -> Cut:
    """All-reduce inside nodes, between nodes, and inside nodes again; the last node may have fewer ranks.

    The vector has a slot for each rank of the smallest node, and each slot a chunk for each node. Inside every node,
    the j-th rank adds up slot j; the j-th ranks of all nodes complete slot j around a ring; then each of them sends
    it to the others of its node.
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
        for sends in [*_ring_reduce_scatter(width), *_ring_all_gather(width)]
    ]
    inside = inside if inside[0] else []
    return [*inside, *between, *mirrored(inside)], slots * width


# By operation and name.


def _cut(rounds: Callable[[int], Rounds], power: int) -> Algorithm:
    """Cut the vector into ranks**power chunks: 0, it travels whole; 1, a chunk per rank; 2, per pair of ranks."""
    return lambda ranks: (rounds(ranks), ranks**power)


def _mirror(algorithm: Algorithm) -> Algorithm:
    def mirror(ranks: int) -> Cut:
        rounds, chunks = algorithm(ranks)
        return mirrored(rounds), chunks

    return mirror


def _joined(first: Algorithm, second: Algorithm) -> Algorithm:
    """Let one algorithm be followed by another that cuts the vector alike."""

    def joined(ranks: int) -> Cut:
        rounds, chunks = first(ranks)
        return [*rounds, *second(ranks)[0]], chunks

    return joined


def _there_and_back(reduction: Algorithm) -> Algorithm:
    return _joined(reduction, _mirror(reduction))


_REDUCE: dict[str, Algorithm] = {
    "one-by-one": _cut(_one_by_one_reduce, 0),
    "tree": _cut(_tree_reduce, 0),
    "chain": _cut(_chain_reduce, 0),
}
_REDUCE_SCATTER = {
    "ring": _cut(_ring_reduce_scatter, 1),
    "pairwise": _cut(_pairwise_reduce_scatter, 1),
    "halving": _cut(_halving_reduce_scatter, 1),
}
_GATHER = {"one-by-one": _cut(_one_by_one_gather, 1), "tree": _cut(_tree_gather, 1)}
_SCATTER = {name: _mirror(gather) for name, gather in _GATHER.items()}
_RING_ALL_GATHER = _cut(_ring_all_gather, 1)

ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "broadcast": {name: _mirror(reduce) for name, reduce in _REDUCE.items()}
    | {"scatter-all-gather": _joined(_SCATTER["tree"], _RING_ALL_GATHER)},
    "reduce": _REDUCE | {"rabenseifner": _rabenseifner_reduce},
    "all-reduce": {
        "ring": _joined(_REDUCE_SCATTER["ring"], _RING_ALL_GATHER),
        "tree": _there_and_back(_REDUCE["tree"]),
        "doubling": _cut(_doubling_all_reduce, 0),
        "halving-doubling": _there_and_back(_folded_halving),
        "two-level": _two_level_all_reduce,
        "switch": _there_and_back(_cut(_switch_reduce, 0)),
    },
    "reduce-scatter": _REDUCE_SCATTER,
    "all-gather": {
        "ring": _RING_ALL_GATHER,
        "doubling": _mirror(_REDUCE_SCATTER["halving"]),
        "bruck": _cut(_bruck_all_gather, 1),
    },
    "all-to-all": {"pairwise": _cut(_pairwise_all_to_all, 2), "direct": _cut(_direct_all_to_all, 2)},
    "scatter": _SCATTER,
    "gather": _GATHER,
    "send-recv": {"direct": _cut(_shift, 1)},
}


def algorithms_of(op: str) -> list[str]:
    """Return the names of an operation's algorithms.

    Raises:
        UsageError: no such operation.
    """
    check_op(op)
    return list(ALGORITHMS[op])


def find_algorithm(name: str, op: str | None = None) -> tuple[str, str]:
    """Return the operation and the algorithm that a name refers to.

    Args:
        name: an algorithm, such as ``"ring"``, or operation and algorithm: ``"all-gather/ring"``.
        op: the operation; None: the first one with such an algorithm, all-reduce before the others.

    Raises:
        UsageError: unknown name; the nearest one is suggested.

    Example:
        >>> find_algorithm("ring"), find_algorithm("chain"), find_algorithm("all-gather/bruck")
        (('all-reduce', 'ring'), ('broadcast', 'chain'), ('all-gather', 'bruck'))
    """
    if "/" in name:
        op, _, name = name.partition("/")
    if op is not None:
        if name not in algorithms_of(op):
            raise unknown(f"algorithm of {op}", name, ALGORITHMS[op])
        return op, name
    for candidate in ("all-reduce", *OPS):
        if name in ALGORITHMS[candidate]:
            return candidate, name
    raise unknown("algorithm", name, dict.fromkeys(one for op in OPS for one in ALGORITHMS[op]))


def has_root(op: str, algorithm: str) -> bool:
    """Return whether one rank is special: the root of a rooted operation, or the centre of a tree or switch."""
    return op in ROOTED or algorithm in ("tree", "switch")


@lru_cache(maxsize=256)
def make_schedule(
    op: str, algorithm: str, ranks: int, *, root: int = 0, per_node: int | None = None
) -> Schedule:
    """Return the schedule of an algorithm for a number of ranks.

    Args:
        op: such as ``"all-reduce"``.
        algorithm: such as ``"ring"``.
        ranks: number of ranks, at least 1.
        root: the source of a broadcast or scatter, the destination of a reduce or gather, or the centre of an
            all-reduce by "tree" or "switch".
        per_node: ranks per node, for "two-level" only; None: 2.

    Raises:
        UsageError: unknown operation or algorithm, invalid root, or fewer than one rank.

    Example:
        >>> len(make_schedule("all-reduce", "ring", 4).rounds)
        6
    """
    find_algorithm(algorithm, op)
    if ranks < 1:
        raise UsageError(f"ranks={ranks}: a collective has at least one rank", remedy="give 1 or more")
    if not 0 <= root < ranks:
        raise UsageError(f"root={root}: valid are ranks 0 to {ranks - 1}", remedy="name one of them")
    if root and not has_root(op, algorithm):
        raise UsageError(f"root={root}, but {op} by {algorithm} has no root", remedy="leave it out")
    if per_node is not None and algorithm != "two-level":
        raise UsageError(f"per_node={per_node} is for two-level only, not {algorithm}", remedy="leave it out")
    if per_node is not None and per_node < 1:
        raise UsageError(f"per_node={per_node}: a node has at least one rank", remedy="give 1 or more")
    if per_node is not None:
        rounds, chunks = _two_level_all_reduce(ranks, per_node)
    else:
        rounds, chunks = ALGORITHMS[op][algorithm](ranks)
    if root:
        rounds = rotated(rounds, root, ranks, chunks=op in ("scatter", "gather"))
    return Schedule(op, algorithm, ranks, chunks, tuple(map(tuple, rounds)), root)
