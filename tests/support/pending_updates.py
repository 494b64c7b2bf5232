"""Puts updates into a worker's outbox, and lists the pending ones."""

from __future__ import annotations

__all__ = ["pending_rounds", "put_update"]


def put_update(outbox, fragment, payload=b"update", **values):
    """Put the next round of a fragment, and return its number."""
    number = outbox.next_round(fragment)
    outbox.put(number, fragment, values, payload)
    return number


def pending_rounds(outbox):
    return [(update.fragment, update.round) for update in outbox.pending()]
