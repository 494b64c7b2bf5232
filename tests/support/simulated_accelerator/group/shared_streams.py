"""Streams of bytes from each rank to all others, in memory that the processes share: read and written without waiting.

One machine has all ranks of a simulated group. The memory has no name in the file system, so nothing is left behind.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np
import torch.distributed as dist

__all__ = ["SharedStreams"]

CAPACITY = 1 << 22  # bytes on their way from one rank; more wait for their readers
_NUMBER_BYTES = 8


class SharedStreams:
    """Channels between the ranks of a group; in each, every rank reads all that another one writes, in order.

    Args:
        store: of the group.
        rank: this rank.
        size: number of ranks.
        channels: number of channels.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, channels: int) -> None:
        self.rank, self.size = rank, size
        numbers = channels * size * (1 + size)  # written by each rank, and read by each from each
        nbytes = numbers * _NUMBER_BYTES + channels * size * CAPACITY
        if rank == 0:
            memory = os.memfd_create("simulated-group")
            os.ftruncate(memory, nbytes)
            store.set("memory", f"/proc/{os.getpid()}/fd/{memory}")
        else:
            memory = os.open(store.get("memory").decode(), os.O_RDWR)
        mapped = np.frombuffer(mmap.mmap(memory, nbytes), dtype=np.uint8)
        if store.add("mapped", 1) == size:
            store.set("all mapped", "")
        if rank == 0:
            store.wait(["all mapped"])  # until then the others open this process's descriptor
        os.close(memory)
        counts = mapped[: numbers * _NUMBER_BYTES].view(np.uint64)
        self._written = counts[: channels * size].reshape(channels, size)
        self._read = counts[channels * size :].reshape(channels, size, size)
        self._rings = mapped[numbers * _NUMBER_BYTES :].reshape(channels, size, CAPACITY)
        self._outgoing = [bytearray() for _ in range(channels)]

    def write(self, channel: int, data: bytes) -> None:
        """Write to all other ranks; what doesn't fit follows with `flush`."""
        self._outgoing[channel] += data
        self.flush(channel)

    def flush(self, channel: int) -> bool:
        """Return whether all that was written is where the other ranks can read it."""
        outgoing = self._outgoing[channel]
        if not outgoing:
            return True
        written = int(self._written[channel, self.rank])
        readers = [
            int(self._read[channel, other, self.rank]) for other in range(self.size) if other != self.rank
        ]
        count = min(len(outgoing), CAPACITY - written + min(readers, default=written))
        ring = self._rings[channel, self.rank]
        for place, part in _pieces(written, count):
            ring[place : place + part] = np.frombuffer(outgoing[:part], dtype=np.uint8)
            del outgoing[:part]
        self._written[channel, self.rank] = written + count
        return not outgoing

    def read(self, channel: int, source: int, wanted: int, into: bytearray) -> bool:
        """Append what rank `source` wrote to `into`, up to a length of `wanted`, and return whether it has that."""
        start = int(self._read[channel, self.rank, source])
        count = min(int(self._written[channel, source]) - start, wanted - len(into))
        ring = self._rings[channel, source]
        for place, part in _pieces(start, count):
            into += ring[place : place + part].tobytes()
        if count:
            self._read[channel, self.rank, source] = start + count
        return len(into) == wanted


def _pieces(start: int, count: int) -> Sequence[tuple[int, int]]:
    """Return places and lengths in a ring of `count` bytes from number `start` on."""
    place = start % CAPACITY
    first = min(count, CAPACITY - place)
    return [piece for piece in ((place, first), (0, count - first)) if piece[1]]
