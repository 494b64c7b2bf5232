"""What ranks tell one another outside of gradients: sums, that all have come, that all mean the same."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import MismatchError
from paceline.world import World

__all__ = ["barrier", "check_same", "sum_over_ranks"]


def sum_over_ranks(values: Tensor, world: World) -> Tensor:
    """Return the sum of `values` over all ranks, on the world's device; `values` itself may be overwritten."""
    values = values.to(world.device)
    if world.backend != "none":
        dist.all_reduce(values)
    return values


def barrier(world: World) -> None:
    """Return once every rank has called this."""
    sum_over_ranks(torch.zeros(1), world).cpu()


def check_same(number_of_name: Mapping[str, int], world: World) -> None:
    """Raise on every rank unless all ranks pass the same numbers.

    Args:
        number_of_name: for each thing that must be the same (``"data"``), a number below 2**32 that tells it.
        world: the ranks.

    Raises:
        MismatchError: naming the first thing that differs and the first rank whose number is not rank 0's.
    """
    table = torch.zeros(world.size, len(number_of_name), dtype=torch.int64)
    table[world.rank] = torch.tensor(list(number_of_name.values()))
    table = sum_over_ranks(table, world)
    for column, name in enumerate(number_of_name):
        for rank in range(1, world.size):
            if table[rank, column] != table[0, column]:
                raise MismatchError(
                    f"rank {rank} has other {name} than rank 0",
                    remedy=f"give every rank the same {name}",
                )
