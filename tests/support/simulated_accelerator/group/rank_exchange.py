"""How the ranks of a simulated group exchange what a collective reads, without blocking the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from simulated_accelerator.group.shared_streams import SharedStreams

__all__ = ["Exchange", "RankExchange", "bytes_of"]

HEADER_BYTES = 264
_LENGTH_BYTES = 8
_CALLS, _DATA = range(2)  # channels: calls are in the order of the host, data in that of the device


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a contiguous CPU tensor as bytes, without a copy."""
    return tensor.reshape(-1).view(torch.uint8)


class RankExchange:
    """Connections of one rank to the others of its group.

    Attributes:
        failure: the first error; nothing works afterwards.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.failure: Exception | None = None
        self.streams = SharedStreams(store, rank, size, channels=2)
        self._store = dist.PrefixStore("messages", store)
        self._messages: dict[tuple[int, int], int] = {}

    def message(self, source: int, target: int) -> tuple[Callable[[Tensor], Any], Callable[[], bool], Any]:
        """Return how to send, to look for and to read the next message between two ranks."""
        number = self._messages[source, target] = self._messages.get((source, target), 0) + 1
        key, store = f"{source}/{target}/{number}", self._store

        def read() -> Tensor:
            data = bytearray(store.get(key))
            store.delete_key(key)
            return torch.frombuffer(data, dtype=torch.uint8)[:-1]

        return lambda data: store.set(key, bytes(data.tolist()) + b"."), lambda: store.check([key]), read


class Exchange:
    """One collective's: what each rank calls, then what each rank sends. Calls are announced at once."""

    def __init__(self, ranks: RankExchange, call: str, nbytes: int) -> None:
        self._ranks, self._call = ranks, call
        text = call.encode()[: HEADER_BYTES - _LENGTH_BYTES].ljust(HEADER_BYTES - _LENGTH_BYTES)
        self._mine = text + nbytes.to_bytes(_LENGTH_BYTES, "little")
        ranks.streams.write(_CALLS, self._mine)
        self._others = [rank for rank in range(ranks.size) if rank != ranks.rank]
        self._headers = {rank: bytearray() for rank in self._others}
        self._data = {rank: bytearray() for rank in self._others}
        self._sizes: list[int] | None = None

    def send(self, data: Tensor) -> None:
        """Send the bytes of this rank, after those of collectives before."""
        self._sent = data
        self._ranks.streams.write(_DATA, data.numpy().tobytes())

    def done(self) -> bool:
        """Return whether all has arrived and been sent.

        Raises:
            RuntimeError: a rank calls something else.
        """
        streams = self._ranks.streams
        sent = streams.flush(_CALLS) & streams.flush(_DATA)
        if self._sizes is None:
            read = [streams.read(_CALLS, rank, HEADER_BYTES, self._headers[rank]) for rank in self._others]
            if not all(read):
                return False
            self._sizes = self._compare()
        sizes = self._sizes
        read = [streams.read(_DATA, rank, sizes[rank], self._data[rank]) for rank in self._others]
        return sent and all(read)

    def _compare(self) -> list[int]:
        headers = [bytes(self._headers.get(rank, self._mine)) for rank in range(self._ranks.size)]
        calls = [header[:-_LENGTH_BYTES].decode().strip() for header in headers]
        for rank, call in enumerate(calls):
            if call != calls[0]:
                raise RuntimeError(f"ranks call different collectives: rank 0 {calls[0]}, rank {rank} {call}")
        return [int.from_bytes(header[-_LENGTH_BYTES:], "little") for header in headers]

    def missing(self) -> str:
        """Return which ranks have not called it yet, or not sent."""
        silent = [rank for rank in self._others if len(self._headers[rank]) < HEADER_BYTES]
        if silent:
            return f"ranks {', '.join(map(str, silent))} have not called it"
        late = [
            rank
            for rank in self._others
            if len(self._data[rank]) < (self._sizes or [1] * self._ranks.size)[rank]
        ]
        return f"the devices of ranks {', '.join(map(str, late))} have not reached it"

    def read(self) -> Sequence[Tensor]:
        """Return the bytes that each rank sent."""
        arrived = {
            rank: torch.frombuffer(data + b".", dtype=torch.uint8)[:-1] for rank, data in self._data.items()
        }
        return [arrived.get(rank, self._sent) for rank in range(self._ranks.size)]
