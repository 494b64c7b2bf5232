"""Numbers whose sum over ranks is exact in every dtype, so that a result can be held against what it must be."""

from __future__ import annotations

import torch

__all__ = ["all_equal", "is_sum", "is_written", "write"]

_PERIOD = 1009  # a prime: what ends up in a wrong place looks wrong
_SHORT_PERIODS = {torch.float16: 31, torch.bfloat16: 7}  # whole numbers are exact up to 2048 and 256
_BLOCK = 1024 * _PERIOD


def write(buffer: torch.Tensor, rank: int) -> None:
    """Write numbers that differ between places and ranks into a 1-D tensor."""
    pattern = _pattern(buffer)
    for part in buffer.split(len(pattern)):
        torch.add(pattern[: len(part)], rank, out=part)


def is_written(buffer: torch.Tensor, rank: int) -> bool:
    """Return whether every place holds what `rank` writes there."""
    return _is(buffer, _pattern(buffer) + rank)


def is_sum(buffer: torch.Tensor, ranks: int, first: int = 0) -> bool:
    """Return whether every place holds the sum of what `ranks` ranks, from `first` on, write there."""
    return _is(buffer, _pattern(buffer) * ranks + ranks * (2 * first + ranks - 1) // 2)


def all_equal(buffer: torch.Tensor, value: float) -> bool:
    """Return whether every place holds `value`, but for rounding."""
    least, most = (float(end) for end in buffer.aminmax())
    return abs(least - value) <= 1e-5 * abs(value) and abs(most - value) <= 1e-5 * abs(value)


def _pattern(buffer: torch.Tensor) -> torch.Tensor:
    """Return what rank 0 writes, as far as `buffer` needs it before it repeats."""
    period = _SHORT_PERIODS.get(buffer.dtype, _PERIOD)
    length = min(len(buffer), _BLOCK // period * period)
    return (torch.arange(length, device=buffer.device) % period).to(buffer.dtype)


def _is(buffer: torch.Tensor, expected: torch.Tensor) -> bool:
    return all(torch.equal(part, expected[: len(part)]) for part in buffer.split(len(expected)))
