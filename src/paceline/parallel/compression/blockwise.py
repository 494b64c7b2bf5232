"""What codecs of blocks share: where things lie in a packet, the chunks of work, a last block that is not full.

A packet is ``scales | pad | levels | pad``: each part begins at a multiple of 16 bytes, so that it can be read as its
own dtype, and the padding is zeros, so that equal numbers make equal bytes.

[Note: chunks] On a CPU the work goes in chunks that, with their scratch, stay in the cache: many passes over a chunk
then cost little more than one over memory. Smaller ones spend their time on calls (benchmarks/codecs). On a GPU there
is one chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.compression.stochastic_rounding import RoundingBits

__all__ = ["CHUNK", "BlockLayout", "BlockwiseCodec", "padded", "part"]

CHUNK = 1 << 18
"""Numbers that are worked on at a time; see [Note: chunks]."""


def padded(nbytes: int) -> int:
    """Return the next multiple of 16."""
    return -(-nbytes // 16) * 16


def part(packet: Tensor, begin: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return `count` elements of a packet from byte `begin` on."""
    return packet[begin : begin + count * dtype.itemsize].view(dtype)


@dataclass(frozen=True)
class BlockLayout:
    """Where scales and levels lie in a packet.

    Args:
        block: how many numbers share a scale.
        level: the dtype of levels. width: how many of those a block has (fewer than numbers, where two share a byte).
        scaled: whether there are scales.
    """

    block: int
    level: torch.dtype
    width: int
    scaled: bool = True

    def blocks(self, numel: int) -> int:
        """Return how many blocks hold `numel` numbers."""
        return -(-numel // self.block)

    def scale_nbytes(self, numel: int) -> int:
        """Return the bytes of the scales, with their padding."""
        return padded(4 * self.blocks(numel)) if self.scaled else 0

    def nbytes(self, numel: int) -> int:
        """Return the size of a packet."""
        return self.scale_nbytes(numel) + padded(self.blocks(numel) * self.width * self.level.itemsize)

    def parts(self, packet: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return a packet's scales and its levels, a row for each block; without scales, rows of none."""
        blocks = self.blocks(numel)
        scales = part(packet, 0, blocks if self.scaled else 0, torch.float32)
        levels = part(packet, self.scale_nbytes(numel), blocks * self.width, self.level)
        return scales.view(-1, 1) if self.scaled else scales.expand(blocks, 0), levels.view(
            blocks, self.width
        )

    def clear_padding(self, packet: Tensor, numel: int) -> None:
        """Make the padding zeros."""
        blocks, begin = self.blocks(numel), self.scale_nbytes(numel)
        packet[4 * blocks if self.scaled else 0 : begin].zero_()
        packet[begin + blocks * self.width * self.level.itemsize :].zero_()

    def step(self, blocks: int, device: torch.device) -> int:
        """Return how many blocks are worked on at a time; see [Note: chunks]."""
        return min(blocks, max(1, CHUNK // self.block)) if device.type == "cpu" else blocks


class BlockwiseCodec(ABC):
    """A codec of blocks, but for how blocks become scales and levels, and levels numbers.

    Args:
        name: "int8", …
        layout: of its packets.
        dither: the random bits it rounds with; None: it rounds to the nearest.
    """

    def __init__(self, name: str, layout: BlockLayout, dither: RoundingBits | None) -> None:
        self.name, self.layout, self.rounding_bits = name, layout, dither

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
            last = self._filled(values[whole:])
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
        """Fill the scales (a column) and levels of some blocks, and leave in `work` the levels as float32."""

    def decode(self, levels: Tensor, work: Tensor) -> None:
        """Write levels as float32."""
        work.copy_(levels)

    @abstractmethod
    def surely_finite(self, scales: Tensor, error: Tensor) -> bool:
        """Tell whether no error of some blocks can be NaN or infinite."""

    def _compress(self, values: Tensor, scales: Tensor, levels: Tensor, error: Tensor | None) -> None:
        """Compress whole blocks."""
        if not len(levels):
            return
        rows = values.view(-1, self.layout.block)
        step = self.layout.step(len(rows), values.device)
        scratch = torch.empty(step, self.layout.block, dtype=torch.float32, device=values.device)
        lost = (rows if error is None else error.view(rows.shape)).split(step)
        for given, scale, level, rest in zip(
            rows.split(step), scales.split(step), levels.split(step), lost, strict=True
        ):
            work = scratch[: len(given)]
            self.encode(given, scale, level, work)
            if error is not None:
                if self.layout.scaled:
                    work.mul_(scale)
                torch.sub(given, work, out=rest)
                if rest.device.type != "cpu" or not self.surely_finite(scale, rest):
                    rest.nan_to_num_(0.0, 0.0, 0.0)  # on a GPU nobody waits to know whether that is needed

    def _decoded(self, packet: Tensor, like: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield pieces of `like`, and their levels and scales; the last block may have fewer numbers than levels."""
        scales, levels = self.layout.parts(packet, len(like))
        step = self.layout.step(len(levels), like.device)
        scratch = torch.empty(step, self.layout.block, dtype=torch.float32, device=like.device)
        full = len(like) // self.layout.block
        whole = full * self.layout.block
        for numbers, scale, level in zip(
            like[:whole].split(step * self.layout.block),
            scales[:full].split(step),
            levels[:full].split(step),
            strict=True,
        ):
            work = scratch[: len(level)]
            self.decode(level, work)
            yield numbers, work, scale
        if whole < len(like):
            self.decode(levels[full:], scratch[:1])
            yield like[whole:], scratch[:1], scales[full:]

    def _filled(self, values: Tensor) -> Tensor:
        """Return a block of some values and zeros."""
        block = values.new_zeros(self.layout.block)
        block[: len(values)] = values
        return block
