"""A shuffle that is computed, not listed: a keyed bijection of ``range(size)``, for any size.

A number is split into a row and a column of a table with √size columns. In turn the row is moved on by a
mixture of the column, and the column by one of the row: a Feistel network over whole numbers. The table is at
most one row larger than `size`; a number that lands outside is sent through again until it lands inside
("cycle walking"), which is again a bijection. Source: Black and Rogaway, "Ciphers with arbitrary finite
domains", CT-RSA 2002. Everything is integer arithmetic modulo 2^64: the same on every platform.

On a table of few rows and columns such a network reaches only some of the permutations. So rows of up to 4096
elements are sorted by mixed numbers instead, which takes 64 KB at most.
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

__all__ = ["LARGEST", "Shuffle"]

Numbers = NDArray[np.int64]

LARGEST = 1 << 60
"""Most elements that a shuffle permutes."""

LISTED = 4096

ROUNDS = 6


@dataclass(frozen=True)
class Shuffle:
    """A permutation of ``range(size)`` that takes no memory.

    Attributes:
        size: number of elements, 0 … 2^60.
        key: two keys give two unrelated permutations.

    Raises:
        UsageError: a size out of range.

    Example:
        >>> shuffle = Shuffle(10**12, key=7)
        >>> int(shuffle.inverse(shuffle(np.array([123456789])))[0])
        123456789
    """

    size: int
    key: int

    def __post_init__(self) -> None:
        if not 0 <= self.size <= LARGEST:
            raise UsageError(f"can't shuffle {self.size} elements", remedy=f"0 to {LARGEST} are possible")

    def __call__(self, places: Numbers) -> Numbers:
        """Return what stands at `places` of the shuffled row, each in ``range(size)``."""
        if self.size <= LISTED:
            return self._listed[0][places]
        return self._walk(places, self._there)

    def inverse(self, elements: Numbers) -> Numbers:
        """Return at which place each of `elements` stands."""
        if self.size <= LISTED:
            return self._listed[1][elements]
        return self._walk(elements, self._back)

    @cached_property
    def _listed(self) -> tuple[Numbers, Numbers]:
        """What stands at each place, and where each element stands."""
        order = np.argsort(
            keyed_hash(np.arange(self.size, dtype=np.uint64), derive_key(self.key)), kind="stable"
        )
        return order, np.argsort(order, kind="stable")

    @cached_property
    def _table(self) -> tuple[np.uint64, np.uint64]:
        """(rows, columns): both below 2^31, and one row less would be too small."""
        columns = math.isqrt(max(self.size, 1) - 1) + 1
        return np.uint64(-(-self.size // columns)), np.uint64(columns)

    @cached_property
    def _keys(self) -> list[int]:
        return [derive_key(self.key, number) for number in range(ROUNDS)]

    def _walk(self, numbers: Numbers, once: Callable[[NDArray[np.uint64]], NDArray[np.uint64]]) -> Numbers:
        found = once(numbers.view(np.uint64))
        outside = np.flatnonzero(found >= self.size)
        while len(outside):
            again = once(found[outside])
            found[outside] = again
            outside = outside[again >= self.size]
        return found.view(np.int64)

    def _there(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        rows, columns = self._table
        row, column = np.divmod(numbers, columns)
        for number, key in enumerate(self._keys):
            if number % 2:
                column = _moved(column, _below(columns, row, key), columns)
            else:
                row = _moved(row, _below(rows, column, key), rows)
        row *= columns
        row += column
        return row

    def _back(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        rows, columns = self._table
        row, column = np.divmod(numbers, columns)
        for number, key in reversed(list(enumerate(self._keys))):
            if number % 2:
                column = _moved(column, columns - _below(columns, row, key), columns)
            else:
                row = _moved(row, rows - _below(rows, column, key), rows)
        row *= columns
        row += column
        return row


def _below(limit: np.uint64, numbers: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Return a mixture of each of `numbers` in ``range(limit)``; `limit` is below 2^31.

    Two multiplications and a shift between them: weaker than `keyed_hash`, but every number passes several rounds.
    """
    z = numbers + np.uint64(key)
    z *= np.uint64(0x9E3779B97F4A7C15)
    z ^= z >> np.uint64(32)
    z *= np.uint64(0xD6E8FEB86659FD93)
    z >>= np.uint64(33)
    z *= limit
    z >>= np.uint64(31)
    return z


def _moved(numbers: NDArray[np.uint64], by: NDArray[np.uint64], limit: np.uint64) -> NDArray[np.uint64]:
    """Return the sum of `numbers`, each below the `limit`, and `by`, each at most it, modulo it; overwrites `by`.

    To take the limit off a sum that is below it gives a very large number, so the smaller of both is right.
    """
    by += numbers
    return np.minimum(by, by - limit, out=by)
