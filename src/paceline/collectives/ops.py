"""What each operation starts from and has to achieve, chunk by chunk.

Inputs are counted: the content of a chunk is how often each rank's input is in it, written as one integer with
16 bits for each rank, so that adding two chunks is adding two integers and nothing can be counted twice unseen.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.collectives.schedule import Schedule, Send
from paceline.errors import unknown

__all__ = ["OPS", "ROOTED", "Contents", "at_start", "check_op", "counts", "input_of", "owner", "wanted"]

OPS = (
    "broadcast",
    "reduce",
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "scatter",
    "gather",
    "send-recv",
)
ROOTED = frozenset({"broadcast", "reduce", "scatter", "gather"})
_SUMS_FROM_ALL = frozenset({"reduce", "all-reduce", "reduce-scatter"})
_BITS = 16


def check_op(op: str) -> None:
    """Raise unless `op` is one.

    Raises:
        UsageError: it is not; the nearest one is suggested.
    """
    if op not in OPS:
        raise unknown("operation", op, OPS)


def input_of(rank: int) -> int:
    """Return the content of a chunk that holds the input of `rank`, once."""
    return 1 << (_BITS * rank)


def counts(content: int, ranks: int) -> list[int]:
    """Return how often each rank's input is in `content`.

    Example:
        >>> counts(input_of(0) + 2 * input_of(2), 3)
        [1, 0, 2]
    """
    return [content >> (_BITS * rank) & ((1 << _BITS) - 1) for rank in range(ranks)]


def owner(schedule: Schedule, chunk: int) -> int:
    """Return whose chunk it is: whose input (all-gather, gather, send-recv) or whose result (reduce-scatter, scatter).

    In an all-to-all a chunk goes from one rank to another; its owner is the one it comes from.
    """
    return chunk * schedule.ranks // schedule.chunks


def _addressee(schedule: Schedule, chunk: int) -> int:
    """Return to whom a chunk of an all-to-all goes."""
    return chunk * schedule.ranks**2 // schedule.chunks % schedule.ranks


def at_start(schedule: Schedule, rank: int, chunk: int) -> int:
    """Return what `rank` holds of `chunk` before the first round; 0: nothing."""
    if schedule.op in _SUMS_FROM_ALL:
        holds = True
    elif schedule.op in ("broadcast", "scatter"):
        holds = rank == schedule.root
    else:
        holds = rank == owner(schedule, chunk)
    return input_of(rank) if holds else 0


def wanted(schedule: Schedule, rank: int, chunk: int) -> int | None:
    """Return what `rank` has to hold of `chunk` after the last round; None: anything."""
    everything = sum(map(input_of, range(schedule.ranks)))
    mine = rank == schedule.root
    match schedule.op:
        case "broadcast":
            return input_of(schedule.root)
        case "reduce":
            return everything if mine else None
        case "all-reduce":
            return everything
        case "reduce-scatter":
            return everything if rank == owner(schedule, chunk) else None
        case "all-gather":
            return input_of(owner(schedule, chunk))
        case "scatter":
            return input_of(schedule.root) if rank == owner(schedule, chunk) else None
        case "gather":
            return input_of(owner(schedule, chunk)) if mine else None
        case "all-to-all":
            return input_of(owner(schedule, chunk)) if rank == _addressee(schedule, chunk) else None
        case "send-recv":
            source = (rank - 1) % schedule.ranks
            return input_of(source) if owner(schedule, chunk) == source else None
        case _:
            raise unknown("operation", schedule.op, OPS)


class Contents:
    """What every rank holds of every chunk while a schedule is carried out on counts of inputs.

    Attributes:
        held: ``held[rank][chunk]``.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.held = [
            [at_start(schedule, rank, chunk) for chunk in range(schedule.chunks)]
            for rank in range(schedule.ranks)
        ]

    def play(self, sends: Sequence[Send]) -> None:
        """Carry out a round."""
        before = {send.src: self.held[send.src].copy() for send in sends}
        for send in sends:
            for chunk in send.range:
                old = self.held[send.dst][chunk] if send.add else 0
                self.held[send.dst][chunk] = old + before[send.src][chunk]

    def missed(self, rank: int) -> list[int]:
        """Return the chunks of which `rank` does not hold what it shall hold at the end."""
        aims = [(chunk, wanted(self.schedule, rank, chunk)) for chunk in range(self.schedule.chunks)]
        return [chunk for chunk, aim in aims if aim is not None and aim != self.held[rank][chunk]]
