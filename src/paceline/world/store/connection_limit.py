"""Limits the connections that have not authenticated yet (pure).

libzmq accepts every caller and waits for its handshake. So the server counts callers, and when there are too many it
drops the oldest one of the address with the most, which leaves room for the callers of other addresses. A caller that
holds the key needs a few milliseconds; one that is dropped tries again.
"""

from __future__ import annotations

from collections import defaultdict

__all__ = ["ConnectionLimit"]


class ConnectionLimit:
    """Connections that have not authenticated, by their descriptor.

    Args:
        limit: largest number of them.

    Example:
        >>> limit = ConnectionLimit(2)
        >>> [limit.add(1, "10.0.0.1"), limit.add(2, "10.0.0.2"), limit.add(3, "10.0.0.1")]
        [None, None, 1]
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._source_of: dict[int, str] = {}
        self._of_source: defaultdict[str, dict[int, None]] = defaultdict(dict)  # the oldest first

    def add(self, fd: int, source: str) -> int | None:
        """Record a connection from an address, and return one to drop; None: there is room."""
        self.remove(fd)
        self._source_of[fd] = source
        self._of_source[source][fd] = None
        if len(self._source_of) <= self._limit:
            return None
        most = max(self._of_source.values(), key=len)
        dropped = next(iter(most))
        self.remove(dropped)
        return dropped

    def remove(self, fd: int) -> None:
        """Forget a connection that has authenticated or is closed."""
        source = self._source_of.pop(fd, None)
        if source is not None:
            of_source = self._of_source[source]
            del of_source[fd]
            if not of_source:
                del self._of_source[source]

    def __len__(self) -> int:
        return len(self._source_of)
