"""MPI's own collectives on torch's tensors, called as a program that knows mpi4py alone would call them.

The "mpi4py" backend of torch.distributed makes all ranks agree on every call first, so that a mistake is named. That
is no part of MPI, and with more ranks than cores it takes longer than a small collective does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from paceline.backends.mpi_types import WIDENED, MpiTypes
from paceline.bench.collectives.buffers import Buffers

__all__ = ["mpi_call"]


def mpi_call(mpi: Any, comm: Any, buffers: Buffers) -> Callable[[], object] | None:
    """Return the function that does the operation of `buffers` once; None where MPI has no such numbers.

    Args:
        mpi: the module ``mpi4py.MPI``.
        comm: a communicator of all ranks.
        buffers: tensors on the CPU.
    """
    if buffers.given.dtype in WIDENED:
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
