"""Proof of a schedule: carried out on counts of inputs instead of numbers, every input arrives exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from paceline.collectives.ops import Contents, check_op, counts, wanted
from paceline.collectives.schedule import Schedule, Send
from paceline.errors import UsageError

__all__ = ["flaws", "prove"]

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
    contents = Contents(schedule)
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


def _missed(schedule: Schedule, contents: Contents) -> Iterator[str]:
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
