"""A shuffle that is computed instead of stored: a keyed bijection of ``range(size)``, for any size.

An index is split into a row and a column of a table with √size columns. In turn the row is shifted by a hash of the
column, and the column by a hash of the row: a Feistel network over integers. The table is at most one row larger than
`size`; an index that lands outside is mapped again until it lands inside ("cycle walking"), which is again a
bijection. Source: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002. Everything is integer
arithmetic modulo 2^64: the same on every platform.

On a table of few rows and columns such a network reaches only some of the permutations. So up to 4096 elements are
sorted by hashes instead, which takes 64 KB at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paceline._core.keyed_random import derive_key, keyed_hash
from paceline.errors import UsageError

__all__ = ["MAX_SIZE", "Indices", "Shuffle"]

Indices = NDArray[np.int64]

MAX_SIZE = 1 << 60
MAX_LISTED = 4096
"""Largest size that is stored as a list."""

_ROUNDS = 6


@dataclass(frozen=True)
class Shuffle:
    """A permutation of ``range(size)`` in constant memory.

    Attributes:
        size: number of elements, 0 … 2^60.
        key: different keys give unrelated permutations.

    Raises:
        UsageError: `size` is out of range.

    Example:
        >>> shuffle = Shuffle(10**12, key=7)
        >>> int(shuffle.inverse(shuffle(np.array([123456789])))[0])
        123456789
    """

    size: int
    key: int

    def __post_init__(self) -> None:
        if not 0 <= self.size <= MAX_SIZE:
            raise UsageError(f"can't shuffle {self.size} elements", remedy=f"pass 0 to {MAX_SIZE}")

    def __call__(self, positions: Indices) -> Indices:
        """Return the elements at `positions` of the shuffled order."""
        if self.size <= MAX_LISTED:
            return self._listed[0][positions]
        return self._walk(positions, self._forward)

    def inverse(self, elements: Indices) -> Indices:
        """Return the positions of `elements` in the shuffled order."""
        if self.size <= MAX_LISTED:
            return self._listed[1][elements]
        return self._walk(elements, self._backward)

    @cached_property
    def _listed(self) -> tuple[Indices, Indices]:
        """The element at each position, and the position of each element."""
        order = np.argsort(
            keyed_hash(np.arange(self.size, dtype=np.uint64), derive_key(self.key)), kind="stable"
        )
        return order, np.argsort(order, kind="stable")

    @cached_property
    def _table(self) -> tuple[np.uint64, np.uint64]:
        """(rows, columns): both below 2^31; with one row less the table would be too small."""
        columns = math.isqrt(max(self.size, 1) - 1) + 1
        return np.uint64(-(-self.size // columns)), np.uint64(columns)

    @cached_property
    def _keys(self) -> list[int]:
        return [derive_key(self.key, number) for number in range(_ROUNDS)]

    def _walk(self, indices: Indices, step: Callable[[NDArray[np.uint64]], NDArray[np.uint64]]) -> Indices:
        found = step(indices.view(np.uint64))
        outside = np.flatnonzero(found >= self.size)
        while len(outside):
            again = step(found[outside])
            found[outside] = again
            outside = outside[again >= self.size]
        return found.view(np.int64)

    def _forward(self, indices: NDArray[np.uint64]) -> NDArray[np.uint64]:
        rows, columns = self._table
        row, column = np.divmod(indices, columns)
        for number, key in enumerate(self._keys):
            if number % 2:
                column = _add_modulo(column, _hash_below(columns, row, key), columns)
            else:
                row = _add_modulo(row, _hash_below(rows, column, key), rows)
        row *= columns
        row += column
        return row

    def _backward(self, indices: NDArray[np.uint64]) -> NDArray[np.uint64]:
        rows, columns = self._table
        row, column = np.divmod(indices, columns)
        for number, key in reversed(list(enumerate(self._keys))):
            if number % 2:
                column = _add_modulo(column, columns - _hash_below(columns, row, key), columns)
            else:
                row = _add_modulo(row, rows - _hash_below(rows, column, key), rows)
        row *= columns
        row += column
        return row


def _hash_below(limit: np.uint64, values: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Return a hash of each of `values` in ``range(limit)``; `limit` is below 2^31.

    Two multiplications and a shift between them: weaker than `keyed_hash`, but every index passes several rounds.
    """
    z = values + np.uint64(key)
    z *= np.uint64(0x9E3779B97F4A7C15)
    z ^= z >> np.uint64(32)
    z *= np.uint64(0xD6E8FEB86659FD93)
    z >>= np.uint64(33)
    z *= limit
    z >>= np.uint64(31)
    return z


def _add_modulo(
    values: NDArray[np.uint64], shift: NDArray[np.uint64], limit: np.uint64
) -> NDArray[np.uint64]:
    """Return values + shift modulo `limit`, where values < limit and shift ≤ limit; overwrites `shift`.

    Subtracting the limit from a smaller sum wraps to a very large number, so the smaller of both is right.
    """
    shift += values
    return np.minimum(shift, shift - limit, out=shift)
