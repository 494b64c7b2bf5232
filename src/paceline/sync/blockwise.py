"""What codecs of blocks share: where things lie in a packet, the chunks of work, a last block that is not full.

A packet is ``scales | pad | levels | pad``: each part begins at a multiple of 16 bytes, so that it can be read as its
own dtype, and the padding is zeros, so that equal numbers make equal bytes.

[Note: chunks] On a CPU the work goes in chunks that, with their scratch, stay in the second cache: many passes over
a chunk then cost little more than one over memory. On a GPU there is one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.sync.dither import Dither

__all__ = ["CHUNK", "Blockwise", "Layout", "padded", "part"]

CHUNK = 1 << 16
"""Numbers that are worked on at a time; see [Note: chunks]."""


def padded(nbytes: int) -> int:
    """Return the next multiple of 16."""
    return -(-nbytes // 16) * 16


def part(packet: Tensor, begin: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return `count` elements of a packet from byte `begin` on."""
    return packet[begin : begin + count * dtype.itemsize].view(dtype)


@dataclass(frozen=True)
class Layout:
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
        """Return a packet's scales (none, where there are none) and its levels, a row for each block."""
        blocks = self.blocks(numel)
        scales = part(packet, 0, blocks if self.scaled else 0, torch.float32)
        levels = part(packet, self.scale_nbytes(numel), blocks * self.width, self.level)
        return scales, levels.view(blocks, self.width)

    def clear_padding(self, packet: Tensor, numel: int) -> None:
        """Make the padding zeros."""
        blocks, begin = self.blocks(numel), self.scale_nbytes(numel)
        packet[4 * blocks if self.scaled else 0 : begin].zero_()
        packet[begin + blocks * self.width * self.level.itemsize :].zero_()

    def step(self, numel: int, device: torch.device) -> int:
        """Return how many blocks are worked on at a time; see [Note: chunks]."""
        return max(1, CHUNK // self.block) if device.type == "cpu" else max(1, self.blocks(numel))

    def pieces(self, numel: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
        """Yield which blocks and which numbers are worked on at a time; a block that is not full comes alone."""
        full, step = numel // self.block, self.step(numel, device)
        for first in range(0, full, step):
            last = min(first + step, full)
            yield slice(first, last), slice(first * self.block, last * self.block)
        if full * self.block < numel:
            yield slice(full, full + 1), slice(full * self.block, numel)

    def scratch(self, like: Tensor) -> Tensor:
        """Return float32 rows for the largest piece."""
        rows = min(self.blocks(len(like)), self.step(len(like), like.device))
        return torch.empty(rows, self.block, dtype=torch.float32, device=like.device)


class Blockwise:
    """A codec of blocks, but for how a block becomes a scale and levels, and levels numbers.

    Args:
        name: "int8", …
        layout: of its packets.
        dither: the random bits it rounds with; None: it rounds to the nearest.
    """

    def __init__(self, name: str, layout: Layout, dither: Dither | None) -> None:
        self.name, self.layout, self.dither = name, layout, dither
        self.granule = 1

    def nbytes(self, numel: int) -> int:
        return self.layout.nbytes(numel)

    def compress(self, values: Tensor, packet: Tensor, error: Tensor | None = None) -> None:
        scales, levels = self.layout.parts(packet, len(values))
        self.layout.clear_padding(packet, len(values))
        scratch = self.layout.scratch(values)
        for blocks, numbers in self.layout.pieces(len(values), values.device):
            rows = self._rows(values[numbers])
            work = scratch[: len(rows)]
            self.encode(rows, scales[blocks], levels[blocks], work)
            if error is not None:
                self._scale(work, scales[blocks])
                _subtract(rows, work, error[numbers])
        if error is not None and not self.surely_finite(scales, error):
            error.nan_to_num_(0.0, 0.0, 0.0)

    def decompress(self, packet: Tensor, into: Tensor) -> None:
        for numbers, decoded in self._decoded(packet, into):
            into[numbers].copy_(decoded)

    def add(self, packet: Tensor, onto: Tensor, weight: float = 1.0) -> None:
        for numbers, decoded in self._decoded(packet, onto):
            onto[numbers].add_(decoded, alpha=weight)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.dither is None else self.dither.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.dither is not None and state:
            self.dither.load_state_dict(state)

    def encode(self, rows: Tensor, scales: Tensor, levels: Tensor, work: Tensor) -> None:
        """Fill the scales and levels of some blocks, and leave in `work` the levels as float32."""
        raise NotImplementedError

    def decode(self, levels: Tensor, work: Tensor) -> None:
        """Write levels as float32."""
        work.copy_(levels)

    def surely_finite(self, scales: Tensor, error: Tensor) -> bool:
        """Tell whether no error can be NaN or infinite; on a GPU nobody waits for the answer: False."""
        raise NotImplementedError

    def _decoded(self, packet: Tensor, like: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the numbers of a packet, piece by piece; each is overwritten by the next."""
        scales, levels = self.layout.parts(packet, len(like))
        scratch = self.layout.scratch(like)
        for blocks, numbers in self.layout.pieces(len(like), like.device):
            work = scratch[: blocks.stop - blocks.start]
            self.decode(levels[blocks], work)
            self._scale(work, scales[blocks])
            yield numbers, work.view(-1)[: numbers.stop - numbers.start]

    def _rows(self, values: Tensor) -> Tensor:
        """Return values as rows of blocks; zeros fill one that is not full."""
        missing = -len(values) % self.layout.block
        if missing:
            values = torch.nn.functional.pad(values, (0, missing))
        return values.view(-1, self.layout.block)

    def _scale(self, work: Tensor, scales: Tensor) -> None:
        if self.layout.scaled:
            work.mul_(scales.unsqueeze(1))


def _subtract(rows: Tensor, work: Tensor, into: Tensor) -> None:
    """Write rows − work, as much of it as there is place."""
    if len(into) == rows.numel():
        torch.sub(rows, work, out=into.view(rows.shape))
    else:
        into.copy_(torch.sub(rows, work, out=work).view(-1)[: len(into)])
