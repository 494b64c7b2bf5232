"""Reducing slices that a rank sees of all ranks of its host, into every one of them.

Block by block, so that what was just reduced is written out while it is in the core's cache. For sums and means
of plain numbers the blocks are numpy's: a call of it costs a fraction of one of torch's, and its copies are plain
ones of memory, together a tenth of the time. The additions, and their order, are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from paceline.backends.reduction import BLOCK_NBYTES, Reduction, Scratch, blocks

__all__ = ["reduce_everywhere"]

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
