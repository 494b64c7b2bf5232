"""All algorithms by operation and name: `schedule` makes one for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from paceline.collectives import algorithms
from paceline.collectives.prove import OPS, ROOTED, check_op
from paceline.collectives.schedule import Rounds, Schedule, mirrored, rotated
from paceline.errors import UsageError, unknown

__all__ = ["ALGORITHMS", "algorithms_of", "find_algorithm", "has_root", "schedule"]

Made = tuple[Rounds, int]  # rounds and the number of chunks


def _whole(rounds: Callable[[int], Rounds]) -> Callable[[int], Made]:
    """Let an algorithm send the whole vector as one chunk."""
    return lambda ranks: (rounds(ranks), 1)


def _shared(rounds: Callable[[int], Rounds]) -> Callable[[int], Made]:
    """Let an algorithm send a chunk for each rank."""
    return lambda ranks: (rounds(ranks), ranks)


def _squared(rounds: Callable[[int], Rounds]) -> Callable[[int], Made]:
    return lambda ranks: (rounds(ranks), ranks * ranks)


def _mirror(make: Callable[[int], Made]) -> Callable[[int], Made]:
    def made(ranks: int) -> Made:
        rounds, chunks = make(ranks)
        return mirrored(rounds), chunks

    return made


def _there_and_back(make: Callable[[int], Made]) -> Callable[[int], Made]:
    """Let a reduce or reduce-scatter be followed by its mirror image: together they are an all-reduce."""

    def made(ranks: int) -> Made:
        rounds, chunks = make(ranks)
        return [*rounds, *mirrored(rounds)], chunks

    return made


def _ring(ranks: int) -> Made:
    return [*algorithms.ring_reduce_scatter(ranks), *algorithms.ring_all_gather(ranks)], ranks


def _scatter_all_gather(ranks: int) -> Made:
    return [*mirrored(algorithms.gather_tree(ranks)), *algorithms.ring_all_gather(ranks)], ranks


def _halving(ranks: int) -> Made:
    folded, core = algorithms.fold(ranks)
    return [*folded, *algorithms.halves(core)], core


_REDUCE: dict[str, Callable[[int], Made]] = {
    "one-by-one": _whole(algorithms.one_by_one_reduce),
    "tree": _whole(algorithms.tree_reduce),
    "chain": _whole(algorithms.chain_reduce),
}
_REDUCE_SCATTER = {
    "ring": _shared(algorithms.ring_reduce_scatter),
    "pairwise": _shared(algorithms.pairwise_reduce_scatter),
    "halving": _shared(algorithms.halving_reduce_scatter),
}
_GATHER = {"one-by-one": _shared(algorithms.gather_one_by_one), "tree": _shared(algorithms.gather_tree)}

ALGORITHMS: dict[str, dict[str, Callable[[int], Made]]] = {
    "broadcast": {name: _mirror(make) for name, make in _REDUCE.items()}
    | {"scatter-all-gather": _scatter_all_gather},
    "reduce": _REDUCE | {"rabenseifner": algorithms.rabenseifner_reduce},
    "all-reduce": {
        "ring": _ring,
        "tree": _there_and_back(_REDUCE["tree"]),
        "doubling": _whole(algorithms.doubling_all_reduce),
        "halving-doubling": _there_and_back(_halving),
        "two-level": lambda ranks: algorithms.two_level_all_reduce(ranks, 2),
        "switch": _there_and_back(_whole(algorithms.switch_reduce)),
    },
    "reduce-scatter": _REDUCE_SCATTER,
    "all-gather": {
        "ring": _shared(algorithms.ring_all_gather),
        "doubling": _mirror(_REDUCE_SCATTER["halving"]),
        "bruck": _shared(algorithms.bruck_all_gather),
    },
    "all-to-all": {
        "pairwise": _squared(algorithms.pairwise_all_to_all),
        "direct": _squared(algorithms.direct_all_to_all),
    },
    "scatter": {name: _mirror(make) for name, make in _GATHER.items()},
    "gather": _GATHER,
    "send-recv": {"direct": _shared(algorithms.shift)},
}


def algorithms_of(op: str) -> list[str]:
    """Return the names of an operation's algorithms.

    Raises:
        UsageError: no such operation.
    """
    check_op(op)
    return list(ALGORITHMS[op])


def find_algorithm(name: str, op: str | None = None) -> tuple[str, str]:
    """Return the operation and the algorithm that `name` means.

    Args:
        name: an algorithm, such as ``"ring"``, or operation and algorithm: ``"all-gather/ring"``.
        op: the operation; None: the first one that has such an algorithm, all-reduce before the others.

    Raises:
        UsageError: there is none; the nearest name is suggested.

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
    """Return whether one rank is special: all of a rooted operation have one, and all-reduces with a centre."""
    return op in ROOTED or algorithm in ("tree", "switch")


@lru_cache(maxsize=256)
def schedule(op: str, algorithm: str, ranks: int, *, root: int = 0, per_node: int | None = None) -> Schedule:
    """Return the schedule of an algorithm.

    Args:
        op: such as ``"all-reduce"``.
        algorithm: such as ``"ring"``.
        ranks: how many take part, at least 1.
        root: whose vector is broadcast or scattered, who gets what is reduced or gathered; for the all-reduces
            that have a centre (tree, switch) that centre.
        per_node: of "two-level": ranks of a node; None: 2.

    Raises:
        UsageError: no such operation or algorithm, no such root, fewer than one rank.

    Example:
        >>> len(schedule("all-reduce", "ring", 4).rounds)
        6
    """
    find_algorithm(algorithm, op)
    if ranks < 1:
        raise UsageError(f"ranks={ranks}: a collective has at least one rank", remedy="give 1 or more")
    if not 0 <= root < ranks:
        raise UsageError(f"root={root}: there are ranks 0 to {ranks - 1}", remedy="name one of them")
    if root and not has_root(op, algorithm):
        raise UsageError(f"root={root}, but {op} by {algorithm} has none", remedy="leave it out")
    if per_node is not None and algorithm != "two-level":
        raise UsageError(f"per_node={per_node} is for two-level only, not {algorithm}", remedy="leave it out")
    if per_node is not None and per_node < 1:
        raise UsageError(f"per_node={per_node}: a node has at least one rank", remedy="give 1 or more")
    if per_node is not None:
        rounds, chunks = algorithms.two_level_all_reduce(ranks, per_node)
    else:
        rounds, chunks = ALGORITHMS[op][algorithm](ranks)
    if root:
        rounds = rotated(rounds, root, ranks, chunks=op in ("scatter", "gather"))
    return Schedule(op, algorithm, ranks, chunks, tuple(map(tuple, rounds)), root)
