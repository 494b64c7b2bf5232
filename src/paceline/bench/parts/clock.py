"""Seconds of all ranks: what the slowest one took."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["now", "of_all_ranks", "slowest"]


def now(device: str) -> float:
    """Return the clock once the device has done what it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter()


def slowest(seconds: Sequence[float], device: str) -> list[float]:
    """Return each entry's largest value of all ranks; all ranks call it."""
    table = torch.tensor(list(seconds), dtype=torch.float64, device=device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return table.tolist()


def of_all_ranks(rows: torch.Tensor, device: str) -> torch.Tensor:
    """Return every rank's `rows`, stacked: [ranks, …]; all ranks call it."""
    mine = rows.to(device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return torch.stack(every).cpu()
