"""Base of the block codecs: packet layout, chunked work, a partial last block.

A packet is ``scales | pad | levels | pad``. Each part starts at a multiple of 16 bytes, so that it can be viewed in its
own dtype, and padding is zero, so that equal values make equal bytes.

[Note: chunks] On a CPU, codecs work on chunks that fit into the cache together with their scratch memory: many passes
over a chunk then cost little more than one pass over memory. Smaller chunks spend their time on calls
(benchmarks/codecs). On an accelerator there is one chunk.

[Note: rows] On an accelerator a call costs as much as many numbers, and the host may not wait for the device: so values
and packets may be rows of a matrix, [rows, n] and [rows, bytes], which one call compresses or decompresses. Rows are
independent of each other. Adding is one call per row still: rows are added one after another, as on a CPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.compression.stochastic_rounding import RoundingBits

__all__ = [
    "CHUNK",
    "BlockLayout",
    "BlockwiseCodec",
    "add_in_order",
    "align_up",
    "packet_view",
    "weighted_rows",
]

CHUNK = 1 << 18
"""Numbers per chunk; see [Note: chunks]."""


def align_up(nbytes: int) -> int:
    """Return the next multiple of 16."""
    return -(-nbytes // 16) * 16


def packet_view(packet: Tensor, begin: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return `count` elements of a packet (or of each of some rows), starting at byte `begin`, as a view."""
    return packet[..., begin : begin + count * dtype.itemsize].view(dtype)


def weighted_rows(rows: Tensor, weights: Tensor | None, *, scale: bool = True) -> Tensor:
    """Return float32 rows such that adding them does nothing where the weight is 0, whatever they hold, NaN too.

    Adding -0.0 changes no number, not even -0.0. The host does not read the weights.

    Args:
        rows: [rows, …].
        weights: [rows]; None: all 1.
        scale: multiply by the weight.
    """
    if weights is None:
        return rows
    factors = weights.to(rows.dtype).view(-1, *[1] * (rows.dim() - 1))
    return torch.where(factors != 0, rows * factors if scale else rows, -0.0)


def add_in_order(rows: Tensor, onto: Tensor, weights: Tensor | None) -> None:
    """Add rows one after another, each times its weight (None: 1); one of weight 0 adds nothing."""
    if weights is None:
        for row in rows:
            onto.add_(row)
        return
    factors = weights.to(rows.dtype)
    factors = torch.where(factors != 0, factors, 1.0)
    for row, factor in zip(weighted_rows(rows, weights, scale=False), factors, strict=True):
        onto.addcmul_(row, factor)  # rounds once, as adding with alpha= does on a CPU


