"""Calls of the benchmarked collectives: a process group per backend, and a function per operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from paceline.backends.mpi_collectives import WIDENED_DTYPES, MpiTypes
from paceline.collectives.algorithms import make_schedule
from paceline.collectives.run_schedule import run_schedule
from paceline.tools.bench.collectives.benchmarked_backends import MPIEXEC, find_backend
from paceline.tools.bench.collectives.exact_buffers import Allocate, ExactBuffers
from paceline.world import World
from paceline.world.accelerator import set_current_device, synchronize
from paceline.world.device_selection import choose_device
from paceline.world.mpi_world import load_mpi

__all__ = ["OpenBackend", "PreparedCall", "make_call", "open_backend"]

# New names since torch 2.13, where the old ones warn.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True)
class OpenBackend:
    """A backend with its process group.

    Attributes:
        name: as on the command line.
        group: all ranks, on that backend.
        device: of its tensors.
        arena: its tensors come from the backend's own memory.
        algorithm: the make_schedule that is run over the group; empty: the group's own collectives.
        mpi: the module ``mpi4py.MPI`` and a communicator of all ranks, if MPI is called directly.
    """

    name: str
    group: ProcessGroup
    device: torch.device
    _: KW_ONLY
    arena: bool
    algorithm: str = ""
    mpi: tuple[Any, Any] | None = None

    def allocator(self, dtype: torch.dtype) -> Allocate:
        """Return the function that allocates its buffers."""
        if self.arena:
            return partial(self.group.allocate_tensor, dtype=dtype)  # type: ignore[attr-defined]
        return partial(torch.empty, dtype=dtype, device=self.device)

    def barrier(self) -> None:
        """Run the backend's own barrier and wait for the device."""
        if self.mpi is not None:
            self.mpi[1].Barrier()
        elif self.device.type != "cpu":
            dist.barrier(group=self.group, device_ids=[self.device.index])
        else:
            dist.barrier(group=self.group)
        self.synchronise()

    def synchronise(self) -> None:
        """Wait until the device has finished."""
        synchronize(self.device)


@dataclass(frozen=True)
class PreparedCall:
    """A backend with the buffers of one case; `run` does the operation once."""

    backend: OpenBackend
    buffers: ExactBuffers
    run: Callable[[], object]


def open_backend(name: str, world: World) -> OpenBackend:
    """Return the backend of that name with a process group of its own; a collective, in the same order on all ranks."""
    backend = find_backend(name)
    device = torch.device("cpu")
    if backend.device != "cpu":
        chosen, _ = choose_device(backend.device, backend.torch, world.local_rank, world.local_size)
        device = torch.device(chosen)
        set_current_device(device)
    group = dist.new_group(backend=backend.torch)
    assert isinstance(group, ProcessGroup), "every rank belongs to it"
    mpi = load_mpi(world.size) if backend.launcher == MPIEXEC else None
    direct = (mpi, mpi.COMM_WORLD.Dup()) if mpi is not None else None
    return OpenBackend(name, group, device, arena=backend.arena, algorithm=backend.algorithm, mpi=direct)


def make_call(backend: OpenBackend, buffers: ExactBuffers) -> Callable[[], object]:
    """Return the function that does the operation of `buffers` once, synchronously."""
    if backend.algorithm:
        return _schedule_call(backend, buffers)
    direct = _mpi_call(*backend.mpi, buffers) if backend.mpi is not None else None
    if direct is not None:
        return direct
    source, target, group = buffers.input, buffers.output, backend.group
    match buffers.op:
        case "all-reduce":
            return partial(dist.all_reduce, source, group=group)
        case "reduce-scatter":
            return partial(_reduce_scatter, target, source, group=group)
        case "all-gather":
            return partial(_all_gather, target, source, group=group)
        case "broadcast":
            return partial(dist.broadcast, source, 0, group=group)
        case "all-to-all":
            return partial(dist.all_to_all_single, target, source, group=group)
    return partial(_send_recv, buffers, group)


def _send_recv(buffers: ExactBuffers, group: ProcessGroup) -> None:
    """Send to the next rank and receive from the previous one at once, as nccl-tests' sendrecv_perf does."""
    following, previous = _neighbours(buffers)
    sending = dist.P2POp(dist.isend, buffers.input, following, group)
    receiving = dist.P2POp(dist.irecv, buffers.output, previous, group)
    for work in dist.batch_isend_irecv([sending, receiving]):
        work.wait()


def _neighbours(buffers: ExactBuffers) -> tuple[int, int]:
    return (buffers.rank + 1) % buffers.ranks, (buffers.rank - 1) % buffers.ranks


def _schedule_call(backend: OpenBackend, buffers: ExactBuffers) -> Callable[[], object]:
    """Return the function that runs a make_schedule, without checking at every call that all ranks run the same one."""
    made = make_schedule(buffers.op, backend.algorithm, buffers.ranks)
    tensor = buffers.output if buffers.op == "all-gather" else buffers.input
    output = buffers.output if buffers.op in ("all-to-all", "send-recv") else None
    return partial(run_schedule, made, tensor, output, group=backend.group, check=False)


def _mpi_call(mpi: Any, comm: Any, buffers: ExactBuffers) -> Callable[[], object] | None:
    """Return the function that does the operation of `buffers` once by MPI, as a program that uses mpi4py does.

    The "mpi4py" backend of torch.distributed makes all ranks agree on every call first, so that a mistake is named.
    That is not part of MPI, and with more ranks than cores it takes longer than a small collective.

    Args:
        mpi: the module ``mpi4py.MPI``.
        comm: a communicator of all ranks.
        buffers: tensors on the CPU.

    Returns:
        None if MPI lacks the numbers' type.
    """
    if buffers.input.dtype in WIDENED_DTYPES:
        return None
    kind = MpiTypes(mpi).datatype(buffers.input.dtype)

    def argument(tensor: Tensor) -> list[Any]:
        return [tensor.numpy(), kind]

    source, target = argument(buffers.input), argument(buffers.output)
    match buffers.op:
        case "all-reduce":
            return partial(comm.Allreduce, mpi.IN_PLACE, source, mpi.SUM)
        case "reduce-scatter":
            return partial(comm.Reduce_scatter_block, source, target, mpi.SUM)
        case "all-gather":
            return partial(comm.Allgather, source, target)
        case "broadcast":
            return partial(comm.Bcast, source, 0)
        case "all-to-all":
            return partial(comm.Alltoall, source, target)
    following, previous = _neighbours(buffers)
    return partial(comm.Sendrecv, source, following, 0, target, previous, 0)
