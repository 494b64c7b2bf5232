"""Letters into a worker's outbox, and which wait there."""

from __future__ import annotations

__all__ = ["offer", "places"]


def offer(outbox, fragment, payload=b"update", **values):
    """Put the next round of a fragment, and return its number."""
    number = outbox.next_round(fragment)
    outbox.put(number, fragment, values, payload)
    return number


def places(outbox):
    return [(letter.fragment, letter.round) for letter in outbox.pending()]
