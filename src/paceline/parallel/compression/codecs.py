"""Codecs: compress float32 numbers to fewer bytes and back, for gradients and pseudo-gradients.

A codec turns numbers into a *packet*: bytes whose size depends on the number of numbers only, so that all ranks know it
in advance. Blocks of neighbouring numbers share a scale, stored before the levels:

    int8 packet:  float32 scales, one per block | pad | int8 levels | pad     (parts start at multiples of 16 bytes)

The loss is the *error*, values − decompressed: error feedback (`error_feedback.py`) sends it in the next round. Sums
are float32: `add` decompresses and adds in one pass, so a sum over ranks is never rounded to levels in between.

[Note: not finite] A NaN or an infinity makes the scale of its block non-finite, and with it every number decompressed
from that block, so it is detected downstream. The error is 0 there; otherwise error feedback would never get rid of it.
bfloat16 has no blocks: there it applies to single numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.errors import UsageError, unknown
from paceline.parallel.compression.blockwise import (
    BlockLayout,
    BlockwiseCodec,
    add_in_order,
    align_up,
    packet_view,
)
from paceline.parallel.compression.stochastic_rounding import RoundingBits, make_rounding_bits

__all__ = ["Codec", "HalfCodec", "IntCodec", "RawCodec"]

_LEAST_SCALE = 2.0**-120
"""Reciprocals of smaller scales are unreliable: numbers below half of it decompress to 0."""

_BLOCK = 256
"""Default block of int8 and int4."""

_FP16_BLOCK = 1024
"""Block of fp16: 4 bytes of scale per 2048 bytes."""

_FP16_EXPONENT = 14
"""In fp16 the largest number of a block is scaled to between 2¹⁴ and 2¹⁵: nothing overflows, and as few numbers as
possible are subnormal."""


class Codec(Protocol):
    """Turns float32 numbers into bytes and back, on an accelerator without the host waiting for the device.

    Attributes:
        name: ``"int8"``, …; codecs of the same name read each other's packets.
    """

    @property
    def name(self) -> str: ...

    def nbytes(self, numel: int) -> int:
        """Return the size of a packet of `numel` numbers, a multiple of 16."""
        ...

    def compress(self, values: Tensor, packet: Tensor, error: Tensor | None = None) -> None:
        """Fill a packet, or several: see [Note: rows] in `blockwise`.

        Args:
            values: contiguous float32, [n] or [rows, n].
            packet: uint8, [``nbytes(n)``] or [rows, ``nbytes(n)``], each starting at a multiple of 16 bytes.
            error: receives values − decompressed; may be `values` itself. See [Note: not finite].
        """
        ...

    def decompress(self, packet: Tensor, into: Tensor) -> None:
        """Write the numbers of a packet to `into`; or of several, [rows, bytes], to [rows, n]."""
        ...

    def add(self, packet: Tensor, onto: Tensor, weight: float = 1.0) -> None:
        """Add weight × the numbers of a packet to `onto`, in float32."""
        ...

    def add_rows(self, packets: Tensor, onto: Tensor, weights: Tensor | None) -> None:
        """Add packets one after another, as `add` does, with weights that the host does not know.

        Args:
            packets: [rows, ``nbytes(n)``].
            onto: [n].
            weights: [rows], float64; a packet of weight 0 adds nothing, whatever it holds. None: all 1.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what later packets depend on besides the values; often empty."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class RawCodec:
    """Codec that copies numbers, for whatever is sent uncompressed.

    Args:
        dtype: float32 or float64, of the values and of what they are added to.
    """

    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.float64):
            raise UsageError(f"RawCodec({self.dtype})", remedy="use torch.float32 or torch.float64")

    @property
    def name(self) -> str:
        return "fp64" if self.dtype == torch.float64 else "fp32"

    def nbytes(self, numel: int) -> int:
        return align_up(numel * self.dtype.itemsize)

    def compress(self, values: Tensor, packet: Tensor, error: Tensor | None = None) -> None:
        packet_view(packet, 0, values.shape[-1], self.dtype).copy_(values)
        end = values.shape[-1] * self.dtype.itemsize
        if packet.shape[-1] > end:
            packet[..., end:].zero_()
        if error is not None:
            error.zero_()

    def decompress(self, packet: Tensor, into: Tensor) -> None:
        into.copy_(packet_view(packet, 0, into.shape[-1], self.dtype))

    def add(self, packet: Tensor, onto: Tensor, weight: float = 1.0) -> None:
        onto.add_(packet_view(packet, 0, len(onto), self.dtype), alpha=weight)

    def add_rows(self, packets: Tensor, onto: Tensor, weights: Tensor | None) -> None:
        add_in_order(packet_view(packets, 0, len(onto), self.dtype), onto, weights)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class HalfCodec(BlockwiseCodec):
    """Two bytes per number: bfloat16, rounded to nearest (ties to even), or float16 with a scale per block.

    Scales are powers of two and cost no precision: numbers down to 2⁻²⁸ of the largest of their block keep all 11 bits.
    A number that rounds beyond the largest float32 becomes infinite.

    Args:
        kind: ``"bf16"`` or ``"fp16"``.
        rounding: ``"nearest"``, or ``"stochastic"`` (bf16 only).
        seed: of the random bits.
        rank: this rank.

    Raises:
        UsageError: an unknown kind or rounding, or stochastic fp16.
    """

    def __init__(self, kind: str = "bf16", rounding: str = "nearest", seed: int = 0, rank: int = 0) -> None:
        if kind not in ("bf16", "fp16"):
            raise unknown("half precision", kind, ["bf16", "fp16"])
        if kind == "fp16" and rounding == "stochastic":
            raise UsageError("fp16 rounds to nearest only", remedy='use "bf16" for stochastic rounding')
        if kind == "fp16":
            layout = BlockLayout(_FP16_BLOCK, torch.float16, _FP16_BLOCK)
        else:
            layout = BlockLayout(1, torch.bfloat16, 1, scaled=False)
        super().__init__(kind, layout, make_rounding_bits(rounding, seed, rank))

    def encode(self, rows: Tensor, scales: Tensor, levels: Tensor, work: Tensor) -> None:
        if self.layout.scaled:
            _max_magnitude(rows, work, scales)
            scales.clamp_(min=2.0 ** (_FP16_EXPONENT - 126))
            scales.view(torch.int32).bitwise_and_(0x7F80_0000)  # the power of two below; NaN becomes infinity
            scales.mul_(2.0**-_FP16_EXPONENT)
            levels.copy_(torch.mul(rows, scales.reciprocal(), out=work))
        elif self.rounding_bits is not None:
            _round_bf16_stochastically(rows, self.rounding_bits, levels)
        else:
            levels.copy_(rows)
        work.copy_(levels)

    def error_is_finite(self, scales: Tensor, error: Tensor) -> bool:
        if self.layout.scaled:  # at the last power of two, a number may round to infinity
            return scales.amax().item() < 2.0 ** (127 - _FP16_EXPONENT)
        return math.isfinite(error.sum())


