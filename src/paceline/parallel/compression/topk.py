"""Top-k sparsification: a packet holds the numbers of the largest magnitude and their indices.

A packet of k numbers out of `numel`, each part at a multiple of 16 bytes::

    numel, k (int64)  |  scale (float32)  |  k values (float16)  |  gaps (uint16), unused ones 0

[Note: gaps] Indices ascend and are stored as distances, each to the previous index (the first to −1), so at least 1. A
gap of 0 means "65 535 further, no number here": larger distances are some of those and a remainder. At most
numel // 65 535 of them occur, so a packet has space for k + numel // 65 535 gaps and its size is known in advance.

[Note: selection] The selection is exact and the same everywhere: the k largest magnitudes, and of equal ones those that
come first. Sorting everything would be slow. A sample gives a threshold that somewhat more than k numbers exceed (Lin
et al., arXiv 1712.01887, section 4.4); the k-th largest is found exactly among those. If fewer than k exceed it, all
numbers are searched. Magnitudes are compared by their bits, which order them, with infinity and NaN as the largest:
those are always sent, and decompress to what they were. Their error is 0.

On an accelerator the host knows neither how many numbers exceed a threshold nor what a packet's header says, unless it
waits. So there the k largest of unique keys are taken, magnitude first, then the index from the end; gaps are decoded
by sums and a scatter of fixed size; and k follows from the codec. The packets are the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.parallel.compression.blockwise import CHUNK, align_up, packet_view, weighted_rows

__all__ = ["TopKCodec", "density_at", "largest_indices"]

_HEADER = 32
"""Bytes before the values: two int64, one float32, padding."""

_MAX_GAP = 65_535
"""The largest gap; see [Note: gaps]."""

_MAGNITUDE_BITS = 0x7FFF_FFFF
"""The bits of a float32 without its sign."""

_SAMPLE = 1 << 17
"""Size of the sample that gives the threshold; below four times as many numbers, all are searched."""


@dataclass(frozen=True)
class TopKCodec:
    """Codec that sends the largest numbers as float16 with one scale; all others decompress to 0.

    Without error feedback most of a gradient would be lost.

    Args:
        keep: fraction of the numbers that is sent, above 0 and at most 1; at least one number.

    Raises:
        UsageError: `keep` is out of range.
    """

    keep: float

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise UsageError(
                f"TopKCodec(keep={self.keep})",
                remedy="keep a fraction above 0 and at most 1, such as 0.01 for 1 %",
            )

    @property
    def name(self) -> str:
        return f"top-{100 * self.keep:g}%"

    def count(self, numel: int) -> int:
        """Return how many of `numel` numbers are sent."""
        return min(numel, max(1, math.ceil(self.keep * numel)))

    def nbytes(self, numel: int) -> int:
        k = self.count(numel)
        return _HEADER + align_up(2 * k) + align_up(2 * _gap_count(numel, k))

    @torch.inference_mode()
    def compress(self, values: Tensor, packet: Tensor, error: Tensor | None = None) -> None:
        numel = values.shape[-1]
        k = self.count(numel)
        packet.zero_()
        for number, value in enumerate((numel, k)):
            packet_view(packet, 8 * number, 1, torch.int64).fill_(value)
        if error is not None and error.data_ptr() != values.data_ptr():
            error.copy_(values)
        if not numel:
            return
        indices = largest_indices(values, k)
        chosen = values.gather(-1, indices)
        halves = packet_view(packet, _HEADER, k, torch.float16)
        scale = packet_view(packet, 16, 1, torch.float32)
        _to_halves(chosen, scale, halves)
        _write_gaps(
            indices, packet_view(packet, _HEADER + align_up(2 * k), _gap_count(numel, k), torch.int16)
        )
        if error is not None:
            rest = torch.sub(chosen, halves * scale)
            error.scatter_(-1, indices, rest)
            if rest.device.type != "cpu" or not math.isfinite(rest.sum()):
                error.nan_to_num_(0.0, 0.0, 0.0)

    @torch.inference_mode()
    def decompress(self, packet: Tensor, into: Tensor) -> None:
        indices, values = self.entries(packet, into.shape[-1])
        into.zero_()
        into.scatter_(-1, indices, values)

    @torch.inference_mode()
    def add(self, packet: Tensor, onto: Tensor, weight: float = 1.0) -> None:
        indices, values = self.entries(packet, len(onto))
        # Indices are distinct, so the order doesn't matter.
        onto.scatter_add_(0, indices, values.mul_(weight))

    @torch.inference_mode()
    def add_rows(self, packets: Tensor, onto: Tensor, weights: Tensor | None) -> None:
        indices, values = self.entries(packets, len(onto))
        for places, numbers in zip(indices, weighted_rows(values, weights), strict=True):
            onto.scatter_add_(0, places, numbers)

    def entries(self, packet: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return the indices (int64, ascending) and the float32 values of a packet, or of the packets in some rows.

        Args:
            packet: […, bytes]; its header is read on a CPU only, elsewhere it is this codec's.
            numel: how many numbers it stands for.
        """
        k = self.count(numel)
        if packet.device.type == "cpu" and packet.dim() == 1:
            numel, k = packet_view(packet, 0, 2, torch.int64).tolist()
        values = packet_view(packet, _HEADER, k, torch.float16) * packet_view(packet, 16, 1, torch.float32)
        gaps = packet_view(packet, _HEADER + align_up(2 * k), _gap_count(numel, k), torch.int16)
        return _read_gaps(gaps, k), values

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def density_at(step: int, keep: float, warmup_steps: int) -> float:
    """Return the fraction that top-k keeps at a step of a warm-up: exponentially less, down to `keep`.

    Args:
        step: counted from 0.
        keep: fraction after the warm-up.
        warmup_steps: length of the warm-up, divided equally among 1/4, 1/16, …, as far as those exceed `keep`.

    Source: Lin et al., arXiv 1712.01887, section 3.3 (75 %, 93.75 %, 98.4375 %, 99.6 % and 99.9 % left out).

    Example:
        >>> [density_at(step, 0.01, 6) for step in (0, 2, 4, 6)]
        [0.25, 0.0625, 0.015625, 0.01]
    """
    rungs = 0
    while 0.25 ** (rungs + 1) > keep:
        rungs += 1
    if step >= warmup_steps or not rungs:
        return keep
    return 0.25 ** (max(step, 0) * rungs // warmup_steps + 1)


def largest_indices(values: Tensor, k: int) -> Tensor:
    """Return the ascending indices of the k largest |values|; see [Note: selection].

    Args:
        values: float32, [n] or [rows, n].
        k: how many, 1 to n.
    """
    if values.device.type != "cpu" or values.dim() > 1:
        return _largest_by_key(values, k)
    indices = _candidates(values, k)
    bits = values.view(torch.int32)
    bits = (bits if indices is None else bits[indices]).bitwise_and(_MAGNITUDE_BITS)
    least = np.partition(bits.numpy(), len(bits) - k)[len(bits) - k]
    chosen = _select(bits, k, torch.tensor(least))
    return chosen if indices is None else indices[chosen]


def _largest_by_key(values: Tensor, k: int) -> Tensor:
    """Return what `largest_indices` does, with tensors of known size only."""
    last = values.shape[-1] - 1
    keys = values.view(torch.int32).bitwise_and(_MAGNITUDE_BITS).to(torch.int64).bitwise_left_shift_(32)
    keys.bitwise_or_(torch.arange(last, -1, -1, device=values.device))
    largest = keys.topk(k, -1, sorted=False).values
    return largest.bitwise_and_(0xFFFF_FFFF).neg_().add_(last).sort(-1).values


def _candidates(values: Tensor, k: int) -> Tensor | None:
    """Return the indices of the numbers above a sampled threshold, at least k; None: search all numbers."""
    stride = len(values) // _SAMPLE
    if stride < 4:
        return None
    bits = values.view(torch.int32)
    sample = bits[::stride].bitwise_and(_MAGNITUDE_BITS).numpy()
    expected = k / stride
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 4)  # four standard deviations and some
    if 2 * rank >= len(sample):
        return None
    threshold = int(np.partition(sample, len(sample) - rank)[len(sample) - rank])
    scratch = torch.empty(CHUNK, dtype=torch.int32)
    found = []
    for number, chunk in enumerate(bits.split(CHUNK)):
        size = torch.bitwise_and(chunk, _MAGNITUDE_BITS, out=scratch[: len(chunk)])
        found.append(np.flatnonzero((size >= threshold).numpy()) + number * CHUNK)
    indices = np.concatenate(found)
    return torch.from_numpy(indices) if len(indices) >= k else None


