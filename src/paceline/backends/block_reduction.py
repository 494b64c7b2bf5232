"""Reducing blocks of memory in rank order: the arithmetic of a collective, without its communication.

Every element is combined as ((x₀ ∘ x₁) ∘ x₂) ∘ … over the ranks, however the buffer was cut: so a result
is the same to the bit for any bucket size, any strategy and every run. Sums of 16-bit floats of more than
two ranks are accumulated in float32 and rounded once.

Reducing slices that a rank sees of all ranks of its host, into every one of them.

Block by block, so that what was just reduced is written out while it is in the core's cache. For sums and means
of plain numbers the blocks are numpy's: a call of it costs a fraction of one of torch's, and its copies are plain
ones of memory, together a tenth of the time. The additions, and their order, are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from paceline.errors import UsageError

__all__ = ["BLOCK_NBYTES", "Reduction", "Scratch", "blocks", "divide", "reduce_everywhere", "reduction_of"]

BLOCK_NBYTES = 256 << 10
"""Work is cut into blocks that stay in a core's cache between being written and being read again."""


def _multiply_complex(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Multiply by the definition: torch's own product rounds the last few elements in another way than the rest."""
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


NAMES = tuple(_COMBINE)


_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


_COMPLEX = (torch.complex64, torch.complex128)


_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


_DTYPES = {
    **dict.fromkeys(("SUM", "PRODUCT"), (*_FLOATS, *_COMPLEX, *_WHOLE, torch.bool)),
    "AVG": (*_FLOATS, *_COMPLEX),
    **dict.fromkeys(("MIN", "MAX"), (*_FLOATS, *_WHOLE, torch.bool)),
    **dict.fromkeys(("BAND", "BOR", "BXOR"), (*_WHOLE, torch.bool)),
}


class Scratch:
    """Reused working memory of one thread, a block per dtype."""

    def __init__(self) -> None:
        self._held: dict[torch.dtype, torch.Tensor] = {}

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `numel` elements of whatever was there."""
        held = self._held.get(dtype)
        if held is None or held.numel() < numel:
            held = self._held[dtype] = torch.empty(numel, dtype=dtype)
        return held[:numel]


@dataclass(frozen=True)
class Reduction:
    """How the elements of several ranks become one.

    Attributes:
        name: as in ``torch.distributed.ReduceOp``.
        combine: ``combine(a, b, out=c)``.
        wide: accumulate in float32 and round once.
    """

    name: str
    combine: Callable[..., torch.Tensor]
    wide: bool

    def __call__(
        self, inputs: Sequence[torch.Tensor], out: torch.Tensor, own: int, scratch: Scratch, ranks: int
    ) -> None:
        """Reduce one block.

        Args:
            inputs: the block of every rank, in rank order.
            out: where the result goes; may be ``inputs[own]``, and overlaps no other input.
            own: the first of `inputs` that may be overwritten; 0 if `out` is none of them.
            scratch: working memory.
            ranks: what a mean is divided by.
        """
        if len(inputs) == 1:
            if out.data_ptr() != inputs[0].data_ptr():
                out.copy_(inputs[0])
        elif self.wide and len(inputs) > 2:
            self._accumulate_wide(inputs, out, scratch, ranks)
            return
        else:
            total = inputs[0]
            for index, block in enumerate(inputs[1:], 1):
                target = out if index >= own else scratch.take(out.numel(), out.dtype)
                total = self.combine(total, block, out=target)
        if self.name == "AVG":
            divide(out, ranks)

    def as_sum(self) -> Reduction:
        """Return the reduction before the division: a mean's sum, any other itself."""
        return replace(self, name="SUM") if self.name == "AVG" else self

    def _accumulate_wide(
        self, inputs: Sequence[torch.Tensor], out: torch.Tensor, scratch: Scratch, ranks: int
    ) -> None:
        total = scratch.take(out.numel(), torch.float32)
        total.copy_(inputs[0])
        for block in inputs[1:]:
            self.combine(total, block, out=total)
        if self.name == "AVG":
            total.div_(ranks)
        out.copy_(total)


def reduction_of(op: dist.ReduceOp | dist.ReduceOp.RedOpType, dtype: torch.dtype) -> Reduction:
    """Return the reduction that `op` means for `dtype`.

    Raises:
        UsageError: there is none.
    """
    return _reduction(getattr(op, "op", op), dtype)


@functools.cache
def _reduction(kind: dist.ReduceOp.RedOpType, dtype: torch.dtype) -> Reduction:
    name = next((name for name in NAMES if kind == getattr(dist.ReduceOp, name)), None)
    if name is None:
        raise UsageError(
            f"Paceline's backends have no reduction {kind}; valid: {', '.join(NAMES)}",
            remedy="scale the tensor yourself and use SUM" if "PREMUL" in str(kind) else "",
        )
    if dtype not in _DTYPES[name]:
        known = ", ".join(str(each).removeprefix("torch.") for each in _DTYPES[name])
        raise UsageError(f"{name} is not defined for {dtype}; valid: {known}")
    low = dtype in (torch.float16, torch.bfloat16)
    combine = _multiply_complex if name == "PRODUCT" and dtype in _COMPLEX else _COMBINE[name]
    return Reduction(name, combine, wide=low and name in ("SUM", "AVG", "PRODUCT"))


def divide(tensor: torch.Tensor, ranks: int) -> None:
    """Make a mean of a sum; torch rounds the quotients of complex numbers more than once."""
    (torch.view_as_real(tensor) if tensor.is_complex() else tensor).div_(ranks)


def blocks(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Cut 1-D tensors of one length into blocks, in step."""
    numel = BLOCK_NBYTES // tensors[0].element_size()
    if tensors[0].numel() <= numel:
        return iter([tuple(tensors)])
    return zip(*(tensor.split(numel) for tensor in tensors), strict=True)


_SUMMED_BY_NUMPY = (torch.float32, torch.float64, torch.int32, torch.int64)


def reduce_everywhere(
    slices: Sequence[torch.Tensor],
    own: int,
    how: Reduction,
    scratch: Scratch,
    ranks: int,
    before_writing: Callable[[], None],
) -> None:
    """Reduce one slice per rank into all of them.

    Args:
        slices: contiguous, 1-D, of one length, in rank order. own: which of them is this rank's.
        how: the reduction. scratch: working memory. ranks: what a mean is divided by.
        before_writing: called before each block is written into the others' slices; may raise.
    """
    if how.name in ("SUM", "AVG") and slices[0].dtype in _SUMMED_BY_NUMPY:
        _sum_arrays([each.numpy() for each in slices], own, ranks if how.name == "AVG" else 1, before_writing)
        return
    for block in blocks(slices):
        how(block, block[own], own, scratch, ranks)
        before_writing()
        for rank, other in enumerate(block):
            if rank != own:
                other.copy_(block[own])


def _sum_arrays(
    slices: Sequence[np.ndarray], own: int, divisor: int, before_writing: Callable[[], None]
) -> None:
    step = BLOCK_NBYTES // slices[0].itemsize
    spare = np.empty(step if own > 1 else 0, slices[0].dtype)
    for low in range(0, len(slices[0]), step):
        block = [each[low : low + step] for each in slices]
        total, mine = block[0], block[own]
        for index in range(1, len(block)):
            place = mine if index >= own else spare[: len(mine)]  # before, the own addend is still needed
            total = np.add(total, block[index], out=place)
        if divisor > 1:
            np.divide(mine, divisor, out=mine)
        before_writing()
        for rank, other in enumerate(block):
            if rank != own:
                np.copyto(other, mine)
