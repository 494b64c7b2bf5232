"""Codecs with two bits per number: a sign, and one of two magnitudes that the numbers of a block share.

    int2        every number, in blocks of 256                     0.27 bytes per number
    topk-int2   the 64 largest of every block of 4096, 1.56 %      0.028 bytes per number

A packet, each part at a multiple of 16 bytes; the last block may be shorter::

    two bfloat16 per block  |  codes, four per byte  |  topk-int2: ascending indices in the block, 12 bits each

The numbers of a block are split into small and large ones, and each half is sent as its mean magnitude: after the
split no other two magnitudes have a smaller error, so an error is never larger than the numbers, as error feedback
requires. Magnitudes are cut off, not rounded, to bfloat16, so that none becomes infinite.

Source: Sarfi et al. (SparseLoCo), arXiv 2508.15706, for the 64 largest of 4096 and two bits; used at scale by
Covenant-72B, arXiv 2603.08163. The quantiser is our own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.errors import DamagedEnvelope
from paceline.parallel.compression.blockwise import (
    CHUNK,
    add_in_order,
    align_up,
    packet_view,
    weighted_rows,
)

__all__ = ["TwoBitCodec"]

_BLOCK = 256
_SPARSE_BLOCK, _SPARSE_KEPT = 4096, 64
_SPLITS = 3
"""Times that the border between small and large is moved to the middle of their means; more gain below 1 %."""

_LEAST_SCALE = 2.0**-120
_SIGN, _CODES_PER_BYTE = 2, 4


@dataclass(frozen=True)
class _Rows:
    """Blocks of the same length, and where their parts are in a packet."""

    begin: int  # index of the first number
    rows: int
    length: int  # of a block
    kept: int  # numbers sent per block
    starts: tuple[int, ...] = ()  # of magnitudes, codes and indices, in bytes

    @property
    def is_sparse(self) -> bool:
        return self.kept < self.length

    @property
    def widths(self) -> tuple[int, int, int]:
        """Bytes of magnitudes, codes and indices per block."""
        return 4, -(-self.kept // _CODES_PER_BYTE), 3 * -(-self.kept // 2) if self.is_sparse else 0

    def of(self, flat: Tensor) -> Tensor:
        """Return the blocks of a buffer (or of each of some rows), […, rows, length]."""
        whole = flat[..., self.begin : self.begin + self.rows * self.length]
        return whole.view(*flat.shape[:-1], self.rows, self.length)

    def parts(self, packet: Tensor) -> list[Tensor]:
        """Return magnitudes […, rows, 2] (the bits of bfloat16), codes and indices […, rows, bytes]."""
        lead = packet.shape[:-1]
        views = [
            packet_view(packet, start, self.rows * width, torch.uint8).view(*lead, self.rows, width)
            for start, width in zip(self.starts, self.widths, strict=True)
        ]
        return [views[0].view(torch.int16), *views[1:]]


class TwoBitCodec:
    """Codec with two bits per number; see the module.

    Args:
        sparse: send the largest numbers of each block only.
        block: numbers that share two magnitudes (not with `sparse`); a multiple of 4.
    """

    def __init__(self, *, sparse: bool = False, block: int = _BLOCK) -> None:
        self.sparse = sparse
        self._block, self._kept = (_SPARSE_BLOCK, _SPARSE_KEPT) if sparse else (block, block)
        dense = "int2" if block == _BLOCK else f"int2 in blocks of {block}"
        self.name = "topk-int2" if sparse else dense

    def nbytes(self, numel: int) -> int:
        return self._layout(numel)[1]

    @torch.inference_mode()
    def compress(self, values: Tensor, packet: Tensor, error: Tensor | None = None) -> None:
        packet.zero_()
        for rows in self._layout(values.shape[-1])[0]:
            given = rows.of(values)
            rest = None if error is None else rows.of(error)
            step = _chunk_rows(rows, values)
            blocks = [each.split(step, -2) for each in (given, given if rest is None else rest)]
            parts = [part.split(step, -2) for part in rows.parts(packet)]
            for chunk, left, magnitudes, codes, indices in zip(*blocks, *parts, strict=True):
                _compress(chunk, rows.kept, magnitudes, codes, indices, None if rest is None else left)

    @torch.inference_mode()
    def decompress(self, packet: Tensor, into: Tensor) -> None:
        """Write the numbers of a packet to `into`.

        Raises:
            DamagedEnvelope: its indices are out of order or out of range; checked on a CPU only.
        """
        for chunk, numbers, indices in self._decoded(packet, into):
            if indices is None:
                chunk.copy_(numbers)
            else:
                chunk.zero_().scatter_(-1, indices, numbers)

    @torch.inference_mode()
    def add(self, packet: Tensor, onto: Tensor, weight: float = 1.0) -> None:
        for chunk, numbers, indices in self._decoded(packet, onto):
            if indices is None:
                chunk.add_(numbers, alpha=weight)
            else:
                chunk.scatter_add_(1, indices, numbers.mul_(weight))

    @torch.inference_mode()
    def add_rows(self, packets: Tensor, onto: Tensor, weights: Tensor | None) -> None:
        for chunk, numbers, indices in self._decoded(packets, onto.expand(len(packets), -1)):
            place = chunk[0]  # the same for all rows
            if indices is None:
                add_in_order(numbers, place, weights)
                continue
            for row, places in zip(weighted_rows(numbers, weights), indices, strict=True):
                place.scatter_add_(1, places, row)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def _layout(self, numel: int) -> tuple[list[_Rows], int]:
        """Return the whole blocks and the shorter last one, as far as there are any, and the bytes of a packet."""
        whole, rest = divmod(numel, self._block)
        shapes = [(0, whole, self._block), (whole * self._block, 1, rest)]
        blocks = [
            _Rows(begin, rows, length, -(-length * self._kept // self._block))
            for begin, rows, length in shapes
            if rows and length
        ]
        at, starts = 0, []
        for part in range(3):
            for block in blocks:
                starts.append(at)
                at += block.rows * block.widths[part]
            at = align_up(at)
        count = len(blocks)
        return [replace(block, starts=tuple(starts[n::count])) for n, block in enumerate(blocks)], at

    def _decoded(self, packet: Tensor, like: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield some blocks of `like` […, rows, length], their numbers, and the places of those if not all are sent."""
        for rows in self._layout(like.shape[-1])[0]:
            step = _chunk_rows(rows, like)
            blocks = rows.of(like).split(step, -2)
            parts = [part.split(step, -2) for part in rows.parts(packet)]
            for chunk, magnitudes, codes, indices in zip(blocks, *parts, strict=True):
                numbers = _numbers(magnitudes, _unpack_codes(codes, rows.kept))
                yield chunk, numbers, _read_indices(indices, rows) if rows.is_sparse else None


