"""TopK: only the largest numbers, and where they are.

A packet of k numbers out of `numel`, each part at a multiple of 16 bytes::

    numel, k (int64)  |  scale (float32)  |  k values (float16)  |  gaps (uint16), unused ones 0

[Note: gaps] Indices ascend, and what is kept is how far each is from the one before (from −1 the first), so at least
1. A gap of 0 stands for "65 535 further, and no number here": larger gaps are some of those and a rest. No more than
numel // 65 535 of them can be needed, so there is place for k + numel // 65 535 gaps, and a packet's size is known.

[Note: selection] Which numbers are sent is exact and the same everywhere: the k largest |numbers|, of equal ones those
that come first. To sort all would take long. A sample of them tells a threshold that somewhat more than k surpass (Lin
et al., arXiv 1712.01887, section 4.4); of those few the k-th largest is found exactly. Should fewer than k surpass it,
all are looked at. Numbers are compared by the bits of their absolute value, which order them, with infinity and NaN
as the largest: those are always sent, and come out as they are. Their error is 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.parallel.compression.blockwise import CHUNK, padded, part

__all__ = ["TopKCodec"]

_HEADER = 32
"""Bytes before the values: two int64, one float32, padding."""

_FURTHEST = 65_535
"""The largest gap; see [Note: gaps]."""

_SIGNLESS = 0x7FFF_FFFF
"""The bits of a float32 but for its sign."""

_SAMPLED = 1 << 17
"""Numbers that the threshold is made from; fewer than four times as many are all looked at."""


@dataclass(frozen=True)
class TopKCodec:
    """The largest numbers of a packet, as float16 with one scale; the others count as 0.

    Without error feedback (`feedback.py`) most of a gradient would be lost.

    Args:
        keep: which part of the numbers is sent, at least one: above 0, up to 1.

    Raises:
        UsageError: `keep` is out of range.
    """

    keep: float

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise UsageError(
                f"TopK(keep={self.keep})", remedy="keep a part above 0 and up to 1, such as 0.01 for 1 %"
            )

    @property
    def name(self) -> str:
        return f"top-{100 * self.keep:g}%"

    def count(self, numel: int) -> int:
        """Return how many of `numel` numbers are sent."""
        return min(numel, max(1, math.ceil(self.keep * numel)))

    def nbytes(self, numel: int) -> int:
        k = self.count(numel)
        return _HEADER + padded(2 * k) + padded(2 * _gaps(numel, k))

    @torch.inference_mode()
    def compress(self, values: Tensor, packet: Tensor, error: Tensor | None = None) -> None:
        numel, k = len(values), self.count(len(values))
        packet.zero_()
        part(packet, 0, 2, torch.int64).copy_(torch.tensor([numel, k]))
        if error is not None and error.data_ptr() != values.data_ptr():
            error.copy_(values)
        if not numel:
            return
        indices = largest(values, k)
        chosen = values[indices]
        halves = part(packet, _HEADER, k, torch.float16)
        scale = part(packet, 16, 1, torch.float32)
        _to_halves(chosen, scale, halves)
        _write_gaps(indices, part(packet, _HEADER + padded(2 * k), _gaps(numel, k), torch.int16))
        if error is not None:
            rest = torch.sub(chosen, halves * scale)
            error[indices] = rest
            if rest.device.type != "cpu" or not math.isfinite(rest.sum()):
                error.nan_to_num_(0.0, 0.0, 0.0)

    @torch.inference_mode()
    def decompress(self, packet: Tensor, into: Tensor) -> None:
        indices, values = self.entries(packet)
        into.zero_()
        into.index_copy_(0, indices, values)

    @torch.inference_mode()
    def add(self, packet: Tensor, onto: Tensor, weight: float = 1.0) -> None:
        indices, values = self.entries(packet)
        onto.scatter_add_(0, indices, values.mul_(weight))  # indices differ, so the order doesn't matter

    def entries(self, packet: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices, ascending, and the float32 values that a packet holds."""
        numel, k = part(packet, 0, 2, torch.int64).tolist()
        values = part(packet, _HEADER, k, torch.float16) * part(packet, 16, 1, torch.float32)
        gaps = part(packet, _HEADER + padded(2 * k), _gaps(numel, k), torch.int16)
        return _read_gaps(gaps, k), values

    def sent(self, packet: Tensor) -> Tensor:
        """Return the indices of the numbers in a packet, ascending, as int64."""
        return self.entries(packet)[0]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def largest(values: Tensor, k: int) -> Tensor:
    """Return the indices, ascending, of the k largest |values|; of equal ones those that come first.

    Args:
        values: 1-D float32, on a CPU or a GPU. k: from 1 to as many as there are.
    """
    if values.device.type != "cpu":
        bits = values.view(torch.int32).bitwise_and(_SIGNLESS)
        return _exactly(bits, k, bits.topk(k, sorted=False).values.min())
    indices = _candidates(values, k)
    bits = values.view(torch.int32)
    bits = (bits if indices is None else bits[indices]).bitwise_and(_SIGNLESS)
    least = np.partition(bits.numpy(), len(bits) - k)[len(bits) - k]
    chosen = _exactly(bits, k, torch.tensor(least))
    return chosen if indices is None else indices[chosen]


