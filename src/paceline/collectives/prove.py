"""Proof that a schedule achieves its operation: executed on counts of inputs, every input arrives exactly once.

The content of a chunk is how often each rank's input is in it, as one integer with 16 bits per rank. Adding two
chunks is adding two integers, so nothing can be counted twice unnoticed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from paceline.collectives.schedule import Schedule, Send
from paceline.errors import UsageError, unknown

__all__ = ["OPS", "ROOTED", "SymbolicBuffers", "check_op", "counts", "find_flaws", "input_of", "prove"]

_FROM_TO = {
    "broadcast": ("root", "all"),
    "reduce": ("all", "root"),
    "all-reduce": ("all", "all"),
    "reduce-scatter": ("all", "owner"),
    "all-gather": ("owner", "all"),
    "all-to-all": ("owner", "addressee"),
    "scatter": ("root", "owner"),
    "gather": ("owner", "root"),
    "send-recv": ("owner", "successor"),
}
"""Per operation: the ranks that hold a chunk at the start, and those that need it at the end; from "all", the sum."""

OPS = tuple(_FROM_TO)
ROOTED = frozenset(op for op, roles in _FROM_TO.items() if "root" in roles)

_BITS = 16
_FLAWS_SHOWN = 5


def check_op(op: str) -> None:
    """Raise UsageError, with the nearest valid name, unless `op` is an operation."""
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


def _rank_of(role: str, schedule: Schedule, chunk: int) -> int | None:
    """Return the rank with this role for a chunk; None: every rank."""
    owner = chunk * schedule.ranks // schedule.chunks
    match role:
        case "all":
            return None
        case "root":
            return schedule.root
        case "addressee":
            return chunk * schedule.ranks**2 // schedule.chunks % schedule.ranks
        case "successor":
            return (owner + 1) % schedule.ranks
    return owner


class SymbolicBuffers:
    """Content of every rank's chunks while a schedule is executed on counts of inputs.

    Attributes:
        held: ``held[rank][chunk]``; 0: nothing.
        required: ``required[rank]``: content required at the end, by chunk; other chunks may hold anything.
    """

    def __init__(self, schedule: Schedule) -> None:
        ranks, (source, target) = range(schedule.ranks), _FROM_TO[schedule.op]
        everything = sum(map(input_of, ranks))
        self.schedule = schedule
        self.held = [[0] * schedule.chunks for _ in ranks]
        self.required: list[dict[int, int]] = [{} for _ in ranks]
        for chunk in range(schedule.chunks):
            holder, receiver = _rank_of(source, schedule, chunk), _rank_of(target, schedule, chunk)
            for rank in ranks if holder is None else [holder]:
                self.held[rank][chunk] = input_of(rank)
            for rank in ranks if receiver is None else [receiver]:
                self.required[rank][chunk] = everything if holder is None else input_of(holder)

    def run_round(self, sends: Sequence[Send]) -> None:
        """Carry out a round."""
        before = {send.src: self.held[send.src].copy() for send in sends}
        for send in sends:
            for chunk in send.range:
                old = self.held[send.dst][chunk] if send.add else 0
                self.held[send.dst][chunk] = old + before[send.src][chunk]

    def missing(self, rank: int) -> list[int]:
        """Return the chunks whose content on `rank` differs from the required one."""
        return [chunk for chunk, content in self.required[rank].items() if self.held[rank][chunk] != content]


def prove(schedule: Schedule) -> None:
    """Raise unless `schedule` achieves its operation: every input in every result exactly once, on every rank.

    Raises:
        UsageError: it does not; names the first flaws.
    """
    found = find_flaws(schedule)
    if found:
        more = f"\n  … and {len(found) - _FLAWS_SHOWN} more" if len(found) > _FLAWS_SHOWN else ""
        raise UsageError(
            f"{schedule} is wrong:" + "".join(f"\n  {flaw}" for flaw in found[:_FLAWS_SHOWN]) + more,
            remedy="correct the algorithm: the rounds before the first flaw are right",
        )


def find_flaws(schedule: Schedule) -> list[str]:
    """Return the flaws of `schedule`, in order; empty: it is proven.

    A flaw in a round ends the proof, since later rounds would start from wrong contents.
    """
    check_op(schedule.op)
    buffers = SymbolicBuffers(schedule)
    for number, sends in enumerate(schedule.rounds):
        flaws = [*_out_of_range(schedule, sends)] or [*_empty(sends, buffers.held)] or [*_races(sends)]
        if flaws:
            return [f"round {number + 1}: {flaw}" for flaw in flaws]
        buffers.run_round(sends)
    return [*_wrong_results(buffers)]


def _out_of_range(schedule: Schedule, sends: tuple[Send, ...]) -> Iterator[str]:
    for send in sends:
        if not (0 <= send.src < schedule.ranks and 0 <= send.dst < schedule.ranks):
            yield f"{send.src}→{send.dst}: valid are ranks 0 to {schedule.ranks - 1}"
        elif send.src == send.dst:
            yield f"rank {send.src} sends to itself"
        elif send.width < 1 or not 0 <= send.chunk <= schedule.chunks - send.width:
            valid = f"valid are chunks 0 to {schedule.chunks - 1}"
            yield f"{send.src}→{send.dst}: {valid}, not {send.chunk}+{send.width}"


def _empty(sends: tuple[Send, ...], held: list[list[int]]) -> Iterator[str]:
    for send in sends:
        for chunk in send.range:
            if not held[send.src][chunk]:
                yield f"rank {send.src} sends chunk {chunk} to {send.dst} but holds nothing in it"
            elif send.add and not held[send.dst][chunk]:
                yield f"chunk {chunk} from {send.src} is added to nothing on rank {send.dst}"


def _races(sends: tuple[Send, ...]) -> Iterator[str]:
    """Several sends may write a chunk only if all are added: otherwise the result depends on their order."""
    chunks = [(send.dst, chunk, send.add) for send in sends for chunk in send.range]
    writes = Counter((dst, chunk) for dst, chunk, _ in chunks)
    replaced = {(dst, chunk) for dst, chunk, add in chunks if not add}
    for (dst, chunk), times in writes.items():
        if times > 1 and (dst, chunk) in replaced:
            yield f"{times} sends write chunk {chunk} of rank {dst}"


def _wrong_results(buffers: SymbolicBuffers) -> Iterator[str]:
    ranks = buffers.schedule.ranks
    for rank in range(ranks):
        for chunk in buffers.missing(rank):
            held = counts(buffers.held[rank][chunk], ranks)
            required = counts(buffers.required[rank][chunk], ranks)
            wrong = [
                f"the input of {source} {times} times instead of {needed}"
                for source, (times, needed) in enumerate(zip(held, required, strict=True))
                if times != needed
            ]
            yield f"at the end chunk {chunk} of rank {rank} holds {', '.join(wrong)}"
