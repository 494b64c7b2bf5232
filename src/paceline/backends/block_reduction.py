"""Reduction of memory blocks along a fixed tree: the arithmetic of a collective without its communication.

Every element is combined along the binary tree of `summation_tree` over the ranks, as (x₀ ∘ x₁) ∘ (x₂ ∘ x₃), however
the buffer was cut, so a result is equal to the bit for any bucket size, strategy and run. Sums of 16-bit floats of more
than two ranks are accumulated in float32 and rounded once.

`reduce_into_all` writes the result into the slice of every rank, block by block, while the reduced block is in the
core's cache. Sums and means of plain numbers use numpy there: a call costs a fraction of torch's, and its copies are
plain memory copies, together a tenth of the time. The additions, and their order, are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from paceline._core.summation_tree import split_point
from paceline.errors import UsageError

__all__ = [
    "BLOCK_NBYTES",
    "REDUCTION_NAMES",
    "VALID_DTYPES",
    "Reduction",
    "Scratch",
    "get_reduction",
    "reduce_into_all",
    "split_blocks",
]

BLOCK_NBYTES = 256 << 10
"""Size of the blocks that stay in a core's cache between being written and being read again."""


_Block = TypeVar("_Block", torch.Tensor, np.ndarray)


def _fold(
    combine: Callable[..., object],
    inputs: Sequence[_Block],
    target: _Block,
    own: int | None,
    spare: Callable[[int], _Block],
    depth: int = 0,
) -> _Block:
    """Combine blocks along the tree; return `target` with the result, or a single input itself.

    Args:
        combine: ``combine(a, b, out=c)``, by elements.
        inputs: the blocks.
        target: receives the result.
        own: the input whose memory `target` may be; None: it is none of them.
        spare: working memory by number.
        depth: the first number that is free.
    """
    if len(inputs) == 1:
        return inputs[0]
    middle = split_point(range(len(inputs)))
    if own is not None and own >= middle:
        free = spare(depth) if middle > 1 else target
        left = _fold(combine, inputs[:middle], free, None, spare, depth + 1)
        right = _fold(combine, inputs[middle:], target, own - middle, spare, depth + 1)
    else:
        left = _fold(combine, inputs[:middle], target, own, spare, depth)
        free = spare(depth) if len(inputs) - middle > 1 else target
        right = _fold(combine, inputs[middle:], free, None, spare, depth + 1)
    combine(left, right, out=target)
    return target


