"""The same work on two groups of the same ranks: the world on "paceline", and gloo."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["apart", "on_both", "world"]


@contextmanager
def world(rank: int, size: int, folder: str, seconds: float = 60.0):
    """Enter a world on "paceline" whose ranks meet in `folder`; an error leaves it as it is."""
    dist.init_process_group(
        "paceline",
        init_method=f"file://{folder}/world",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


def on_both(rank: int, size: int, folder: str, work: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Return what ``work(group, rank, size, *args)`` returns on "paceline", and on gloo."""
    with world(rank, size, folder) as ours:
        results = []
        for group in (ours, dist.new_group(backend="gloo")):
            torch.manual_seed(0)
            results.append(work(group, rank, size, *args))
    return results[0], results[1]


def apart(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    """Return the largest difference of any element, NaN if there is a NaN; 0 means equal to the bit."""
    assert [each.dtype for each in left] == [each.dtype for each in right]
    gaps = [(a - b).abs().max().double() for a, b in zip(left, right, strict=True) if a.numel()]
    return torch.stack(gaps).max().item()
