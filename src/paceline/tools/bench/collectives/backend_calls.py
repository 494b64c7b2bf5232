"""Backends at work: a process group for each, and the call of each operation on it.

MPI's own collectives on torch's tensors, called as a program that knows mpi4py alone would call them.

The "mpi4py" backend of torch.distributed makes all ranks agree on every call first, so that a mistake is named. That
is no part of MPI, and with more ranks than cores it takes longer than a small collective does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from paceline.backends.mpi_collectives import WIDENED_DTYPES, MpiTypes
from paceline.collectives.algorithms import make_schedule
from paceline.collectives.run_schedule import run_schedule
from paceline.tools.bench.collectives.benchmarked_backends import MPI, backend_of
from paceline.tools.bench.collectives.exact_buffers import Allocate, Buffers
from paceline.world import World
from paceline.world.device_selection import choose_device
from paceline.world.mpi_world import load_mpi

__all__ = ["Carrier", "Contestant", "call_of", "mpi_call", "open_carrier"]

# These have new names since torch 2.13, and the old ones warn.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True)
class Carrier:
    """A backend that is ready.

    Attributes:
        name: as on the command line.
        group: all ranks, on that backend.
        device: where its tensors are.
        arena: whether they come from the backend's own memory.
        algorithm: the schedule that is run over the group; empty: the group's own collectives are.
        mpi: the module ``mpi4py.MPI`` and a communicator of all ranks, where MPI is called itself.
    """

    name: str
    group: ProcessGroup
    device: torch.device
    arena: bool
    algorithm: str = ""
    mpi: tuple[Any, Any] | None = None

    def allocator(self, dtype: torch.dtype) -> Allocate:
        """Return the function that allocates its buffers."""
        if self.arena:
            return partial(self.group.allocate_tensor, dtype=dtype)  # type: ignore[attr-defined]
        return partial(torch.empty, dtype=dtype, device=self.device)

    def meet(self) -> None:
        """Return when all ranks have called: a barrier of the backend itself."""
        if self.mpi is not None:
            self.mpi[1].Barrier()
        elif self.device.type == "cuda":
            dist.barrier(group=self.group, device_ids=[self.device.index])
        else:
            dist.barrier(group=self.group)
        self.finish()

    def finish(self) -> None:
        """Return when the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Contestant:
    """A backend at one case: `run_schedule` does the operation once on `buffers`."""

    carrier: Carrier
    buffers: Buffers
    run: Callable[[], object]


def open_carrier(name: str, world: World) -> Carrier:
    """Return the backend of that name with a process group of its own; all ranks must call it, in the same order."""
    backend = backend_of(name)
    device = torch.device("cpu")
    if backend.device == "cuda":
        device = torch.device(choose_device("cuda", "nccl", world.local_rank, world.local_size)[0])
        torch.cuda.set_device(device)
    group = dist.new_group(backend=backend.torch)
    assert isinstance(group, ProcessGroup), "every rank belongs to it"
    mpi = load_mpi(world.size) if backend.starter == MPI else None
    own = (mpi, mpi.COMM_WORLD.Dup()) if mpi is not None else None
    return Carrier(name, group, device, backend.arena, backend.algorithm, own)


def call_of(carrier: Carrier, buffers: Buffers) -> Callable[[], object]:
    """Return the function that does the operation of `buffers` once, and returns when it is done."""
    if carrier.algorithm:
        return _scheduled(carrier, buffers)
    itself = mpi_call(*carrier.mpi, buffers) if carrier.mpi is not None else None
    if itself is not None:
        return itself
    given, taken, group = buffers.given, buffers.taken, carrier.group
    match buffers.op:
        case "all-reduce":
            return partial(dist.all_reduce, given, group=group)
        case "reduce-scatter":
            return partial(_reduce_scatter, taken, given, group=group)
        case "all-gather":
            return partial(_all_gather, taken, given, group=group)
        case "broadcast":
            return partial(dist.broadcast, given, 0, group=group)
        case "all-to-all":
            return partial(dist.all_to_all_single, taken, given, group=group)
    return partial(_shift, buffers, group)


def _shift(buffers: Buffers, group: ProcessGroup) -> None:
    """Send to the next rank and receive from the previous one at once, as nccl-tests' sendrecv_perf does."""
    following, previous = (buffers.rank + 1) % buffers.ranks, (buffers.rank - 1) % buffers.ranks
    sending = dist.P2POp(dist.isend, buffers.given, following, group)
    receiving = dist.P2POp(dist.irecv, buffers.taken, previous, group)
    for work in dist.batch_isend_irecv([sending, receiving]):
        work.wait()


def _scheduled(carrier: Carrier, buffers: Buffers) -> Callable[[], object]:
    """Return the function that runs a schedule of ours; that all ranks run the same one is not asked at every call."""
    made = make_schedule(buffers.op, carrier.algorithm, buffers.ranks)
    tensor = buffers.taken if buffers.op == "all-gather" else buffers.given
    output = buffers.taken if buffers.op in ("all-to-all", "send-recv") else None
    return partial(run_schedule, made, tensor, output, group=carrier.group, check=False)


def mpi_call(mpi: Any, comm: Any, buffers: Buffers) -> Callable[[], object] | None:
    """Return the function that does the operation of `buffers` once; None where MPI has no such numbers.

    Args:
        mpi: the module ``mpi4py.MPI``.
        comm: a communicator of all ranks.
        buffers: tensors on the CPU.
    """
    if buffers.given.dtype in WIDENED_DTYPES:
        return None
    kind = MpiTypes(mpi).datatype(buffers.given.dtype)

    def place(tensor: Tensor) -> list[Any]:
        return [tensor.numpy(), kind]

    given, taken = place(buffers.given), place(buffers.taken)
    match buffers.op:
        case "all-reduce":
            return partial(comm.Allreduce, mpi.IN_PLACE, given, mpi.SUM)
        case "reduce-scatter":
            return partial(comm.Reduce_scatter_block, given, taken, mpi.SUM)
        case "all-gather":
            return partial(comm.Allgather, given, taken)
        case "broadcast":
            return partial(comm.Bcast, given, 0)
        case "all-to-all":
            return partial(comm.Alltoall, given, taken)
    following, previous = (buffers.rank + 1) % buffers.ranks, (buffers.rank - 1) % buffers.ranks
    return partial(comm.Sendrecv, given, following, 0, taken, previous, 0)
