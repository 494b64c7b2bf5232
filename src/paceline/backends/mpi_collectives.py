"""What MPI calls torch's dtypes and reductions.

MPI has no 16-bit floats: they are reduced as float32 and rounded once, as the paceline backend does for more than
two ranks. It has no bool either: a bool is a byte of 0 or 1, its sum or maximum is "or", its product or minimum "and".

Collectives over MPI.

Phases of every collective:

    1. meet: all ranks tell what they call (a non-blocking all-gather, polled). Who does not come in time, or calls
       something else, is named; nothing has been touched then
    2. the call itself, by MPI's own blocking collective: the fastest it has. All have come, so it ends; a rank that
       dies in it takes all others with it, as mpiexec does

Copies are of bytes, so any dtype will do; reductions in MPI's own datatypes (mpi_types.py). Counts beyond 2³¹
elements need MPI 4; mpi4py takes care of that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paceline._core.backoff import Backoff
from paceline.backends.block_reduction import Reduction, divide
from paceline.backends.op_arguments import bytes_of, copy, flat_of, overlap
from paceline.backends.op_signature import OpSignature
from paceline.errors import CollectiveError, CollectiveTimeout, MismatchError

__all__ = ["WIDENED_DTYPES", "MpiCollectives", "MpiTypes"]

WIDENED_DTYPES = (torch.float16, torch.bfloat16)
"""Dtypes that are reduced as float32."""


_NAMES = {
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


_OPS = {"SUM": "SUM", "AVG": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX"}


_OPS |= {"BAND": "BAND", "BOR": "BOR", "BXOR": "BXOR"}


_BOOL_OPS = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}


class MpiTypes:
    """Datatypes and reductions of an MPI library.

    Args:
        mpi: the module ``mpi4py.MPI``.
    """

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi

    def datatype(self, dtype: torch.dtype) -> Any:
        """Return MPI's datatype for the elements of a reduction."""
        return getattr(self._mpi, _NAMES[dtype])

    def op(self, how: Reduction, dtype: torch.dtype) -> Any:
        """Return MPI's operation for a reduction; for a mean, that of its sum."""
        names = _OPS | _BOOL_OPS if dtype == torch.bool else _OPS
        return getattr(self._mpi, names[how.name])


_WIDENED_NUMEL = 1 << 22
"""16-bit floats are reduced so many at a time, so that their float32 copies take 16 MiB and no more."""


