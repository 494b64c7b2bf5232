"""Counter-based random numbers: hashes of where they are used, the same on every platform and in any order.

All arithmetic is on integers modulo 2^64.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["derive_key", "keyed_hash"]

_ALL_BITS = 2**64 - 1


def keyed_hash(numbers: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Return 64 mixed bits for each of `numbers` under `key`: the finaliser of SplitMix64.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    z = numbers + np.uint64(key & _ALL_BITS)
    z *= np.uint64(0x9E3779B97F4A7C15)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def derive_key(*parts: int, after: int = 0) -> int:
    """Return a 64-bit key that depends on all `parts`, in their order.

    Args:
        parts: any numbers.
        after: key of the parts before: ``derive_key(3, after=derive_key(1, 2))`` is ``derive_key(1, 2, 3)``.
    """
    key = after
    for part in parts:
        key = _hash_one(part, key ^ 0x5851F42D4C957F2D)
    return key


def _hash_one(number: int, key: int) -> int:
    """Return `keyed_hash` of one number; Python's integers are faster than an array of one."""
    z = (number + key) * 0x9E3779B97F4A7C15 & _ALL_BITS
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _ALL_BITS
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _ALL_BITS
    return z ^ z >> 31
