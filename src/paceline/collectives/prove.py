"""What each operation starts from and has to achieve, chunk by chunk.

Inputs are counted: the content of a chunk is how often each rank's input is in it, written as one integer with
16 bits for each rank, so that adding two chunks is adding two integers and nothing can be counted twice unseen.

Proof of a schedule: carried out on counts of inputs instead of numbers, every input arrives exactly once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from paceline.collectives.schedule import Schedule, Send
from paceline.errors import UsageError, unknown

__all__ = [
    "OPS",
    "ROOTED",
    "SymbolicBuffers",
    "at_start",
    "check_op",
    "counts",
    "flaws",
    "input_of",
    "owner",
    "prove",
    "wanted",
]

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


class SymbolicBuffers:
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


_SHOWN = 5


def prove(schedule: Schedule) -> None:
    """Raise unless `schedule` achieves its operation: every input in every result exactly once, on every rank.

    Raises:
        UsageError: it does not; the first flaws are named.
    """
    found = flaws(schedule)
    if found:
        more = f"\n  … and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise UsageError(
            f"{schedule} is wrong:" + "".join(f"\n  {flaw}" for flaw in found[:_SHOWN]) + more,
            remedy="correct the algorithm: the rounds before the first flaw are right",
        )


def flaws(schedule: Schedule) -> list[str]:
    """Return what is wrong with `schedule`, in the order in which it would happen; empty: it is proven.

    A flaw in a round ends the proof, since what follows would be about other numbers.
    """
    check_op(schedule.op)
    contents = SymbolicBuffers(schedule)
    for number, sends in enumerate(schedule.rounds):
        wrong = [*_impossible(schedule, sends)] or [*_empty(sends, contents.held)] or [*_races(sends)]
        if wrong:
            return [f"round {number + 1}: {what}" for what in wrong]
        contents.play(sends)
    return [*_missed(schedule, contents)]


def _impossible(schedule: Schedule, sends: tuple[Send, ...]) -> Iterator[str]:
    for send in sends:
        if not (0 <= send.src < schedule.ranks and 0 <= send.dst < schedule.ranks):
            yield f"{send.src}→{send.dst}: there are ranks 0 to {schedule.ranks - 1}"
        elif send.src == send.dst:
            yield f"rank {send.src} sends to itself"
        elif send.width < 1 or not 0 <= send.chunk <= schedule.chunks - send.width:
            yield f"{send.src}→{send.dst}: there are chunks 0 to {schedule.chunks - 1}, not {send.chunk}+{send.width}"


def _empty(sends: tuple[Send, ...], held: list[list[int]]) -> Iterator[str]:
    for send in sends:
        for chunk in send.range:
            if not held[send.src][chunk]:
                yield f"rank {send.src} sends chunk {chunk} to {send.dst} but has nothing in it"
            elif send.add and not held[send.dst][chunk]:
                yield f"chunk {chunk} from {send.src} is added to nothing on rank {send.dst}"


def _races(sends: tuple[Send, ...]) -> Iterator[str]:
    """Sends may meet in a chunk only if all are added: else the last one decides, and nobody knows which that is."""
    chunks = [(send.dst, chunk, send.add) for send in sends for chunk in send.range]
    writes = Counter((dst, chunk) for dst, chunk, _ in chunks)
    replaced = {(dst, chunk) for dst, chunk, add in chunks if not add}
    for (dst, chunk), times in writes.items():
        if times > 1 and (dst, chunk) in replaced:
            yield f"{times} sends meet in chunk {chunk} of rank {dst}"


def _missed(schedule: Schedule, contents: SymbolicBuffers) -> Iterator[str]:
    for rank in range(schedule.ranks):
        for chunk in contents.missed(rank):
            has = counts(contents.held[rank][chunk], schedule.ranks)
            due = counts(wanted(schedule, rank, chunk) or 0, schedule.ranks)
            wrong = [
                f"the input of {of} {times} times instead of {needed}"
                for of, (times, needed) in enumerate(zip(has, due, strict=True))
                if times != needed
            ]
            yield f"at the end chunk {chunk} of rank {rank} holds {', '.join(wrong)}"
