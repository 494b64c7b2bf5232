"""Collectives over MPI.

Phases of every collective:

    1. all ranks exchange the signature of their call (a non-blocking all-gather, polled). A rank that is late, or
       calls something else, is named; nothing has been written yet
    2. MPI's own blocking collective, the fastest that it has. All ranks have arrived, so it completes; a rank that
       dies in it takes all others with it, as mpiexec does

Copies are of bytes, so they support any dtype; reductions use MPI's datatypes. MPI has no 16-bit floats: they are
reduced as float32 and rounded once, as the paceline backend does for more than two ranks. It has no bool either: a
bool is a byte of 0 or 1, its sum or maximum is "or", its product or minimum "and". Counts beyond 2³¹ elements need
MPI 4, which mpi4py takes care of.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline._core.poll_backoff import Backoff
from paceline.backends.block_reduction import Reduction
from paceline.backends.op_arguments import Tensors, as_bytes, as_row, copy_unless_same, overlap
from paceline.backends.op_signature import ALL_OPS, OpSignature, check_exchange_sizes
from paceline.errors import CollectiveError, CollectiveTimeout

__all__ = ["WIDENED_DTYPES", "MpiCollectives", "MpiTypes"]

WIDENED_DTYPES = (torch.float16, torch.bfloat16)
"""Dtypes that are reduced as float32."""

_WIDENED_NUMEL = 1 << 22
"""16-bit floats are reduced in parts of this size, so that their float32 copies take 16 MiB at most."""

_DATATYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
    torch.uint8: "UINT8_T",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.bool: "UINT8_T",
}
_MPI_OPS = {
    **{"SUM": "SUM", "AVG": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX"},
    **{name: name for name in ("BAND", "BOR", "BXOR")},
}
_MPI_BOOL_OPS = _MPI_OPS | {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}


class MpiTypes:
    """Datatypes and operations of an MPI library.

    Args:
        mpi: the module ``mpi4py.MPI``.
    """

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi

    def datatype(self, dtype: torch.dtype) -> Any:
        """Return MPI's datatype for the elements of a reduction."""
        return getattr(self._mpi, _DATATYPES[dtype])

    def op(self, reduction: Reduction, dtype: torch.dtype) -> Any:
        """Return MPI's operation for a reduction; for a mean, that of its sum."""
        names = _MPI_BOOL_OPS if dtype == torch.bool else _MPI_OPS
        return getattr(self._mpi, names[reduction.name])


