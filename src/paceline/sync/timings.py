"""What one synchronised step cost on this rank."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["SyncTimings"]


@dataclass
class SyncTimings:
    """The cost of the latest synchronised backward and the `step()` behind it.

    Attributes:
        calls: collectives launched by this rank.
        nbytes: bytes of the buffers handed to them; of compressed ones, the packets'.
        sent_nbytes: what this rank sends for them where it sends no more than it must: 2(N-1)/N of a buffer that is
            all-reduced, (N-1)/N of one that is reduce-scattered or gathered, and exactly that of packets.
        exposed_seconds: time in which this rank did nothing but wait for collectives or complete them.
        call_seconds: per collective, from its launch until this rank saw its end. With overlap that
            includes the work done in between, so it is an upper bound; without, it is the call itself.
    """

    calls: int = 0
    nbytes: float = 0
    sent_nbytes: float = 0.0
    exposed_seconds: float = 0.0
    call_seconds: list[float] = field(default_factory=list)