class IntCodec(BlockwiseCodec):
    """Integer levels of 8 or 4 bits, from −127 to 127 or −7 to 7, with a float32 scale per block.

    A level is the largest |number| of the block / 127 or / 7, and an error is at most half of that. int4 packs two
    levels per byte: numbers i and i + block/2 of a block.

    Args:
        bits: 8 or 4.
        block: neighbouring numbers that share a scale; even.
        rounding: ``"nearest"`` or ``"stochastic"``.
        seed: of the random bits.
        rank: this rank.

    Raises:
        UsageError: other bits, an odd block, an unknown rounding.

    Source: a scale per block as in Dettmers et al., arXiv 2110.02861, section 2.1; here the levels are uniform.
    """

    def __init__(
        self, bits: int = 8, block: int = _BLOCK, rounding: str = "nearest", seed: int = 0, rank: int = 0
    ) -> None:
        if bits not in (8, 4):
            raise UsageError(f"IntCodec(bits={bits})", remedy="use 8 or 4")
        if block < 2 or block % 2:
            raise UsageError(f"IntCodec(block={block})", remedy="use an even number, such as 256")
        self.bits, self._max_level = bits, 2 ** (bits - 1) - 1
        layout = BlockLayout(block, torch.int8, block * bits // 8)
        name = f"int{bits}" if block == _BLOCK else f"int{bits} in blocks of {block}"
        super().__init__(name, layout, make_rounding_bits(rounding, seed, rank))

    def encode(self, rows: Tensor, scales: Tensor, levels: Tensor, work: Tensor) -> None:
        _max_magnitude(rows, work, scales)
        # Slightly less: the largest level × scale never overflows.
        scales.mul_((1 - 2.0**-22) / self._max_level)
        scales.clamp_(min=_LEAST_SCALE)
        torch.mul(rows, scales.reciprocal(), out=work)
        if self.rounding_bits is not None:
            work.add_(self.rounding_bits.bits(work.numel(), work.device).view(work.shape), alpha=2.0**-16)
            work.clamp_(-self._max_level, self._max_level)
        work.round_()
        if self.bits == 8:
            levels.copy_(work)
        else:
            low, high = self._nibbles(work)
            levels.copy_(torch.add(low, high, alpha=16))

    def decode(self, levels: Tensor, work: Tensor) -> None:
        if self.bits == 8:
            work.copy_(levels)
            return
        both = levels.to(torch.float32)  # low + 16 × high, and |low| is at most 7
        low, high = self._nibbles(work)
        torch.mul(both, 1 / 16, out=high).round_()
        torch.sub(both, high, alpha=16, out=low)

    def error_is_finite(self, scales: Tensor, error: Tensor) -> bool:
        return math.isfinite(scales.amax())

    def _nibbles(self, work: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the numbers stored in the low and in the high four bits of their bytes."""
        low, high = work.view(*work.shape[:-1], 2, self.layout.block // 2).unbind(-2)
        return low, high


def _max_magnitude(rows: Tensor, work: Tensor, scales: Tensor) -> None:
    """Write the largest |number| of each row; NaN if the row has one."""
    torch.amax(torch.abs(rows, out=work), -1, keepdim=True, out=scales)


def _round_bf16_stochastically(rows: Tensor, rounding_bits: RoundingBits, levels: Tensor) -> None:
    """Write float32 as bfloat16, rounded away from 0 with the probability of the fraction that is cut off."""
    words = rows.view(torch.int32) + rounding_bits.bits(rows.numel(), rows.device).view_as(rows)
    words.add_(1 << 15).bitwise_right_shift_(16)
    levels.view(torch.int16).copy_(words)
    if rows.device.type != "cpu" or not math.isfinite(rows.sum()):  # the bits of some NaNs overflow
        levels.masked_fill_(rows.isnan(), math.nan)
