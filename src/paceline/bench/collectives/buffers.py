"""What a rank gives to an operation and gets from it, filled and checked element by element."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from paceline.bench import exact
from paceline.bench.collectives.operations import operation_of

__all__ = ["Allocate", "Buffers", "allocate", "fill", "is_right"]

Allocate = Callable[[int], Tensor]
"""Returns a 1-D tensor of so many elements."""


@dataclass(frozen=True)
class Buffers:
    """A rank's 1-D tensors for one operation; where it works in place, the same one twice, or one a part of the other.

    Attributes:
        op: the operation's name. rank, ranks: the place of this process.
        given: what it reads.
        taken: what it writes.
    """

    op: str
    rank: int
    ranks: int
    given: Tensor
    taken: Tensor


def allocate(op: str, rank: int, ranks: int, numel: int, new: Allocate, *, in_place: bool = False) -> Buffers:
    """Return buffers of an operation whose S holds `numel` elements, each of them written once.

    Args:
        op: its name.
        rank, ranks: the place of this process.
        numel: elements of S, a multiple of `ranks` where S is made of parts.
        new: allocates a tensor.
        in_place: a rank's own part of an all-gather or reduce-scatter lies in the buffer of all parts.
    """
    whole = new(numel).zero_()
    if operation_of(op).buffers(ranks) == 1:
        return Buffers(op, rank, ranks, whole, whole)
    if op not in ("all-gather", "reduce-scatter"):
        return Buffers(op, rank, ranks, whole, new(numel).zero_())
    part = whole.chunk(ranks)[rank] if in_place else new(numel // ranks).zero_()
    given, taken = (part, whole) if op == "all-gather" else (whole, part)
    return Buffers(op, rank, ranks, given, taken)


def fill(buffers: Buffers) -> None:
    """Write numbers that tell ranks, parts and places apart into the input, and none of them into the output."""
    rank, ranks = buffers.rank, buffers.ranks
    if buffers.taken is not buffers.given:
        buffers.taken.fill_(-1)
    if buffers.op == "reduce-scatter":
        for part, chunk in enumerate(buffers.given.chunk(ranks)):
            exact.write(chunk, rank + part)
    elif buffers.op == "all-to-all":
        for part, chunk in enumerate(buffers.given.chunk(ranks)):
            exact.write(chunk, rank * ranks + part)
    else:
        exact.write(buffers.given, rank)


def is_right(buffers: Buffers) -> bool:
    """Return whether every element of the output is what the operation must make of what `fill` wrote."""
    rank, ranks, taken = buffers.rank, buffers.ranks, buffers.taken
    match buffers.op:
        case "all-reduce":
            return exact.is_sum(taken, ranks)
        case "reduce-scatter":
            return exact.is_sum(taken, ranks, first=rank)
        case "broadcast":
            return exact.is_written(taken, 0)
        case "send-recv":
            return exact.is_written(taken, (rank - 1) % ranks)
        case "all-gather":
            return all(exact.is_written(part, source) for source, part in enumerate(taken.chunk(ranks)))
    return all(  # all-to-all
        exact.is_written(part, source * ranks + rank) for source, part in enumerate(taken.chunk(ranks))
    )
