"""A number that tells whether two tensors hold the same bits: xxh3 on the CPU, a sum of mixed words on a GPU.

[Note: digests on a GPU] Each word of the tensor, with its position, goes through a one-to-one mixing of 64-bit
integers (multiply, shift, exclusive or: as in SplitMix64, Steele, Lea and Flood 2014), and the results are added up,
modulo 2⁶⁴. Integers add up the same in any order, so the digest does not depend on how the device splits the sum. As
each step is one-to-one, one changed word always changes the digest; what several changes cancel is chance, 2⁻⁶⁴.
The host does not wait: the digest stays on the device until it is sent.
"""

from __future__ import annotations

import torch
import xxhash

__all__ = ["digest_of", "mixed_sum"]

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22  # words that are mixed at a time: 32 MiB of memory each for a few tensors
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as int64
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def digest_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a digest of the bits of a tensor, in its dtype and order of elements: a scalar int64 on its device."""
    words = _words_of(tensor.detach())
    if words.device.type == "cpu":
        number = xxhash.xxh3_64_intdigest(words.numpy().data)
        return torch.tensor(number - (1 << 63), dtype=torch.int64)
    return mixed_sum(words)


def mixed_sum(words: torch.Tensor) -> torch.Tensor:
    """Return the sum of 1-D integers, each mixed with its position; see [Note: digests on a GPU]."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _CHUNK):
        piece = words[start : start + _CHUNK]
        positions = torch.arange(start + 1, start + 1 + piece.numel(), device=words.device)
        part = positions.mul_(_STEP).add_(piece)
        for factor, shift in ((_FIRST, 30), (_SECOND, 27)):
            part ^= (part >> shift) & ((1 << (64 - shift)) - 1)
            part *= factor
        part ^= (part >> 31) & ((1 << 33) - 1)
        total += part.sum()
    return total


def _words_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements' bits as 1-D integers, in the order of elements."""
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = flat.contiguous().reshape(-1)
    return flat.view(_WORDS[flat.element_size()])
