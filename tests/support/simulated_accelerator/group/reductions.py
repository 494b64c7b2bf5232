"""Reductions over ranks, as NCCL does them: in the dtype of the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["check_reduction", "reduce"]

_PAIRWISE = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}


def check_reduction(op: Any) -> Any:
    """Return the kind of reduction that `op` is.

    Raises:
        ValueError: a reduction that the simulated group does not have.
    """
    for known in _PAIRWISE:
        if op == known:
            return known
    raise ValueError(
        f"the simulated group has no reduction {op}; it has sum, average, product, minimum, maximum"
    )


def reduce(parts: Sequence[Tensor], op: Any) -> Tensor:
    """Return the reduction `op`, from `check_reduction`, of the ranks' tensors, rounded to
    their dtype after each rank.

    The average scales by 1/N, rounded to the dtype too, before the sum; of integers it divides the sum.
    """
    pairwise = _PAIRWISE[op]
    average = op == dist.ReduceOp.AVG
    of_integers = average and not parts[0].dtype.is_floating_point
    if average and not of_integers:
        scale = torch.tensor(1 / len(parts), dtype=parts[0].dtype)
        parts = [part * scale for part in parts]
    total = parts[0].clone()
    for part in parts[1:]:
        total = pairwise(total, part)
    return total.div(len(parts), rounding_mode="trunc") if of_integers else total
