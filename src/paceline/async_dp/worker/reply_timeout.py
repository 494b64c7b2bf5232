"""How long a worker waits for the hub's reply before it repeats the request, from the round trips so far.

A reply may take far longer than the last ones before its request is repeated, and twice that after each repetition.
Durations are measured only where nothing was repeated: else it is unknown which of two requests was answered (Karn's
algorithm: RFC 6298, section 3).
"""

from __future__ import annotations

__all__ = ["ReplyTimeout"]


_UNKNOWN_SECONDS, _MIN_SECONDS, _MAX_DOUBLINGS = 10.0, 1.0, 4


_EARLY = 1.3  # parameters are fetched this many times the last fetch's duration before they are due


class ReplyTimeout:
    """Measures how long replies take, and how long to wait for one.

    Attributes:
        update_seconds: from the last update to its acknowledgement; 0: unknown.
        fetch_seconds: from the last fetch to its parameters; 0: unknown.
    """

    def __init__(self) -> None:
        self.update_seconds = self.fetch_seconds = 0.0
        self._doublings = 0

    def seconds(self) -> float:
        """Return how long to wait for a reply before the request is repeated."""
        took = self.fetch_seconds + self.update_seconds
        return (_MIN_SECONDS + 4 * took if took else _UNKNOWN_SECONDS) * 2**self._doublings

    def fetch_at(self, by: float) -> float:
        """Return when to fetch parameters that are due at `by`, so that they are in time and as new as possible."""
        return by - _EARLY * self.fetch_seconds

    def on_repeat(self) -> None:
        """Record that a request was repeated."""
        self._doublings = min(self._doublings + 1, _MAX_DOUBLINGS)

    def on_reply(self) -> None:
        """Record that a reply arrived."""
        self._doublings = 0
