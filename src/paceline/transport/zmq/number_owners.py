"""Binds worker numbers to keys: the first key that uses a number owns it (pure)."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["NumberOwners"]


class NumberOwners:
    """Owners of worker numbers; one key may own several numbers.

    Args:
        limit: numbers per key; beyond it, the number that the key used longest ago is free again. A key thus never
            releases a number of another key.

    Example:
        >>> owners = NumberOwners()
        >>> owners.claim(7, "alice"), owners.claim(7, "bob"), owners.claim(8, "bob")
        ('alice', 'alice', 'bob')
    """

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._owner_of: dict[int, str] = {}
        self._numbers_of: dict[str, OrderedDict[int, None]] = {}  # the latest last

    def claim(self, number: int, key: str) -> str:
        """Return the key that owns a number; a free number is owned by `key` from now on."""
        owner = self._owner_of.setdefault(number, key)
        if owner == key:
            numbers = self._numbers_of.setdefault(key, OrderedDict())
            numbers[number] = None
            numbers.move_to_end(number)
            if len(numbers) > self._limit:
                released, _ = numbers.popitem(last=False)
                del self._owner_of[released]
        return owner
