"""Fault injection for virtual networks: lost, repeated, late and damaged envelopes, drawn by seed and count.

A damaged envelope is encoded, has one bit flipped, and is decoded as by a receiver: markers and checksums detect the
damage, and the envelope is dropped.
"""

from __future__ import annotations

from collections import Counter

from paceline._core.keyed_random import derive_key
from paceline.errors import EnvelopeError, UsageError
from paceline.transport.envelope import decode, encode
from paceline.transport.transport_interface import Envelope

__all__ = ["RandomFaults"]

_KINDS = ("lost", "repeated", "late", "damaged")
_MOST_LATE_SECONDS = 5.0


class RandomFaults:
    """Injects faults into a share of all envelopes; counts them, so create one per run.

    Args:
        share: share of envelopes, 0 to below 1; a quarter each is lost, repeated, late by up to 5 s, and damaged.
        seed: seed of the random choices.

    Attributes:
        counts: faults by kind; "let through": damaged envelopes that no checksum detected.

    Raises:
        UsageError: the share is out of range.
    """

    def __init__(self, share: float, seed: int = 0) -> None:
        if not 0 <= share < 1:
            raise UsageError(
                f"faults in {share!r} of all messages", remedy="give a share from 0 to below 1, or 1%"
            )
        self._share, self._key, self._seen = share, derive_key(seed, 5), 0
        self.counts: Counter[str] = Counter()

    def __call__(self, envelope: Envelope) -> list[tuple[float, Envelope]]:
        """Return (delay in seconds, envelope) of each envelope that arrives instead."""
        self._seen += 1
        drawn = derive_key(self._seen, after=self._key)
        if (drawn >> 11) / 2**53 >= self._share:
            return [(0.0, envelope)]
        drawn = derive_key(1, after=drawn)
        kind = _KINDS[drawn % len(_KINDS)]
        self.counts[kind] += 1
        later = _MOST_LATE_SECONDS * (drawn >> 32) / 2**32
        if kind == "lost":
            return []
        if kind == "repeated":
            return [(0.0, envelope), (later, envelope)]
        if kind == "late":
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
