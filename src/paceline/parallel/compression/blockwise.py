"""Base of the block codecs: packet layout, chunked work, a partial last block.

A packet is ``scales | pad | levels | pad``. Each part starts at a multiple of 16 bytes, so that it can be viewed in its
own dtype, and padding is zero, so that equal values make equal bytes.

[Note: chunks] On a CPU, codecs work on chunks that fit into the cache together with their scratch memory: many passes
over a chunk then cost little more than one pass over memory. Smaller chunks spend their time on calls
(benchmarks/codecs). On a GPU there is one chunk.
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
    "align_up",
    "packet_view",
]

CHUNK = 1 << 18
"""Numbers per chunk; see [Note: chunks]."""


def align_up(nbytes: int) -> int:
    """Return the next multiple of 16."""
    return -(-nbytes // 16) * 16


def packet_view(packet: Tensor, begin: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return `count` elements of a packet, starting at byte `begin`, as a view."""
    return packet[begin : begin + count * dtype.itemsize].view(dtype)


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
        """Return a packet's scales [blocks, 1] (without scales: [blocks, 0]) and levels [blocks, width]."""
        blocks = self.blocks(numel)
        levels = packet_view(packet, self.scale_nbytes(numel), blocks * self.width, self.level)
        scales = packet_view(packet, 0, blocks if self.scaled else 0, torch.float32).view(
            blocks, int(self.scaled)
        )
        return scales, levels.view(blocks, self.width)

    def clear_padding(self, packet: Tensor, numel: int) -> None:
        """Zero the padding."""
        blocks, begin = self.blocks(numel), self.scale_nbytes(numel)
        packet[4 * blocks if self.scaled else 0 : begin].zero_()
        packet[begin + blocks * self.width * self.level.itemsize :].zero_()

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
        scales, levels = self.layout.parts(packet, len(values))
        self.layout.clear_padding(packet, len(values))
        full = len(values) // self.layout.block
        whole = full * self.layout.block
        self._compress(values[:whole], scales[:full], levels[:full], None if error is None else error[:whole])
        if whole < len(values):
            last = values.new_zeros(self.layout.block)
            last[: len(values) - whole] = values[whole:]
            self._compress(last, scales[full:], levels[full:], last)
            if error is not None:
                error[whole:] = last[: len(values) - whole]

    @torch.inference_mode()
    def decompress(self, packet: Tensor, into: Tensor) -> None:
        for numbers, work, scale in self._decoded(packet, into):
            if len(numbers) < work.numel():
                numbers.copy_((work * scale if self.layout.scaled else work).view(-1)[: len(numbers)])
            elif self.layout.scaled:
                torch.mul(work, scale, out=numbers.view(work.shape))
            else:
                numbers.copy_(work.view(-1))

    @torch.inference_mode()
    def add(self, packet: Tensor, onto: Tensor, weight: float = 1.0) -> None:
        for numbers, work, scale in self._decoded(packet, onto):
            if len(numbers) < work.numel():
                numbers.add_((work * scale).view(-1)[: len(numbers)], alpha=weight)
            elif self.layout.scaled:
                numbers.view(work.shape).addcmul_(work, scale, value=weight)
            else:
                numbers.add_(work.view(-1), alpha=weight)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.rounding_bits is None else self.rounding_bits.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.rounding_bits is not None and state:
            self.rounding_bits.load_state_dict(state)

    @abstractmethod
    def encode(self, rows: Tensor, scales: Tensor, levels: Tensor, work: Tensor) -> None:
        """Write the scales (a column) and levels of some blocks, and leave the levels as float32 in `work`."""

    def decode(self, levels: Tensor, work: Tensor) -> None:
        """Write levels as float32."""
        work.copy_(levels)

    @abstractmethod
    def error_is_finite(self, scales: Tensor, error: Tensor) -> bool:
        """Return True only if no error of some blocks is NaN or infinite."""

    def _compress(self, values: Tensor, scales: Tensor, levels: Tensor, error: Tensor | None) -> None:
        """Compress whole blocks."""
        if not len(levels):
            return
        rows = values.view(-1, self.layout.block)
        step = self.layout.chunk_blocks(len(rows), values.device)
        scratch = torch.empty(step, self.layout.block, dtype=torch.float32, device=values.device)
        errors = (rows if error is None else error.view(rows.shape)).split(step)
        chunks = zip(rows.split(step), scales.split(step), levels.split(step), errors, strict=True)
        for chunk, scale, level, rest in chunks:
            work = scratch[: len(chunk)]
            self.encode(chunk, scale, level, work)
            if error is not None:
                if self.layout.scaled:
                    work.mul_(scale)
                torch.sub(chunk, work, out=rest)
                if rest.device.type != "cpu" or not self.error_is_finite(scale, rest):
                    rest.nan_to_num_(0.0, 0.0, 0.0)  # on a GPU always: checking would synchronise

    def _decoded(self, packet: Tensor, like: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield pieces of `like` with their levels and scales; the last block may have fewer numbers than levels."""
        scales, levels = self.layout.parts(packet, len(like))
        step = self.layout.chunk_blocks(len(levels), like.device)
        scratch = torch.empty(step, self.layout.block, dtype=torch.float32, device=like.device)
        full = len(like) // self.layout.block
        whole = full * self.layout.block
        pieces = like[:whole].split(step * self.layout.block)
        for numbers, scale, level in zip(
            pieces, scales[:full].split(step), levels[:full].split(step), strict=True
        ):
            work = scratch[: len(level)]
            self.decode(level, work)
            yield numbers, work, scale
        if whole < len(like):
            self.decode(levels[full:], scratch[:1])
            yield like[whole:], scratch[:1], scales[full:]