def _select(bits: Tensor, k: int, least: Tensor) -> Tensor:
    """Return the indices of the k largest, given the k-th largest: all above it, then the first equal to it."""
    above, equal = bits > least, bits == least
    return (above | (equal & (equal.cumsum(0) <= k - above.sum()))).nonzero().view(-1)


def _to_halves(values: Tensor, scale: Tensor, halves: Tensor) -> None:
    """Write values as float16, and the power of two that scales the largest finite one below 2¹⁵."""
    size = values.abs()
    torch.amax(torch.where(size.isfinite(), size, 0.0), -1, keepdim=True, out=scale)
    scale.clamp_(min=2.0**-112).view(torch.int32).bitwise_and_(0x7F80_0000)
    scale.mul_(2.0**-14)
    halves.copy_(values * scale.reciprocal())


def _gap_count(numel: int, k: int) -> int:
    return k + numel // _MAX_GAP


def _write_gaps(indices: Tensor, gaps: Tensor) -> None:
    """Write ascending indices as gaps into zeroed memory."""
    steps = indices.diff(dim=-1, prepend=indices.new_full((*indices.shape[:-1], 1), -1))
    extra = (steps - 1) // _MAX_GAP
    places = extra.cumsum(-1).add_(torch.arange(indices.shape[-1], device=indices.device))
    gaps.scatter_(-1, places, (steps - extra * _MAX_GAP).to(torch.int16))  # the bits of a uint16


def _read_gaps(gaps: Tensor, k: int) -> Tensor:
    """Return the k indices that gaps encode."""
    steps = gaps.to(torch.int64).bitwise_and_(0xFFFF)
    on_host = steps.device.type == "cpu" and steps.dim() == 1
    if gaps.shape[-1] == k or (on_host and bool(steps[:k].all())):  # no gap beyond 65 535
        return steps[..., :k].cumsum(-1).sub_(1)
    ends = torch.where(steps == 0, _MAX_GAP, steps).cumsum(-1).sub_(1)
    if on_host:
        return ends[steps != 0]
    # One more than k: where gaps without a number go.
    places = torch.where(steps == 0, k, (steps != 0).cumsum(-1) - 1)
    indices = ends.new_zeros(*ends.shape[:-1], k + 1)
    return indices.scatter_(-1, places, ends)[..., :k]
