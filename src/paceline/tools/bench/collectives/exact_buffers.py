"""Inputs and outputs of collectives, filled and checked element by element.

The numbers have exact sums over ranks in every dtype, so that a result can be compared with the right one exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.tools.bench.collectives.bus_bandwidth import find_operation

__all__ = [
    "Allocate",
    "ExactBuffers",
    "all_equal",
    "allocate_buffers",
    "fill_input",
    "holds_pattern",
    "holds_sum",
    "output_is_right",
    "write_pattern",
]

Allocate = Callable[[int], Tensor]
"""Returns a 1-D tensor with that number of elements."""

_PERIOD = 1009  # a prime, so that misplaced numbers look wrong
_SHORT_PERIODS = {torch.float16: 31, torch.bfloat16: 7}  # whole numbers are exact up to 2048 and 256
_BLOCK = 1024 * _PERIOD


@dataclass(frozen=True)
class ExactBuffers:
    """A rank's 1-D tensors for one operation; in place, `input` and `output` are the same, or one is part of the other.

    Attributes:
        op: the operation's name.
        rank: of this process.
        ranks: number of ranks.
        input: read by the operation.
        output: written by it.
    """

    op: str
    rank: int
    ranks: int
    input: Tensor
    output: Tensor


def allocate_buffers(
    op: str, rank: int, ranks: int, numel: int, new: Allocate, *, in_place: bool = False
) -> ExactBuffers:
    """Return the buffers of an operation, each element of which has been written once.

    Args:
        op: the operation's name.
        rank: of this process.
        ranks: number of ranks.
        numel: elements of S (see `bus_bandwidth`), a multiple of `ranks` if S consists of parts.
        new: allocates a tensor.
        in_place: a rank's own part of an all-gather or reduce-scatter lies in the buffer of all parts.
    """
    whole = new(numel).zero_()
    if find_operation(op).buffers(ranks) == 1:
        return ExactBuffers(op, rank, ranks, whole, whole)
    if op not in ("all-gather", "reduce-scatter"):
        return ExactBuffers(op, rank, ranks, whole, new(numel).zero_())
    part = whole.chunk(ranks)[rank] if in_place else new(numel // ranks).zero_()
    return ExactBuffers(op, rank, ranks, *((part, whole) if op == "all-gather" else (whole, part)))


def fill_input(buffers: ExactBuffers) -> None:
    """Write numbers that differ between ranks, parts and positions into the input, and none of them into the output."""
    rank, ranks = buffers.rank, buffers.ranks
    if buffers.output is not buffers.input:
        buffers.output.fill_(-1)
    if buffers.op in ("reduce-scatter", "all-to-all"):
        first = rank if buffers.op == "reduce-scatter" else rank * ranks
        for part, chunk in enumerate(buffers.input.chunk(ranks)):
            write_pattern(chunk, first + part)
    else:
        write_pattern(buffers.input, rank)


def output_is_right(buffers: ExactBuffers) -> bool:
    """Return whether every element of the output is the operation's result for the input of `fill_input`."""
    rank, ranks, output = buffers.rank, buffers.ranks, buffers.output
    match buffers.op:
        case "all-reduce":
            return holds_sum(output, ranks)
        case "reduce-scatter":
            return holds_sum(output, ranks, first=rank)
        case "broadcast":
            return holds_pattern(output, 0)
        case "send-recv":
            return holds_pattern(output, (rank - 1) % ranks)
        case "all-gather":
            return all(holds_pattern(part, source) for source, part in enumerate(output.chunk(ranks)))
    return all(  # all-to-all
        holds_pattern(part, source * ranks + rank) for source, part in enumerate(output.chunk(ranks))
    )


def write_pattern(buffer: Tensor, rank: int) -> None:
    """Write numbers that differ between positions and ranks into a 1-D tensor."""
    pattern = _pattern(buffer)
    for part in buffer.split(len(pattern)):
        torch.add(pattern[: len(part)], rank, out=part)


def holds_pattern(buffer: Tensor, rank: int) -> bool:
    """Return whether every element is the one that `write_pattern` writes for `rank`."""
    return _repeats(buffer, _pattern(buffer) + rank)


def holds_sum(buffer: Tensor, ranks: int, first: int = 0) -> bool:
    """Return whether every element is the sum of the patterns of `ranks` ranks, starting with `first`."""
    return _repeats(buffer, _pattern(buffer) * ranks + ranks * (2 * first + ranks - 1) // 2)


def all_equal(buffer: Tensor, value: float) -> bool:
    """Return whether every element is `value`, up to rounding."""
    least, most = (float(end) for end in buffer.aminmax())
    return abs(least - value) <= 1e-5 * abs(value) and abs(most - value) <= 1e-5 * abs(value)


def _pattern(buffer: Tensor) -> Tensor:
    """Return the pattern of rank 0, up to the length of `buffer` or a multiple of its period."""
    period = _SHORT_PERIODS.get(buffer.dtype, _PERIOD)
    length = min(len(buffer), _BLOCK // period * period)
    return (torch.arange(length, device=buffer.device) % period).to(buffer.dtype)


def _repeats(buffer: Tensor, expected: Tensor) -> bool:
    return all(torch.equal(part, expected[: len(part)]) for part in buffer.split(len(expected)))
