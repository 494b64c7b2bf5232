"""When things happen on a rank's device, and how long they take on the slowest rank.

On the CPU a moment is the clock's. On a GPU, which works on its own, it is an event in the stream that computes; calls
have streams of their own and go on meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["Moment", "mark", "now", "of_all_ranks", "seconds_between", "slowest"]

Moment = float | torch.cuda.Event


def mark(device: str) -> Moment:
    """Return this moment of the device's computing, without waiting for it."""
    if not device.startswith("cuda"):
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Moment, end: Moment) -> float:
    """Return the seconds between two moments; both must have come."""
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event), "both moments are of one device"
        return start.elapsed_time(end) / 1e3
    assert not isinstance(end, torch.cuda.Event), "both moments are of one device"
    return end - start


def now(device: str) -> float:
    """Return the clock once the device has computed what it was given; calls may still be under way."""
    if device.startswith("cuda"):
        torch.cuda.current_stream().synchronize()
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
