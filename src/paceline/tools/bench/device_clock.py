"""Clocks of a rank's device, and times of the slowest rank.

On the CPU a moment is a reading of the clock. A GPU works asynchronously, so a moment is an event in its computing
stream; communication runs in streams of its own and goes on meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from paceline.world.accelerator import current_stream, has_streams

__all__ = ["Moment", "gather_ranks", "mark", "now", "seconds_between", "slowest_rank"]

Moment = float | torch.Event


def mark(device: str) -> Moment:
    """Return the present moment of the device's computing, without waiting for it."""
    if not has_streams(torch.device(device)):
        return time.perf_counter()
    event: torch.Event = torch.get_device_module(device).Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Moment, end: Moment) -> float:
    """Return the seconds between two moments of one device that have passed."""
    if isinstance(start, int | float):
        assert isinstance(end, int | float), "both moments are of one device"
        return end - start
    assert not isinstance(end, int | float), "both moments are of one device"
    return start.elapsed_time(end) / 1e3


def now(device: str) -> float:
    """Return the clock once the device has finished computing; communication may still be pending."""
    if has_streams(torch.device(device)):
        current_stream(torch.device(device)).synchronize()
    return time.perf_counter()


def slowest_rank(seconds: Sequence[float], device: str) -> list[float]:
    """Return for each entry the maximum over all ranks; a collective."""
    table = torch.tensor(list(seconds), dtype=torch.float64, device=device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return table.tolist()


def gather_ranks(rows: torch.Tensor, device: str) -> torch.Tensor:
    """Return every rank's `rows`, stacked: ``[ranks, …]``; a collective."""
    mine = rows.to(device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return torch.stack(every).cpu()
