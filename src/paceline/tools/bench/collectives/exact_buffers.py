"""What a rank gives to an operation and gets from it, filled and checked element by element.

Numbers whose sum over ranks is exact in every dtype, so that a result can be held against what it must be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.tools.bench.collectives.bus_bandwidth import operation_of

__all__ = [
    "Allocate",
    "Buffers",
    "all_equal",
    "allocate",
    "fill",
    "is_right",
    "is_sum",
    "is_written",
    "write",
]

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
            write(chunk, rank + part)
    elif buffers.op == "all-to-all":
        for part, chunk in enumerate(buffers.given.chunk(ranks)):
            write(chunk, rank * ranks + part)
    else:
        write(buffers.given, rank)


def is_right(buffers: Buffers) -> bool:
    """Return whether every element of the output is what the operation must make of what `fill` wrote."""
    rank, ranks, taken = buffers.rank, buffers.ranks, buffers.taken
    match buffers.op:
        case "all-reduce":
            return is_sum(taken, ranks)
        case "reduce-scatter":
            return is_sum(taken, ranks, first=rank)
        case "broadcast":
            return is_written(taken, 0)
        case "send-recv":
            return is_written(taken, (rank - 1) % ranks)
        case "all-gather":
            return all(is_written(part, source) for source, part in enumerate(taken.chunk(ranks)))
    return all(  # all-to-all
        is_written(part, source * ranks + rank) for source, part in enumerate(taken.chunk(ranks))
    )


_PERIOD = 1009  # a prime: what ends up in a wrong place looks wrong


_SHORT_PERIODS = {torch.float16: 31, torch.bfloat16: 7}  # whole numbers are exact up to 2048 and 256


_BLOCK = 1024 * _PERIOD


def write(buffer: torch.Tensor, rank: int) -> None:
    """Write numbers that differ between places and ranks into a 1-D tensor."""
    pattern = _pattern(buffer)
    for part in buffer.split(len(pattern)):
        torch.add(pattern[: len(part)], rank, out=part)


def is_written(buffer: torch.Tensor, rank: int) -> bool:
    """Return whether every place holds what `rank` writes there."""
    return _is(buffer, _pattern(buffer) + rank)


def is_sum(buffer: torch.Tensor, ranks: int, first: int = 0) -> bool:
    """Return whether every place holds the sum of what `ranks` ranks, from `first` on, write there."""
    return _is(buffer, _pattern(buffer) * ranks + ranks * (2 * first + ranks - 1) // 2)


def all_equal(buffer: torch.Tensor, value: float) -> bool:
    """Return whether every place holds `value`, but for rounding."""
    least, most = (float(end) for end in buffer.aminmax())
    return abs(least - value) <= 1e-5 * abs(value) and abs(most - value) <= 1e-5 * abs(value)


def _pattern(buffer: torch.Tensor) -> torch.Tensor:
    """Return what rank 0 writes, as far as `buffer` needs it before it repeats."""
    period = _SHORT_PERIODS.get(buffer.dtype, _PERIOD)
    length = min(len(buffer), _BLOCK // period * period)
    return (torch.arange(length, device=buffer.device) % period).to(buffer.dtype)


def _is(buffer: torch.Tensor, expected: torch.Tensor) -> bool:
    return all(torch.equal(part, expected[: len(part)]) for part in buffer.split(len(expected)))