def _chunk_rows(rows: _Rows, like: Tensor) -> int:
    return max(1, CHUNK // rows.length) if like.device.type == "cpu" else rows.rows


def _compress(
    blocks: Tensor, kept: int, magnitudes: Tensor, codes: Tensor, indices: Tensor, error: Tensor | None
) -> None:
    """Fill the parts of some blocks, and the error, which may be the blocks themselves."""
    chosen, places = blocks, None
    if kept < blocks.shape[-1]:
        places = blocks.abs().topk(kept, -1, sorted=False).indices.sort(-1).values
        chosen = blocks.gather(-1, places)
        _write_indices(places, indices)
    large = _write_magnitudes(chosen, magnitudes)
    both = large.to(torch.uint8).add_(chosen < 0, alpha=_SIGN)
    _pack_codes(both, codes)
    if error is None:
        return
    rest = torch.sub(chosen, _numbers(magnitudes, both))
    if places is None:
        error.copy_(rest)
    else:
        if error.data_ptr() != blocks.data_ptr():
            error.copy_(blocks)
        error.scatter_(-1, places, rest)
    if rest.device.type != "cpu" or not bool(rest.isfinite().all()):
        error.nan_to_num_(0.0, 0.0, 0.0)  # of a block that has one, all numbers sent are NaN


def _write_magnitudes(chosen: Tensor, magnitudes: Tensor) -> Tensor:
    """Write the two magnitudes of each block, and return which numbers have the larger one."""
    largest = chosen.abs().amax(-1, keepdim=True)
    unit = chosen.abs().div_(largest.clamp(min=_LEAST_SCALE))  # sums of these don't overflow
    total, count = unit.sum(-1, keepdim=True), unit.shape[-1]
    border = total / count
    large, low, high = unit, border, border
    for _ in range(_SPLITS):
        large = unit > border
        above, number = (unit * large).sum(-1, keepdim=True), large.sum(-1, keepdim=True)
        low = (total - above) / (count - number).clamp(min=1)
        high = torch.where(number > 0, above / number.clamp(min=1), low)
        border = (low + high) / 2
    both = torch.cat([low, high], -1).mul_(largest).add_(largest - largest)  # NaN where one is not finite
    magnitudes.copy_(both.view(torch.int32).bitwise_right_shift_(16))
    return large


def _numbers(magnitudes: Tensor, codes: Tensor) -> Tensor:
    """Return the float32 numbers of codes […, kept]."""
    both = magnitudes.view(torch.bfloat16).to(torch.float32)
    return torch.cat([both, -both], -1).gather(-1, codes.to(torch.int64))


def _pack_codes(codes: Tensor, into: Tensor) -> None:
    """Write codes […, kept] four to a byte; the last byte of a block may hold fewer."""
    short = -codes.shape[-1] % _CODES_PER_BYTE
    whole = torch.nn.functional.pad(codes, (0, short)) if short else codes
    quarters = whole.view(*codes.shape[:-1], -1, _CODES_PER_BYTE)
    into.copy_(quarters[..., 0])
    for place in range(1, _CODES_PER_BYTE):
        into.bitwise_or_(quarters[..., place] << 2 * place)


def _unpack_codes(packed: Tensor, kept: int) -> Tensor:
    """Return codes […, kept]."""
    quarters = torch.stack([(packed >> 2 * place) & 3 for place in range(_CODES_PER_BYTE)], -1)
    return quarters.flatten(-2)[..., :kept]


def _write_indices(places: Tensor, into: Tensor) -> None:
    """Write indices […, kept] below 4096 as 12 bits each, two to three bytes."""
    odd = places.shape[-1] % 2
    pairs = torch.nn.functional.pad(places, (0, 1)) if odd else places
    first, second = pairs.view(*places.shape[:-1], -1, 2).unbind(-1)
    thirds = [first & 255, first >> 8 | (second & 15) << 4, second >> 4]
    into.copy_(torch.stack(thirds, -1).flatten(-2))


def _read_indices(packed: Tensor, rows: _Rows) -> Tensor:
    """Return indices […, kept], int64."""
    low, both, high = packed.to(torch.int64).view(*packed.shape[:-1], -1, 3).unbind(-1)
    pairs = torch.stack([low | (both & 15) << 8, both >> 4 | high << 4], -1)
    places = pairs.flatten(-2)[..., : rows.kept]
    if places.device.type == "cpu":
        ordered = bool((places.diff(dim=-1) > 0).all())
        if not ordered or int(places[..., -1].max()) >= rows.length:
            raise DamagedEnvelope(
                f"indices of the largest numbers are not ascending and below {rows.length}", part="payload"
            )
    return places
