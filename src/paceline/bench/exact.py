"""Numbers whose sum over ranks is exact in float32, so that a result can be held against what it must be."""

from __future__ import annotations

import torch

__all__ = ["all_equal", "is_sum", "is_written", "write"]

_PERIOD = 1009  # a prime: what ends up in a wrong place looks wrong
_BLOCK = 1024 * _PERIOD


def write(buffer: torch.Tensor, rank: int) -> None:
    """Write numbers that differ between places and ranks into a 1-D tensor."""
    pattern = _pattern()
    for part in buffer.split(_BLOCK):
        torch.add(pattern[: len(part)], rank, out=part)


def is_written(buffer: torch.Tensor, rank: int) -> bool:
    """Return whether every place holds what `rank` writes there."""
    return _is(buffer, _pattern() + rank)


def is_sum(buffer: torch.Tensor, ranks: int) -> bool:
    """Return whether every place holds the sum of what `ranks` ranks write there."""
    return _is(buffer, _pattern() * ranks + ranks * (ranks - 1) / 2)


def all_equal(buffer: torch.Tensor, value: float) -> bool:
    """Return whether every place holds `value`, but for rounding."""
    least, most = (float(end) for end in buffer.aminmax())
    return abs(least - value) <= 1e-5 * abs(value) and abs(most - value) <= 1e-5 * abs(value)


def _pattern() -> torch.Tensor:
    return (torch.arange(_BLOCK) % _PERIOD).float()


def _is(buffer: torch.Tensor, expected: torch.Tensor) -> bool:
    return all(torch.equal(part, expected[: len(part)]) for part in buffer.split(_BLOCK))
