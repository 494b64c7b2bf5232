"""What an all-reduce costs on this wire, from a few calls between two steps; all ranks find the same."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from paceline.sync.candidates import CallPrice
from paceline.sync.wire import Wire
from paceline.world.agree import gather_rows

__all__ = ["price_of_calls", "slowest"]

_SMALL_NBYTES, _MOST_NBYTES, _FACTOR = 4 << 10, 16 << 20, 8
_LONG_ENOUGH = 0.05  # seconds of a call: what it costs to begin hardly counts any more
_TURNS = 5


def price_of_calls(wire: Wire, device: torch.device) -> CallPrice:
    """Return what a call costs, and a byte; all ranks call this, with nothing else under way."""
    small = statistics.median(_seconds(wire, _SMALL_NBYTES, device) for _ in range(_TURNS))
    nbytes, seconds = _SMALL_NBYTES, small
    while seconds < _LONG_ENOUGH and nbytes * _FACTOR <= _MOST_NBYTES:
        nbytes *= _FACTOR
        seconds = min(_seconds(wire, nbytes, device) for _ in range(2))
    return CallPrice(small, max(0.0, seconds - small) / max(nbytes - _SMALL_NBYTES, 1))


def slowest(seconds: Sequence[float], wire: Wire) -> list[float]:
    """Return, number by number, the largest of all ranks."""
    rows = gather_rows(torch.tensor(seconds, dtype=torch.float64), wire.group)
    return torch.stack(rows).amax(0).tolist()


def _seconds(wire: Wire, nbytes: int, device: torch.device) -> float:
    """Return what an all-reduce takes on the slowest rank."""
    flat = wire.allocate(nbytes // 4, torch.float32, device).zero_()
    started = time.perf_counter()
    wire.all_reduce(flat).wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return slowest([time.perf_counter() - started], wire)[0]
