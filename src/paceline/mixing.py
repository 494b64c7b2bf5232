"""Random numbers that are computed from where they are used: the same on every platform, in any order.

Everything is integer arithmetic modulo 2^64.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["key_of", "mixed"]


def mixed(numbers: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Return 64 mixed bits for each of `numbers` under `key`: the finaliser of SplitMix64.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    z = numbers + np.uint64(key & (2**64 - 1))
    z *= np.uint64(0x9E3779B97F4A7C15)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def key_of(*parts: int) -> int:
    """Return a 64-bit key that depends on all `parts`, in their order."""
    key = 0
    for part in parts:
        key = int(mixed(np.array([part & (2**64 - 1)], np.uint64), key ^ 0x5851F42D4C957F2D)[0])
    return key