class MpiCollectives:
    """The collectives of a group over MPI; ranks are the group's.

    Args:
        mpi: the module ``mpi4py.MPI``.
        comm: a communicator of this group alone, of which nobody else makes use.
        world_ranks: the ranks of the group in the world, for messages.
        timeout: seconds that a call waits for a rank.
    """

    shares_memory = False
    ops = frozenset(
        {"barrier", "all_reduce", "reduce", "reduce_scatter", "all_gather"}
        | {"gather", "broadcast", "scatter", "all_to_all"}
    )

    def __init__(self, mpi: Any, comm: Any, world_ranks: Sequence[int], timeout: float) -> None:
        self._mpi, self._comm, self._world_ranks = mpi, comm, world_ranks
        self._types = MpiTypes(mpi)
        self.index, self.size, self.timeout = comm.rank, comm.size, timeout
        self._failure, self._left = "", False
        self._abandoned: CollectiveError | None = None
        self._meeting: tuple[Any, ...] = ()  # MPI reads and writes what is in it, even after this gave it up

    @property
    def broken(self) -> bool:
        """Whether a call was given up in the middle, so that MPI can't be left in order."""
        return bool(self._failure)

    # The calls.

    def barrier(self, call: OpSignature) -> None:
        """Return when all ranks have called."""
        self._meet(call)

    def all_reduce(self, call: OpSignature, tensor: torch.Tensor, how: Reduction, ranks: int) -> None:
        """Reduce `tensor` over all ranks, in place; a mean divides by `ranks`."""
        self._meet(call)
        for part in _parts(tensor):
            with self._widened(part) as wide:
                op = self._types.op(how, wide.dtype)
                self._comm.Allreduce(self._mpi.IN_PLACE, self._elements(wide), op)
                if how.name == "AVG":
                    divide(wide, ranks)

    def reduce(self, call: OpSignature, tensor: torch.Tensor, root: int, how: Reduction, ranks: int) -> None:
        """Reduce `tensor` over all ranks into that of `root`; the others' stay as they are."""
        self._meet(call)
        for part in _parts(tensor):
            with self._widened(part, write=self.index == root) as wide:
                op = self._types.op(how, wide.dtype)
                if self.index == root:
                    self._comm.Reduce(self._mpi.IN_PLACE, self._elements(wide), op, root)
                else:
                    self._comm.Reduce(self._elements(wide), None, op, root)
                if how.name == "AVG" and self.index == root:
                    divide(wide, ranks)

    def reduce_scatter(
        self,
        call: OpSignature,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        how: Reduction,
        ranks: int,
    ) -> None:
        """Reduce ``inputs[r]`` over all ranks into the `output` of rank r."""
        self._meet(call)
        whole = _joined([flat_of(each) for each in inputs])
        low = output.dtype in WIDENED_DTYPES
        given = whole.float() if low else whole
        apart = low or overlap([output], [whole])
        result = torch.empty(output.numel(), dtype=given.dtype) if apart else flat_of(output)
        op = self._types.op(how, given.dtype)
        part = self._elements(result)
        self._comm.Reduce_scatter_block([bytes_of(given).numpy(), *part[1:]], part, op)
        if how.name == "AVG":
            divide(result, ranks)
        if apart:
            flat_of(output).copy_(result)

    def all_gather(self, call: OpSignature, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Copy the `tensor` of every rank r into ``outputs[r]`` on all ranks."""
        self._meet(call)
        given = tensor.clone() if overlap([tensor], outputs) else tensor
        with _one_piece(outputs) as place:
            self._comm.Allgather(self._bytes(given), self._share(place))

    def gather(
        self, call: OpSignature, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int
    ) -> None:
        """Copy the `tensor` of every rank r into ``outputs[r]`` on `root`; elsewhere `outputs` is empty."""
        self._meet(call)
        given = tensor.clone() if overlap([tensor], outputs) else tensor
        if self.index != root:
            self._comm.Gather(self._bytes(given), None, root)
            return
        with _one_piece(outputs) as place:
            self._comm.Gather(self._bytes(given), self._share(place), root)

    def broadcast(self, call: OpSignature, tensor: torch.Tensor, root: int) -> None:
        """Copy `tensor` from `root` to all ranks."""
        self._meet(call)
        self._comm.Bcast(self._bytes(tensor), root)

    def scatter(
        self, call: OpSignature, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int
    ) -> None:
        """Copy ``inputs[r]`` of `root` into the `output` of rank r; elsewhere `inputs` is empty."""
        self._meet(call)
        if self.index != root:
            self._comm.Scatter(None, self._bytes(output), root)
            return
        whole = _joined([bytes_of(each) for each in inputs])
        result = torch.empty_like(output) if overlap([output], [whole]) else output
        self._comm.Scatter(self._share(whole), self._bytes(result), root)
        copy(output, result)

    def all_to_all(
        self, call: OpSignature, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None:
        """Copy ``inputs[r]`` of every rank q into ``outputs[q]`` of rank r; sizes may differ.

        Raises:
            MismatchError: a rank sends another size than its receiver expects (raised by all ranks).
        """
        self._meet(call)
        if overlap(outputs, inputs):
            inputs = [each.clone() for each in inputs]
        self._agree_on_sizes(call, inputs, outputs)
        requests = [self._comm.Irecv(self._bytes(each), rank) for rank, each in enumerate(outputs)]
        order = [(self.index + distance) % self.size for distance in range(self.size)]
        requests += [self._comm.Isend(self._bytes(inputs[rank]), rank) for rank in order]
        self._mpi.Request.Waitall(requests)

    def _agree_on_sizes(
        self, call: OpSignature, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        """Compare what everybody sends with what everybody expects."""
        mine = torch.tensor([[each.nbytes for each in inputs], [each.nbytes for each in outputs]])
        table = torch.empty(self.size, 2, self.size, dtype=torch.int64)
        self._comm.Allgather(self._bytes(mine), self._share(bytes_of(table)))
        wrong = (table[:, 0] != table[:, 1].T).nonzero().tolist()
        if wrong:
            source, target = wrong[0]
            raise MismatchError(
                f"{call}: rank {source} sends {table[source, 0, target]} bytes to rank {target}, which expects "
                f"{table[target, 1, source]} (ranks of this group)",
                remedy="give input splits of each rank that equal the output splits of the receivers",
            )

    # Meeting.

    def _meet(self, call: OpSignature) -> None:
        """Return when all ranks have made this call.

        Raises:
            MismatchError: ranks call different things; all ranks raise it, and the group stays usable.
            CollectiveTimeout: some rank did not come in time. The group is useless then.
            CollectiveError: the group was useless before.
        """
        if self._abandoned is not None:
            raise self._abandoned
        if self._failure or self._left:
            why = self._failure or "this rank has left the group"
            raise CollectiveError(f"{call} can't be made any more: {why}")
        mine = torch.frombuffer(bytearray(call.packed()), dtype=torch.uint8)
        every = torch.empty(self.size, mine.numel(), dtype=torch.uint8)
        limit = self.timeout if call.timeout is None else call.timeout
        request = self._comm.Iallgather(self._bytes(mine), self._share(bytes_of(every)))
        self._meeting = request, mine, every
        idle, deadline = Backoff(), time.monotonic() + limit
        while not request.Test():
            if time.monotonic() > deadline:
                self._failure = f"not all ranks came to {call}"
                raise CollectiveTimeout(
                    f"not all of the ranks {self._shown_ranks()} came to {call} within {limit:g} s",
                    remedy="see which of them is missing, and what it does instead; end them all with mpiexec",
                )
            if self._abandoned is not None:
                raise self._abandoned
            idle.wait()
        for rank, other in enumerate(every):
            packed = bytes(other.numpy())
            if not call.agrees(packed):
                raise MismatchError(
                    f"this rank calls {call}, rank {self._world_ranks[rank]} calls {OpSignature.unpacked(packed)}",
                    rank=self._world_ranks[self.index],
                    remedy="all ranks of a group must make the same calls in the same order",
                )

    def _shown_ranks(self) -> str:
        return ", ".join(map(str, self._world_ranks))

    def give_up(self, error: BaseException) -> None:
        """Note that a call failed in the middle: MPI says nothing of what it left behind."""
        if not isinstance(error, MismatchError):
            self._failure = self._failure or f"an earlier call failed: {error}"

    def note_step(self, step: int) -> None:
        """Do nothing: ranks don't tell each other their steps over MPI."""

    def leave(self) -> None:
        """Make no more calls."""
        self._left = True

    def abandon(self, reason: CollectiveError) -> None:
        """Have a call that waits for ranks to come raise `reason`; MPI gives back none that moves data."""
        self._abandoned = reason
        self.leave()

    def close(self) -> None:
        """Give the communicator back, unless something is under way in it."""
        if not self._failure and not self._left:
            self._comm.Free()

    # Memory, as MPI is told of it.

    def _bytes(self, tensor: torch.Tensor) -> list[Any]:
        return [bytes_of(tensor).numpy(), tensor.nbytes, self._mpi.BYTE]

    def _share(self, whole: torch.Tensor) -> list[Any]:
        """Return memory that is shared out among all ranks alike: MPI counts the bytes of one of them."""
        return [whole.numpy(), whole.numel() // self.size, self._mpi.BYTE]

    def _elements(self, tensor: torch.Tensor) -> list[Any]:
        return [bytes_of(tensor).numpy(), tensor.numel(), self._types.datatype(tensor.dtype)]

    @contextmanager
    def _widened(self, part: torch.Tensor, *, write: bool = True) -> Iterator[torch.Tensor]:
        """Give what is reduced: the part itself, or a float32 copy that is rounded back in the end."""
        wide = part.float() if part.dtype in WIDENED_DTYPES else part
        yield wide
        if wide is not part and write:
            part.copy_(wide)


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return a contiguous tensor in the parts that are reduced one after the other."""
    flat = flat_of(tensor)
    return flat.split(_WIDENED_NUMEL) if flat.dtype in WIDENED_DTYPES and flat.numel() else [flat]


def _beside(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors lie one behind the other in memory."""
    first, at = tensors[0].data_ptr(), 0
    storage = tensors[0].untyped_storage().data_ptr()
    for each in tensors:
        if each.numel() and (each.data_ptr() != first + at or each.untyped_storage().data_ptr() != storage):
            return False
        at += each.nbytes
    return True


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return 1-D tensors as one: a view if they lie one behind the other, else a copy."""
    if tensors[0].numel() and _beside(tensors):
        return tensors[0].as_strided((sum(each.numel() for each in tensors),), (1,))
    return torch.cat(list(tensors))


@contextmanager
def _one_piece(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Give the bytes of tensors as one piece of memory, which is copied to them in the end if they lie apart."""
    places = [bytes_of(each) for each in tensors]
    whole = _joined(places)
    yield whole
    if places[0].numel() and not _beside(places):
        for place, part in zip(places, whole.chunk(len(places)), strict=True):
            place.copy_(part)
