"""A bad network in virtual time: envelopes that are lost, repeated, held back or damaged, drawn by seed and count.

A damaged envelope is laid out as it travels, one bit of it is flipped, and it is read as a receiver reads it: marks and
checksums find the damage, and it is dropped.
"""

from __future__ import annotations

from collections import Counter

from paceline._core.keyed_random import derive_key
from paceline.errors import EnvelopeError, UsageError
from paceline.transport.envelope import decode, encode
from paceline.transport.transport_interface import Envelope

__all__ = ["RandomFaults"]

_WAYS = ("lost", "repeated", "late", "damaged")
_MOST_LATE_SECONDS = 5.0


class RandomFaults:
    """Spoils a share of all envelopes; made anew for every run, since it counts them.

    Args:
        share: of envelopes, from 0 to below 1; a quarter each is lost, repeated, late by up to 5 s, and damaged.
        seed: of what is drawn.

    Attributes:
        counts: what was done, by its name; "let through": damaged ones that no checksum found.

    Raises:
        UsageError: the share is out of range.
    """

    def __init__(self, share: float, seed: int = 0) -> None:
        if not 0 <= share < 1:
            raise UsageError(
                f"{share!r} of all messages spoilt", remedy="give a share from 0 to below 1, or 1%"
            )
        self._share, self._key, self._seen = share, derive_key(seed, 5), 0
        self.counts: Counter[str] = Counter()

    def __call__(self, envelope: Envelope) -> list[tuple[float, Envelope]]:
        """Return what arrives in the envelope's place, each so many seconds later."""
        self._seen += 1
        drawn = derive_key(self._seen, after=self._key)
        if (drawn >> 11) / 2**53 >= self._share:
            return [(0.0, envelope)]
        drawn = derive_key(1, after=drawn)
        way = _WAYS[drawn % len(_WAYS)]
        self.counts[way] += 1
        later = _MOST_LATE_SECONDS * (drawn >> 32) / 2**32
        if way == "lost":
            return []
        if way == "repeated":
            return [(0.0, envelope), (later, envelope)]
        if way == "late":
            return [(later, envelope)]
        return self._damaged(envelope, drawn >> 3)

    def _damaged(self, envelope: Envelope, drawn: int) -> list[tuple[float, Envelope]]:
        data = bytearray().join(encode(envelope.header, envelope.payload))
        bit = drawn % (8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        try:
            header, payload = decode(data)
        except EnvelopeError:
            return []
        self.counts["let through"] += 1
        return [(0.0, Envelope(header, payload))]
