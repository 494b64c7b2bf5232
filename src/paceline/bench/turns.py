"""Who runs when: contestants in turn, so that a disturbance meets all of them."""

from __future__ import annotations

__all__ = ["turn_order"]


def turn_order(contestants: int, turn: int) -> list[int]:
    """Return the order of contestants in round number `turn`.

    Each order is followed by the same one backwards, so that over an even number of turns any two contestants
    go first equally often, and the next pair of turns begins with another contestant.

    Example:
        >>> turn_order(3, 0), turn_order(3, 1), turn_order(3, 2)
        ([0, 1, 2], [2, 1, 0], [1, 2, 0])
    """
    order = [(turn // 2 + place) % contestants for place in range(contestants)]
    return order if turn % 2 == 0 else order[::-1]
