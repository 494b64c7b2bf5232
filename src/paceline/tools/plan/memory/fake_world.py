"""A world whose other ranks are not there: the engine runs as it would among any number of ranks, alone.

torch's fake process group takes every message and brings none. What the engine decides by numbers from other ranks
(the order of gradients, the ledger) is answered here as if all ranks were like this one. Parameters that come out of
a rehearsal mean nothing; what memory it took does, also on tensors without memory
(`paceline.tools.plan.memory.tensor_tracer`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.distributed.device_mesh import DeviceMesh

from paceline.errors import UsageError
from paceline.parallel.engine import round_status
from paceline.parallel.engine.comm import Comm

__all__ = ["FakeComm", "fake_process_group"]


class FakeComm(Comm):
    """A wire of torch's fake process group that does what one of `backend` does.

    Args:
        backend: whose ways to rehearse: "gloo" (parts sent point to point), "nccl" or "paceline" (in place).
    """

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend
        self._native_parts = self.has_native_parts(backend)
        self._mesh = super().mesh("cpu")
        self._written: Sequence[float] = ()

    def mesh(self, device: str) -> DeviceMesh:
        """Return the mesh that was made beforehand, of real numbers."""
        return self._mesh

    def agree(self, numbers: list[list[int]], device: torch.device) -> list[list[int]]:
        """Return `numbers`: all ranks saw the same."""
        super().broadcast(torch.tensor(numbers, dtype=torch.int64, device=device))
        return numbers

    def gather_objects(self, mine: Any) -> list[Any]:
        """Return `mine`, as if from every rank."""
        return [mine] * self.size

    def write(self, numbers: list[float], place: torch.Tensor) -> None:
        """Put the numbers of this rank's ledger into `place`, and remember them."""
        super().write(numbers, place)
        self._written = numbers

    def read(self, summed: torch.Tensor) -> list[float]:
        """Return the ledger as it would be if all ranks had written what this one has."""
        return round_status.alike(self._written, self.rank, self.size)

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        return FakeWork()

    def _receive(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        return FakeWork()


@contextmanager
def fake_process_group(ranks: int, rank: int = 0) -> Iterator[None]:
    """Make the default process group one of `ranks` ranks, of which only `rank` is there.

    Raises:
        UsageError: there is a process group already.
    """
    # torch keeps it among its tests, in every wheel; importing it registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UsageError(
            "this process is a rank of a world already",
            remedy="rehearse in a process without a process group",
        )
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
