"""Fake process group and communicator: one process runs the engine as one of any number of ranks.

torch's fake process group accepts every message and delivers none. Where the engine decides by numbers from other ranks
(order of gradients, round status), they are taken to equal this rank's. The resulting parameters are meaningless; the
memory is not, also on tensors without memory (`paceline.tools.plan.memory.tensor_tracer`).
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
from paceline.parallel.gradient_collectives import Comm
from paceline.world.group_devices import queues_on_streams

__all__ = ["FakeComm", "fake_process_group"]


class FakeComm(Comm):
    """Communicator over torch's fake process group with the behaviour of a real backend.

    Args:
        backend: to imitate: "gloo" (parts sent point to point), "nccl" or "paceline" (in place).
    """

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend
        self._in_place_parts = self.scatters_in_place(backend)
        self._queues = queues_on_streams(backend)
        self._mesh = super().mesh("cpu")
        self._written: Sequence[float] = ()

    def mesh(self, device: str) -> DeviceMesh:
        """Return the mesh that was made in advance, of real tensors."""
        return self._mesh

    def broadcast_ints(self, numbers: list[list[int]], device: torch.device) -> list[list[int]]:
        """Return `numbers`, as if all ranks had the same."""
        super().broadcast(torch.tensor(numbers, dtype=torch.int64, device=device))
        return numbers

    def gather_values(self, mine: Any) -> list[Any]:
        """Return `mine`, as if from every rank."""
        return [mine] * self.size

    def write_status(self, numbers: list[float], place: torch.Tensor, staging: torch.Tensor) -> None:
        """Keep this rank's round status for `read_status`; `place` holds no numbers."""
        self._written = numbers

    def read_status(self, summed: torch.Tensor) -> list[float]:
        """Return the round status as if all ranks had written the same."""
        return round_status.replicated_sum(self._written, self.rank, self.size)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        return FakeWork()

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        return FakeWork()


@contextmanager
def fake_process_group(ranks: int, rank: int = 0) -> Iterator[None]:
    """Set a fake default process group of `ranks` ranks, with this process as `rank`.

    Raises:
        UsageError: a process group is already initialised.
    """
    # part of every wheel, although among torch's tests; the import registers the backend
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UsageError(
            "this process already has a process group",
            remedy="predict in a process without one",
        )
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
