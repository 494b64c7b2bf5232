"""The codecs of `paceline.parallel` in their plain formulation: whole tensors, one line after the other.

They do the same work, but for details: packing neighbours, a uniform random number for each number, indices as int32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.compression.codecs import Codec, HalfCodec, IntCodec, RawCodec
from paceline.parallel.compression.topk import TopKCodec

BLOCK = 256

Plain = tuple[Callable[[Tensor], tuple[Any, Tensor]], Callable[[Any], Tensor]]
"""Compress, from numbers to a packet of any type and the error; decompress, from the packet to numbers."""


def plain_of(codec: Codec, numel: int) -> Plain:
    """Return the plain formulation of a codec."""
    if isinstance(codec, RawCodec):
        return lambda values: (values.clone(), torch.zeros_like(values)), lambda packet: packet
    if isinstance(codec, HalfCodec):
        dtype = torch.float16 if codec.name == "fp16" else torch.bfloat16
        return half(dtype, codec.rounding_bits is not None)
    if isinstance(codec, IntCodec):
        return blocks(codec.bits, codec.rounding_bits is not None)
    assert isinstance(codec, TopKCodec)
    return top(codec.count(numel), numel)


def half(dtype: torch.dtype, dithered: bool) -> Plain:
    """Return bfloat16 or (without scales) float16."""

    def compress(values: Tensor) -> tuple[Tensor, Tensor]:
        if dithered:
            bits = values.view(torch.int32) + torch.randint(0, 1 << 16, values.shape, dtype=torch.int32)
            packet = (bits >> 16).to(torch.int16).view(dtype)
        else:
            packet = values.to(dtype)
        return packet, values - packet.float()

    return compress, lambda packet: packet.float()


def blocks(bits: int, dithered: bool) -> Plain:
    """Return levels with a scale for each block; of 4 bits, neighbours share a byte."""
    most = 127 if bits == 8 else 7

    def compress(values: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        rows = values.view(-1, BLOCK)
        scales = rows.abs().amax(1, keepdim=True) / most
        exact = rows / scales
        levels = torch.floor(exact + torch.rand_like(exact)) if dithered else exact.round()
        levels = levels.clamp(-most, most).to(torch.int8)
        error = values - (levels * scales).view(-1)
        return (scales, levels if bits == 8 else (levels[:, ::2] & 15) | (levels[:, 1::2] << 4)), error

    def decompress(packet: tuple[Tensor, Tensor]) -> Tensor:
        scales, levels = packet
        if bits == 4:
            levels = torch.stack([(levels << 4) >> 4, levels >> 4], dim=2).view(-1, BLOCK)
        return (levels * scales).view(-1)

    return compress, decompress


def top(k: int, numel: int) -> Plain:
    """Return the largest numbers, found by torch.topk."""

    def compress(values: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        indices = values.abs().topk(k, sorted=False).indices
        packet = values[indices].half()
        error = values.clone()
        error[indices] -= packet.float()
        return (indices.int(), packet), error

    def decompress(packet: tuple[Tensor, Tensor]) -> Tensor:
        indices, values = packet
        return torch.zeros(numel).index_put_((indices.long(),), values.float())

    return compress, decompress