def _candidates(values: Tensor, k: int) -> Tensor | None:
    """Return the indices of the numbers that surpass a sampled threshold, at least k; None: look at all."""
    stride = len(values) // _SAMPLED
    if stride < 4:
        return None
    bits = values.view(torch.int32)
    sample = bits[::stride].bitwise_and(_SIGNLESS).numpy()
    expected = k / stride
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 4)  # four standard deviations and some
    if 2 * rank >= len(sample):
        return None
    threshold = int(np.partition(sample, len(sample) - rank)[len(sample) - rank])
    scratch = torch.empty(CHUNK, dtype=torch.int32)
    found = []
    for number, chunk in enumerate(bits.split(CHUNK)):
        size = torch.bitwise_and(chunk, _SIGNLESS, out=scratch[: len(chunk)])
        found.append(np.flatnonzero((size >= threshold).numpy()) + number * CHUNK)
    indices = np.concatenate(found)
    return torch.from_numpy(indices) if len(indices) >= k else None


def _exactly(bits: Tensor, k: int, least: Tensor) -> Tensor:
    """Return where the k largest are, given the k-th largest: all above it, and the first of those equal to it."""
    above, equal = bits > least, bits == least
    return (above | (equal & (equal.cumsum(0) <= k - above.sum()))).nonzero().view(-1)


def _to_halves(values: Tensor, scale: Tensor, halves: Tensor) -> None:
    """Write values as float16 and the power of two that brings the largest finite one below 2¹⁵."""
    size = values.abs()
    torch.amax(torch.where(size.isfinite(), size, 0.0), 0, keepdim=True, out=scale)
    scale.clamp_(min=2.0**-112).view(torch.int32).bitwise_and_(0x7F80_0000)
    scale.mul_(2.0**-14)
    halves.copy_(values * scale.reciprocal())


def _gaps(numel: int, k: int) -> int:
    """Return how many gaps a packet has place for; see [Note: gaps]."""
    return k + numel // _FURTHEST


def _write_gaps(indices: Tensor, gaps: Tensor) -> None:
    """Write ascending indices as gaps, on memory that is zeros; see [Note: gaps]."""
    steps = indices.diff(prepend=indices.new_tensor([-1]))
    extra = (steps - 1) // _FURTHEST
    places = torch.arange(len(indices), device=indices.device) + extra.cumsum(0)
    gaps[places] = (steps - extra * _FURTHEST).to(torch.int16)  # as uint16, whose bits these are


def _read_gaps(gaps: Tensor, k: int) -> Tensor:
    """Return the k indices that gaps tell."""
    steps = gaps.to(torch.int64).bitwise_and_(0xFFFF)
    if steps.device.type == "cpu" and bool(steps[:k].all()):  # none is beyond the others' reach
        return steps[:k].cumsum(0).sub_(1)
    where = torch.where(steps == 0, _FURTHEST, steps).cumsum(0).sub_(1)
    return where[steps != 0]
