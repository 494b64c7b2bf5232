"""Codecs: float32 numbers to fewer bytes and back, for gradients and pseudo-gradients.

A codec turns numbers into a *packet*: bytes of a size that depends on how many numbers there are, and on nothing else,
so that all ranks know it beforehand. Blocks of neighbouring numbers share a scale, which lies before the levels:

    packet of Blocks, int8:  float32 scales, one a block | pad | int8 levels | pad       (each part begins at 16 bytes)

What gets lost is the *error*, values − decompressed: error feedback (`feedback.py`) sends it the next time. Sums are
float32: `add` decompresses and adds in one go, so a sum over ranks never rounds to levels in between.

[Note: not finite] A NaN or an infinity makes its block's scale not finite, and with it all numbers that come out of
that block: who looks finds them. The error there is 0, or error feedback would never get rid of it. bfloat16 has no
blocks: there it holds for each number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.errors import UsageError, unknown
from paceline.parallel.compression.blockwise import BlockLayout, BlockwiseCodec, padded, part
from paceline.parallel.compression.stochastic_rounding import RoundingBits, rounding_bits_of

__all__ = ["Codec", "HalfCodec", "IntCodec", "RawCodec", "ratio"]

_LEAST_SCALE = 2.0**-120
"""Smaller scales have no reciprocal to trust: numbers of less than half of it come out as 0."""

_BLOCK = 256
"""Numbers that share a scale in int8 and int4, if nothing else is said."""

_FP16_BLOCK = 1024
"""Numbers that share a scale in fp16: 4 bytes beside 2048."""

_FP16_EXPONENT = 14
"""In fp16 a block's largest number is brought between 2¹⁴ and 2¹⁵: nothing overflows, and as little as can be is
subnormal."""


class Codec(Protocol):
    """Turns float32 numbers into bytes and back.

    Attributes:
        name: "int8", …: equal for codecs that understand one another's packets.
    """

    @property
    def name(self) -> str: ...

    def nbytes(self, numel: int) -> int:
        """Return the size of a packet of `numel` numbers: a multiple of 16."""
        ...

    def compress(self, values: Tensor, packet: Tensor, error: Tensor | None = None) -> None:
        """Fill a packet.

        Args:
            values: 1-D, contiguous float32.
            packet: 1-D uint8 of ``nbytes(len(values))`` that begins at a multiple of 16 bytes.
            error: where values − decompressed goes; may be `values` itself. See [Note: not finite].
        """
        ...

    def decompress(self, packet: Tensor, into: Tensor) -> None:
        """Write the numbers of a packet."""
        ...

    def add(self, packet: Tensor, onto: Tensor, weight: float = 1.0) -> None:
        """Add weight × the numbers of a packet onto others, in float32."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what the next packets depend on beside the values; empty where that is nothing."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        ...


def ratio(codec: Codec, numel: int) -> float:
    """Return how many times smaller a packet is than `numel` float32 numbers.

    Example:
        >>> round(ratio(BlockCodec(bits=8), 1 << 20), 2)
        3.94
    """
    return 4 * numel / codec.nbytes(numel)


@dataclass(frozen=True)
class RawCodec:
    """Numbers as they are, so that the uncompressed case goes through the same door.

    Args:
        dtype: float32 or float64; values, and what they are added onto, have it too.
    """

    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.float64):
            raise UsageError(f"Raw({self.dtype})", remedy="use torch.float32 or torch.float64")

    @property
    def name(self) -> str:
        return "fp64" if self.dtype == torch.float64 else "fp32"

    def nbytes(self, numel: int) -> int:
        return padded(numel * self.dtype.itemsize)

    def compress(self, values: Tensor, packet: Tensor, error: Tensor | None = None) -> None:
        part(packet, 0, len(values), self.dtype).copy_(values)
        if len(packet) > values.nbytes:
            packet[values.nbytes :].zero_()
        if error is not None:
            error.zero_()

    def decompress(self, packet: Tensor, into: Tensor) -> None:
        into.copy_(part(packet, 0, len(into), self.dtype))

    def add(self, packet: Tensor, onto: Tensor, weight: float = 1.0) -> None:
        onto.add_(part(packet, 0, len(onto), self.dtype), alpha=weight)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class HalfCodec(BlockwiseCodec):
    """Two bytes a number: bfloat16, rounded to the nearest (ties to even), or float16 with a scale a block.

    The scales are powers of two, so they cost no precision: numbers down to 2⁻²⁸ of their block's largest keep all 11
    bits. A number that rounds beyond the largest float32 becomes infinite.

    Args:
        kind: ``"bf16"`` or ``"fp16"``.
        rounding: ``"nearest"``, or ``"stochastic"`` (bf16 only): see `dither.py`.
        seed: of the random bits. rank: whose they are.

    Raises:
        UsageError: an unknown kind or rounding, or stochastic fp16.
    """

    def __init__(self, kind: str = "bf16", rounding: str = "nearest", seed: int = 0, rank: int = 0) -> None:
        if kind not in ("bf16", "fp16"):
            raise unknown("half precision", kind, ["bf16", "fp16"])
        if kind == "fp16" and rounding == "stochastic":
            raise UsageError("fp16 rounds to the nearest only", remedy='use "bf16" for stochastic rounding')
        scaled = kind == "fp16"
        layout = (
            BlockLayout(_FP16_BLOCK, torch.float16, _FP16_BLOCK)
            if scaled
            else BlockLayout(1, torch.bfloat16, 1, False)
        )
        super().__init__(kind, layout, rounding_bits_of(rounding, seed, rank))

    def encode(self, rows: Tensor, scales: Tensor, levels: Tensor, work: Tensor) -> None:
        if self.layout.scaled:
            _largest(rows, work, scales)
            scales.clamp_(min=2.0 ** (_FP16_EXPONENT - 126))
            scales.view(torch.int32).bitwise_and_(0x7F80_0000)  # the power of two below; NaN becomes infinity
            scales.mul_(2.0**-_FP16_EXPONENT)
            levels.copy_(torch.mul(rows, scales.reciprocal(), out=work))
        elif self.rounding_bits is not None:
            _dithered_bf16(rows, self.rounding_bits, levels)
        else:
            levels.copy_(rows)
        work.copy_(levels)

    def surely_finite(self, scales: Tensor, error: Tensor) -> bool:
        if self.layout.scaled:  # with the last power of two, a number may round to infinity
            return scales.amax().item() < 2.0 ** (127 - _FP16_EXPONENT)
        return math.isfinite(error.sum())