@dataclass(frozen=True)
class BlockLayout:
    """Positions of scales and levels in a packet.

    Args:
        block: numbers that share a scale.
        level: dtype of the levels.
        width: levels per block; fewer than `block` where two numbers share a byte.
        scaled: whether blocks have scales.
    """

    block: int
    level: torch.dtype
    width: int
    scaled: bool = True

    def blocks(self, numel: int) -> int:
        """Return how many blocks hold `numel` numbers."""
        return -(-numel // self.block)

    def scale_nbytes(self, numel: int) -> int:
        """Return the bytes of the scales, padding included."""
        return align_up(4 * self.blocks(numel)) if self.scaled else 0

    def nbytes(self, numel: int) -> int:
        """Return the size of a packet."""
        return self.scale_nbytes(numel) + align_up(self.blocks(numel) * self.width * self.level.itemsize)

    def parts(self, packet: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return a packet's scales […, blocks, 1] (without scales: [… blocks, 0]) and levels [… blocks, width]."""
        blocks, rows = self.blocks(numel), packet.shape[:-1]
        levels = packet_view(packet, self.scale_nbytes(numel), blocks * self.width, self.level)
        scales = packet_view(packet, 0, blocks if self.scaled else 0, torch.float32)
        return scales.view(*rows, blocks, int(self.scaled)), levels.view(*rows, blocks, self.width)

    def clear_padding(self, packet: Tensor, numel: int) -> None:
        """Zero the padding."""
        blocks, begin = self.blocks(numel), self.scale_nbytes(numel)
        packet[..., 4 * blocks if self.scaled else 0 : begin].zero_()
        packet[..., begin + blocks * self.width * self.level.itemsize :].zero_()

    def chunk_blocks(self, blocks: int, device: torch.device) -> int:
        """Return the blocks per chunk; see [Note: chunks]."""
        return min(blocks, max(1, CHUNK // self.block)) if device.type == "cpu" else blocks


class BlockwiseCodec(ABC):
    """Codec that works block by block; subclasses turn blocks into scales and levels.

    Args:
        name: ``"int8"``, …
        layout: of the packets.
        rounding_bits: source of random bits for stochastic rounding; None: rounds to nearest.
    """

    def __init__(self, name: str, layout: BlockLayout, rounding_bits: RoundingBits | None) -> None:
        self.name, self.layout, self.rounding_bits = name, layout, rounding_bits

    def nbytes(self, numel: int) -> int:
        return self.layout.nbytes(numel)

    @torch.inference_mode()
    def compress(self, values: Tensor, packet: Tensor, error: Tensor | None = None) -> None:
        numel, block, rows = values.shape[-1], self.layout.block, values.shape[:-1]
        scales, levels = self.layout.parts(packet, numel)
        self.layout.clear_padding(packet, numel)
        full = numel // block
        whole = full * block
        if full:
            shape = (*rows, full, block)
            errors = None if error is None else error[..., :whole].view(shape)
            self._compress(
                values[..., :whole].view(shape), scales[..., :full, :], levels[..., :full, :], errors
            )
        if whole < numel:
            last = values.new_zeros(*rows, 1, block)
            rest = last[..., 0, : numel - whole]
            rest.copy_(values[..., whole:])
            self._compress(last, scales[..., full:, :], levels[..., full:, :], last)
            if error is not None:
                error[..., whole:] = rest

    @torch.inference_mode()
    def decompress(self, packet: Tensor, into: Tensor) -> None:
        for numbers, work, scale in self._decoded(packet, into):
            if self.layout.scaled and numbers.shape[-1] == work.shape[-2:].numel():
                torch.mul(work, scale, out=numbers.view(work.shape))
            else:
                numbers.copy_(_flat(work * scale if self.layout.scaled else work, numbers))

    @torch.inference_mode()
    def add(self, packet: Tensor, onto: Tensor, weight: float = 1.0) -> None:
        for numbers, work, scale in self._decoded(packet, onto):
            if len(numbers) < work.numel():
                numbers.add_((work * scale).view(-1)[: len(numbers)], alpha=weight)
            elif self.layout.scaled:
                numbers.view(work.shape).addcmul_(work, scale, value=weight)
            else:
                numbers.add_(work.view(-1), alpha=weight)

    @torch.inference_mode()
    def add_rows(self, packets: Tensor, onto: Tensor, weights: Tensor | None) -> None:
        rows = onto.expand(len(packets), -1)
        for numbers, works, scales in self._decoded(packets, rows):
            place = numbers[0]  # the same for all rows
            if self.layout.scaled and len(place) == works[0].numel():
                works = weighted_rows(works, weights)
                scales = scales if weights is None else torch.where(weights.view(-1, 1, 1) != 0, scales, 1.0)
                for work, scale in zip(works, scales, strict=True):
                    place.view(work.shape).addcmul_(work, scale)
            else:
                decoded = _flat(works * scales if self.layout.scaled else works, numbers)
                add_in_order(decoded, place, weights)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.rounding_bits is None else self.rounding_bits.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.rounding_bits is not None and state:
            self.rounding_bits.load_state_dict(state)

    @abstractmethod
    def encode(self, rows: Tensor, scales: Tensor, levels: Tensor, work: Tensor) -> None:
        """Write the scales and levels of some blocks, and leave the levels as float32 in `work`.

        Args:
            rows: […, blocks, block].
            scales: […, blocks, 1].
            levels: […, blocks, width].
            work: as `rows`.
        """

    def decode(self, levels: Tensor, work: Tensor) -> None:
        """Write levels as float32."""
        work.copy_(levels)

    @abstractmethod
    def error_is_finite(self, scales: Tensor, error: Tensor) -> bool:
        """Return True only if no error of some blocks is NaN or infinite."""

    def _compress(self, rows: Tensor, scales: Tensor, levels: Tensor, error: Tensor | None) -> None:
        """Compress whole blocks, […, blocks, block]."""
        step = self.layout.chunk_blocks(rows.shape[-2], rows.device)
        scratch = self._scratch(rows, step)
        errors = rows if error is None else error
        for chunk, scale, level, rest in zip(
            *(each.split(step, -2) for each in (rows, scales, levels, errors)), strict=True
        ):
            work = scratch[..., : chunk.shape[-2], :]
            self.encode(chunk, scale, level, work)
            if error is not None:
                if self.layout.scaled:
                    work.mul_(scale)
                torch.sub(chunk, work, out=rest)
                if rest.device.type != "cpu" or not self.error_is_finite(scale, rest):
                    rest.nan_to_num_(0.0, 0.0, 0.0)  # on a GPU always: checking would synchronise

    def _decoded(self, packet: Tensor, like: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield pieces of `like` with their levels and scales; the last block may have fewer numbers than levels."""
        numel, block = like.shape[-1], self.layout.block
        scales, levels = self.layout.parts(packet, numel)
        step = self.layout.chunk_blocks(levels.shape[-2], like.device)
        scratch = self._scratch(levels, step)
        full = numel // block
        whole = full * block
        if full:
            parts = (each[..., :full, :].split(step, -2) for each in (scales, levels))
            for numbers, scale, level in zip(like[..., :whole].split(step * block, -1), *parts, strict=True):
                work = scratch[..., : level.shape[-2], :]
                self.decode(level, work)
                yield numbers, work, scale
        if whole < numel:
            work = scratch[..., :1, :]
            self.decode(levels[..., full:, :], work)
            yield like[..., whole:], work, scales[..., full:, :]

    def _scratch(self, blocks: Tensor, count: int) -> Tensor:
        """Return memory for the float32 numbers of `count` of some blocks, […, blocks, any]."""
        shape = (*blocks.shape[:-2], count, self.layout.block)
        return torch.empty(shape, dtype=torch.float32, device=blocks.device)


def _flat(blocks: Tensor, numbers: Tensor) -> Tensor:
    """Return blocks […, blocks, block] in the shape of `numbers`, which may be shorter."""
    return blocks.flatten(-2)[..., : numbers.shape[-1]]