class MpiCollectives:
    """`AllCollectiveOps` over MPI.

    Args:
        mpi: the module ``mpi4py.MPI``.
        comm: a communicator of this group that nothing else uses.
        world_ranks: ranks of the group in the world, for messages.
        timeout: seconds that a call waits for a rank.
    """

    shares_memory = False
    ops = frozenset(ALL_OPS)
    along_tree = False

    def __init__(self, mpi: Any, comm: Any, world_ranks: Sequence[int], timeout: float) -> None:
        self._mpi, self._comm, self._world_ranks = mpi, comm, world_ranks
        self._types = MpiTypes(mpi)
        self.index, self.size, self.timeout = comm.rank, comm.size, timeout
        self._failure, self._cancelled = "", False
        self._interrupted: CollectiveError | None = None
        self._exchange: tuple[Any, ...] = ()  # buffers that MPI uses, even after a time-out

    @property
    def broken(self) -> bool:
        """True if a call failed in the middle, so that MPI can't be finalised."""
        return bool(self._failure)

    def barrier(self, call: OpSignature) -> None:
        self._agree(call)

    def all_reduce(self, call: OpSignature, tensor: Tensor, reduction: Reduction) -> None:
        self._agree(call)
        for part in _parts(tensor):
            with _widened(part) as wide:
                op = self._types.op(reduction, wide.dtype)
                self._comm.Allreduce(self._mpi.IN_PLACE, self._elements(wide), op)
                reduction.divide(wide)

    def reduce(self, call: OpSignature, tensor: Tensor, root: int, reduction: Reduction) -> None:
        self._agree(call)
        for part in _parts(tensor):
            with _widened(part, write=self.index == root) as wide:
                op = self._types.op(reduction, wide.dtype)
                if self.index == root:
                    self._comm.Reduce(self._mpi.IN_PLACE, self._elements(wide), op, root)
                    reduction.divide(wide)
                else:
                    self._comm.Reduce(self._elements(wide), None, op, root)

    def reduce_scatter(
        self, call: OpSignature, output: Tensor, inputs: Tensors, reduction: Reduction
    ) -> None:
        self._agree(call)
        whole = _joined([as_row(each) for each in inputs])
        widens = output.dtype in WIDENED_DTYPES
        given = whole.float() if widens else whole
        separate = widens or overlap([output], [whole])
        result = torch.empty(output.numel(), dtype=given.dtype) if separate else as_row(output)
        part = self._elements(result)
        op = self._types.op(reduction, given.dtype)
        self._comm.Reduce_scatter_block([as_bytes(given).numpy(), *part[1:]], part, op)
        reduction.divide(result)
        if separate:
            as_row(output).copy_(result)

    def all_gather(self, call: OpSignature, outputs: Tensors, tensor: Tensor) -> None:
        self._agree(call)
        given = tensor.clone() if overlap([tensor], outputs) else tensor
        with _one_piece(outputs) as whole:
            self._comm.Allgather(self._bytes(given), self._shared(whole))

    def gather(self, call: OpSignature, outputs: Tensors, tensor: Tensor, root: int) -> None:
        self._agree(call)
        given = tensor.clone() if overlap([tensor], outputs) else tensor
        if self.index != root:
            self._comm.Gather(self._bytes(given), None, root)
            return
        with _one_piece(outputs) as whole:
            self._comm.Gather(self._bytes(given), self._shared(whole), root)

    def broadcast(self, call: OpSignature, tensor: Tensor, root: int) -> None:
        self._agree(call)
        self._comm.Bcast(self._bytes(tensor), root)

    def scatter(self, call: OpSignature, output: Tensor, inputs: Tensors, root: int) -> None:
        self._agree(call)
        if self.index != root:
            self._comm.Scatter(None, self._bytes(output), root)
            return
        whole = _joined([as_bytes(each) for each in inputs])
        result = torch.empty_like(output) if overlap([output], [whole]) else output
        self._comm.Scatter(self._shared(whole), self._bytes(result), root)
        copy_unless_same(output, result)

    def all_to_all(self, call: OpSignature, outputs: Tensors, inputs: Tensors) -> None:
        self._agree(call)
        if overlap(outputs, inputs):
            inputs = [each.clone() for each in inputs]
        sizes = torch.tensor([[each.nbytes for each in inputs], [each.nbytes for each in outputs]])
        table = torch.empty(self.size, 2, self.size, dtype=torch.int64)
        self._comm.Allgather(self._bytes(sizes), self._shared(as_bytes(table)))
        check_exchange_sizes(call, table)
        requests = [self._comm.Irecv(self._bytes(each), rank) for rank, each in enumerate(outputs)]
        order = [(self.index + distance) % self.size for distance in range(self.size)]
        requests += [self._comm.Isend(self._bytes(inputs[rank]), rank) for rank in order]
        self._mpi.Request.Waitall(requests)

    def _agree(self, call: OpSignature) -> None:
        """Return when all ranks have made this call.

        Raises:
            MismatchError: ranks call different collectives; all ranks raise it, and the group stays usable.
            CollectiveTimeout: a rank did not arrive in time. The group is unusable from then on.
            CollectiveError: the group is unusable.
        """
        if self._interrupted is not None:
            raise self._interrupted
        if self._failure or self._cancelled:
            raise CollectiveError(f"{call} can't run: {self._failure or 'this rank has left the group'}")
        own = torch.frombuffer(bytearray(call.pack()), dtype=torch.uint8)
        every = torch.empty(self.size, own.numel(), dtype=torch.uint8)
        timeout = self.timeout if call.timeout is None else call.timeout
        request = self._comm.Iallgather(self._bytes(own), self._shared(as_bytes(every)))
        self._exchange = request, own, every
        backoff, deadline = Backoff(), time.monotonic() + timeout
        while not request.Test():
            if time.monotonic() > deadline:
                self._failure = f"not all ranks arrived at {call}"
                ranks = ", ".join(map(str, self._world_ranks))
                raise CollectiveTimeout(
                    f"not all of the ranks {ranks} arrived at {call} within {timeout:g} s",
                    remedy="find the missing rank and its current call; end all ranks with mpiexec",
                )
            if self._interrupted is not None:
                raise self._interrupted
            backoff.wait()
        for rank, other in enumerate(every):
            packed = bytes(other.numpy())
            if not call.matches(packed):
                raise call.mismatch(packed, me=self._world_ranks[self.index], other=self._world_ranks[rank])

    def report_error(self, error: BaseException) -> None:
        """Record that a call failed in the middle: the state of MPI is unknown."""
        self._failure = self._failure or f"an earlier call failed: {error}"

    def set_background(self, background: bool) -> None:
        """Do nothing: MPI waits in its own way."""

    def note_step(self, step: int) -> None:
        """Do nothing: ranks do not publish their steps over MPI."""

    def cancel(self) -> None:
        """Refuse later calls."""
        self._cancelled = True

    def interrupt(self, reason: CollectiveError) -> None:
        """Make a call that waits for ranks raise `reason`, and later ones; MPI returns from none that moves data."""
        self._interrupted = reason
        self.cancel()

    def close(self) -> None:
        """Free the communicator, unless it has a pending call."""
        if not self._failure and not self._cancelled:
            self._comm.Free()

    # Memory as MPI's buffer specifications.

    def _bytes(self, tensor: Tensor) -> list[Any]:
        return [as_bytes(tensor).numpy(), tensor.nbytes, self._mpi.BYTE]

    def _shared(self, whole: Tensor) -> list[Any]:
        """Return memory with an equal part for each rank: MPI counts the bytes of one part."""
        return [whole.numpy(), whole.numel() // self.size, self._mpi.BYTE]

    def _elements(self, tensor: Tensor) -> list[Any]:
        return [as_bytes(tensor).numpy(), tensor.numel(), self._types.datatype(tensor.dtype)]


@contextmanager
def _widened(part: Tensor, *, write: bool = True) -> Iterator[Tensor]:
    """Yield the part itself, or a float32 copy that is rounded back at the end."""
    wide = part.float() if part.dtype in WIDENED_DTYPES else part
    yield wide
    if wide is not part and write:
        part.copy_(wide)


def _parts(tensor: Tensor) -> Tensors:
    """Return the parts of a contiguous tensor that are reduced one after the other."""
    flat = as_row(tensor)
    return flat.split(_WIDENED_NUMEL) if flat.dtype in WIDENED_DTYPES and flat.numel() else [flat]


def _adjacent(tensors: Tensors) -> bool:
    """Return whether tensors are adjacent in memory, in order."""
    first, at = tensors[0].data_ptr(), 0
    storage = tensors[0].untyped_storage().data_ptr()
    for each in tensors:
        if each.numel() and (each.data_ptr() != first + at or each.untyped_storage().data_ptr() != storage):
            return False
        at += each.nbytes
    return True


def _joined(tensors: Tensors) -> Tensor:
    """Return 1-D tensors as one: a view if they are adjacent, else a copy."""
    if tensors[0].numel() and _adjacent(tensors):
        return tensors[0].as_strided((sum(each.numel() for each in tensors),), (1,))
    return torch.cat(list(tensors))


@contextmanager
def _one_piece(tensors: Tensors) -> Iterator[Tensor]:
    """Yield the bytes of tensors as one piece of memory, which is copied to them at the end if they are separate."""
    targets = [as_bytes(each) for each in tensors]
    whole = _joined(targets)
    yield whole
    if targets[0].numel() and not _adjacent(targets):
        for target, part in zip(targets, whole.chunk(len(targets)), strict=True):
            target.copy_(part)