class IntCodec(BlockwiseCodec):
    """Whole levels of 8 or 4 bits, from −127 to 127 or −7 to 7, and a float32 scale for each block.

    A level is the block's largest |number| / 127 or / 7, and an error at most half of that. int4 lies two to a byte:
    number i and number i + block/2 of a block.

    Args:
        bits: 8 or 4.
        block: how many neighbouring numbers share a scale; even.
        rounding: ``"nearest"``, or ``"stochastic"``: see `dither.py`.
        seed: of the random bits. rank: whose they are.

    Raises:
        UsageError: other bits, an odd block, an unknown rounding.

    Source: a scale for each block as in Dettmers et al., arXiv 2110.02861, section 2.1; here the levels are uniform.
    """

    def __init__(
        self, bits: int = 8, block: int = _BLOCK, rounding: str = "nearest", seed: int = 0, rank: int = 0
    ) -> None:
        if bits not in (8, 4):
            raise UsageError(f"Blocks(bits={bits})", remedy="use 8 or 4")
        if block < 2 or block % 2:
            raise UsageError(f"Blocks(block={block})", remedy="use an even number, such as 256")
        self.bits, self._most = bits, 2 ** (bits - 1) - 1
        layout = BlockLayout(block, torch.int8, block * bits // 8)
        name = f"int{bits}" if block == _BLOCK else f"int{bits} in blocks of {block}"
        super().__init__(name, layout, rounding_bits_of(rounding, seed, rank))

    def encode(self, rows: Tensor, scales: Tensor, levels: Tensor, work: Tensor) -> None:
        _largest(rows, work, scales)
        scales.mul_((1 - 2.0**-22) / self._most)  # a little less: the largest level × scale never overflows
        scales.clamp_(min=_LEAST_SCALE)
        torch.mul(rows, scales.reciprocal(), out=work)
        if self.rounding_bits is not None:
            work.view(-1).add_(self.rounding_bits.bits(work.numel(), work.device), alpha=2.0**-16)
            work.clamp_(-self._most, self._most)
        work.round_()
        if self.bits == 8:
            levels.copy_(work)
        else:
            low, high = self._halves(work)
            levels.copy_(torch.add(low, high, alpha=16))

    def decode(self, levels: Tensor, work: Tensor) -> None:
        if self.bits == 8:
            work.copy_(levels)
            return
        both = levels.to(torch.float32)  # low + 16 × high, and |low| is at most 7
        low, high = self._halves(work)
        torch.mul(both, 1 / 16, out=high).round_()
        torch.sub(both, high, alpha=16, out=low)

    def surely_finite(self, scales: Tensor, error: Tensor) -> bool:
        return math.isfinite(scales.amax())

    def _halves(self, work: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers that lie in the low, and in the high, four bits of their bytes."""
        low, high = work.view(-1, 2, self.layout.block // 2).unbind(1)
        return low, high


def _largest(rows: Tensor, work: Tensor, scales: Tensor) -> None:
    """Write the largest |number| of each row; NaN where there is one."""
    torch.amax(torch.abs(rows, out=work), 1, keepdim=True, out=scales)


def _dithered_bf16(rows: Tensor, dither: RoundingBits, levels: Tensor) -> None:
    """Write float32 as bfloat16, rounded away from 0 as likely as is the part of a step that is cut off."""
    words = rows.view(torch.int32) + dither.bits(rows.numel(), rows.device).view_as(rows)
    words.add_(1 << 15).bitwise_right_shift_(16)
    levels.view(torch.int16).copy_(words)
    if rows.device.type != "cpu" or not math.isfinite(rows.sum()):  # bits of some NaNs run over
        levels.masked_fill_(rows.isnan(), math.nan)