def _multiply_complex(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Multiply by the definition: torch's own product rounds the last few elements differently."""
    real = left.real * right.real - left.imag * right.imag
    imag = left.real * right.imag + left.imag * right.real
    out.real.copy_(real)
    out.imag.copy_(imag)
    return out


_COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
REDUCTION_NAMES = tuple(_COMBINE)

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_COMPLEX = (torch.complex64, torch.complex128)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_BY_NUMPY = (torch.float32, torch.float64, torch.int32, torch.int64)

VALID_DTYPES = {
    **dict.fromkeys(("SUM", "PRODUCT"), (*_FLOATS, *_COMPLEX, *_INTEGERS, torch.bool)),
    "AVG": (*_FLOATS, *_COMPLEX),
    **dict.fromkeys(("MIN", "MAX"), (*_FLOATS, *_INTEGERS, torch.bool)),
    **dict.fromkeys(("BAND", "BOR", "BXOR"), (*_INTEGERS, torch.bool)),
}


class Scratch:
    """Reused working memory of one thread, blocks per dtype."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    def take(self, numel: int, dtype: torch.dtype, number: int = 0) -> torch.Tensor:
        """Return `numel` uninitialised elements; the next call with this number returns the same memory."""
        block = self._blocks.get((dtype, number))
        if block is None or block.numel() < numel:
            block = self._blocks[dtype, number] = torch.empty(numel, dtype=dtype)
        return block[:numel]


@dataclass(frozen=True)
class Reduction:
    """Combination of the elements of several ranks into one.

    Attributes:
        name: as in ``torch.distributed.ReduceOp``.
        combine: ``combine(a, b, out=c)``.
        wide: accumulate in float32 and round once.
        divisor: number of ranks that a mean divides by; 1 for other reductions.
    """

    name: str
    combine: Callable[..., torch.Tensor]
    wide: bool
    divisor: int = 1

    def __call__(self, inputs: Sequence[torch.Tensor], out: torch.Tensor, own: int, scratch: Scratch) -> None:
        """Reduce one block.

        Args:
            inputs: the block of every rank, in rank order.
            out: receives the result; may be ``inputs[own]``, and overlaps no other input.
            own: first of `inputs` that may be overwritten; 0 if `out` is none of them.
            scratch: working memory.
        """
        if len(inputs) == 1:
            if out.data_ptr() != inputs[0].data_ptr():
                out.copy_(inputs[0])
        elif self.wide and len(inputs) > 2:
            total = scratch.take(out.numel(), torch.float32)

            def spare(number: int) -> torch.Tensor:
                return scratch.take(out.numel(), torch.float32, number + 1)

            _fold(self._combine_wide, inputs, total, None, spare)
            self.divide(total)
            out.copy_(total)
            return
        else:
            _fold(self.combine, inputs, out, own, lambda number: scratch.take(out.numel(), out.dtype, number))
        self.divide(out)

    def _combine_wide(self, left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> None:
        """Combine blocks of 16-bit floats, or float32 results of that, in float32."""
        self.combine(left if left.dtype == out.dtype else out.copy_(left), right, out=out)

    def divide(self, total: torch.Tensor) -> None:
        """Make a mean of its sum, in place. Complex numbers by parts: torch rounds their quotients more than once."""
        if self.divisor > 1:
            (torch.view_as_real(total) if total.is_complex() else total).div_(self.divisor)

    def as_sum(self) -> Reduction:
        """Return the reduction before the division: a mean's sum; any other itself."""
        return replace(self, name="SUM", divisor=1) if self.name == "AVG" else self


def get_reduction(op: dist.ReduceOp | dist.ReduceOp.RedOpType, dtype: torch.dtype, ranks: int) -> Reduction:
    """Return the reduction that `op` denotes for `dtype`; a mean divides by `ranks`.

    Raises:
        UsageError: it is not supported.
    """
    return _get_reduction(getattr(op, "op", op), dtype, ranks)


@functools.cache
def _get_reduction(kind: dist.ReduceOp.RedOpType, dtype: torch.dtype, ranks: int) -> Reduction:
    name = next((name for name in REDUCTION_NAMES if kind == getattr(dist.ReduceOp, name)), None)
    if name is None:
        raise UsageError(
            f"Paceline's backends have no reduction {kind}; valid: {', '.join(REDUCTION_NAMES)}",
            remedy="scale the tensor yourself and use SUM" if "PREMUL" in str(kind) else "",
        )
    if dtype not in VALID_DTYPES[name]:
        valid = ", ".join(str(each).removeprefix("torch.") for each in VALID_DTYPES[name])
        raise UsageError(f"{name} is not defined for {dtype}; valid: {valid}")
    wide = dtype in (torch.float16, torch.bfloat16) and name in ("SUM", "AVG", "PRODUCT")
    combine = _multiply_complex if name == "PRODUCT" and dtype in _COMPLEX else _COMBINE[name]
    return Reduction(name, combine, wide, ranks if name == "AVG" else 1)


def split_blocks(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Cut 1-D tensors of equal length into blocks, in step."""
    numel = BLOCK_NBYTES // tensors[0].element_size()
    if tensors[0].numel() <= numel:
        return iter([tuple(tensors)])
    return zip(*(tensor.split(numel) for tensor in tensors), strict=True)


def reduce_into_all(
    slices: Sequence[torch.Tensor],
    own: int,
    reduction: Reduction,
    scratch: Scratch,
    before_writing: Callable[[], None],
) -> None:
    """Reduce one slice per rank into all of them.

    Args:
        slices: contiguous, 1-D, of equal length, in rank order.
        own: index of this rank's slice.
        reduction: the reduction.
        scratch: working memory.
        before_writing: called before each block is written into the other slices; may raise.
    """
    if reduction.name in ("SUM", "AVG") and slices[0].dtype in _BY_NUMPY:
        _sum_arrays([each.numpy() for each in slices], own, reduction.divisor, before_writing)
        return
    for block in split_blocks(slices):
        reduction(block, block[own], own, scratch)
        before_writing()
        for rank, other in enumerate(block):
            if rank != own:
                other.copy_(block[own])


def _sum_arrays(
    slices: Sequence[np.ndarray], own: int, divisor: int, before_writing: Callable[[], None]
) -> None:
    step = BLOCK_NBYTES // slices[0].itemsize
    spares: list[np.ndarray] = []

    def spare(number: int) -> np.ndarray:
        while number >= len(spares):
            spares.append(np.empty(step, slices[0].dtype))
        return spares[number][: len(mine)]

    for low in range(0, len(slices[0]), step):
        block = [each[low : low + step] for each in slices]
        mine = block[own]
        _fold(np.add, block, mine, own, spare)
        if divisor > 1:
            np.divide(mine, divisor, out=mine)
        before_writing()
        for rank, other in enumerate(block):
            if rank != own:
                np.copyto(other, mine)
