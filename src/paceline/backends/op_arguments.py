"""Arguments of collectives: the forms in which torch passes them, their checks, and tensors seen as memory.

The backend reads and writes contiguous CPU tensors that hold their values; `Contiguous` stands in for others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import UsageError

__all__ = [
    "Contiguous",
    "ContiguousList",
    "Tensors",
    "are_strided_cpu",
    "as_bytes",
    "as_list",
    "as_row",
    "call_each",
    "check_list",
    "check_parts",
    "check_peer",
    "contiguous",
    "copy_unless_same",
    "overlap",
    "parse_options",
    "same_memory",
    "split_rows",
    "timeout_of",
    "total_nbytes",
]

Tensors = Sequence[Tensor]


# Forms of a call.


def call_each(call: Callable[..., dist.Work], pairs: Iterable[tuple[Any, Any]], opts: Any) -> dist.Work:
    """Make several calls and return the work of the last; the others are done on return."""
    *before, last = [call(output, tensor, opts) for output, tensor in pairs]
    for work in before:
        work.wait()
    return last


def as_list(tensors: Any) -> list[Tensor]:
    """Return a list of tensors from a list or a single tensor."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def parse_options(given: Any, kind: type) -> Any:
    """Return options of a kind from such options, a reduction, a root rank or None."""
    if isinstance(given, kind):
        return given
    options = kind()
    if isinstance(given, dist.ReduceOp | dist.ReduceOp.RedOpType):
        options.reduceOp = given
    elif isinstance(given, int):
        options.rootRank = given
    return options


def timeout_of(options: Any) -> float | None:
    """Return the time-out of a call in seconds; None: the group's."""
    timeout = getattr(options, "timeout", None)
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else -1.0
    return seconds if seconds > 0 else None


# Checks, before anything is written.


def check_list(op: str, tensors: Tensors, like: Tensor, ranks: int) -> None:
    """Raise UsageError unless `tensors` has one tensor per rank, of the size and dtype of `like`."""
    if len(tensors) != ranks:
        raise UsageError(f"{op} got {len(tensors)} tensors for {ranks} ranks")
    for rank, tensor in enumerate(tensors):
        if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
            raise UsageError(
                f"{op}: the tensor for rank {rank} is {tensor.dtype} of {tensor.numel()} elements, "
                f"the other one {like.dtype} of {like.numel()}",
                remedy="give tensors of one size and dtype",
            )


def check_parts(op: str, whole: Tensor, part: Tensor, ranks: int) -> None:
    """Raise UsageError unless `whole` has the size of one `part` per rank, and its dtype."""
    if whole.numel() != part.numel() * ranks or whole.dtype != part.dtype:
        raise UsageError(
            f"{op}: {whole.dtype} of {whole.numel()} elements is not {ranks} times "
            f"{part.dtype} of {part.numel()}",
            remedy=f"make the large tensor {ranks} times the size of the small one",
        )


def check_peer(op: str, rank: int, me: int, ranks: int) -> None:
    """Raise UsageError unless `rank` is another rank of the group."""
    if rank == me or not 0 <= rank < ranks:
        raise UsageError(
            f"{op}: rank {rank} is not another rank of this group of {ranks}",
            remedy="a rank can't send to itself" if rank == me else "",
        )


def split_rows(name: str, tensor: Tensor, splits: Sequence[int], ranks: int) -> list[Tensor]:
    """Cut a tensor into rows for each rank, by `splits` or, if empty, equally."""
    rows = tensor.size(0)
    if splits and (sum(splits) != rows or len(splits) != ranks):
        raise UsageError(
            f"all_to_all_single: {name} splits {list(splits)} don't add up to {rows} rows for {ranks} ranks"
        )
    if not splits and rows % ranks:
        raise UsageError(f"all_to_all_single: {rows} rows of {name} can't be split over {ranks} ranks")
    return list(tensor.split(list(splits) or [rows // ranks] * ranks))  # one per rank, also of no rows


# Tensors as memory.


class Contiguous:
    """A tensor, or a contiguous copy of it that is copied back on a regular exit.

    Args:
        tensor: any strided tensor.
        read: the copy begins with its values.
        write: copy back.
    """

    def __init__(self, tensor: Tensor, *, read: bool = True, write: bool = True) -> None:
        self._original, self._write = tensor.detach(), write
        plain = (
            self._original.is_contiguous() and not self._original.is_conj() and not self._original.is_neg()
        )
        fill = torch.clone if read else torch.empty_like
        self.tensor = self._original if plain else fill(self._original, memory_format=torch.contiguous_format)

    def __enter__(self) -> Tensor:
        return self.tensor

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None and self._write and self.tensor is not self._original:
            self._original.copy_(self.tensor)


class ContiguousList:
    """The same for several tensors that are only written."""

    def __init__(self, tensors: Tensors) -> None:
        self._each = [Contiguous(tensor, read=False) for tensor in tensors]

    def __enter__(self) -> list[Tensor]:
        return [each.tensor for each in self._each]

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for each in self._each:
            each.__exit__(kind, error, trace)


def contiguous(tensors: Tensors) -> list[Tensor]:
    """Return contiguous tensors that hold their values: not lazily conjugated or negated."""
    return [tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in tensors]


def total_nbytes(tensors: Tensors) -> int:
    """Return the bytes of all tensors together."""
    return sum(tensor.nbytes for tensor in tensors)


def are_strided_cpu(tensors: Tensors) -> bool:
    """Return whether all tensors are strided (not sparse) and on the CPU."""
    return all(tensor.device.type == "cpu" and tensor.layout == torch.strided for tensor in tensors)


def as_row(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as 1-D with stride 1."""
    flat = tensor.view(-1)
    # A tensor of one element is contiguous with any stride, and keeps it.
    return flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor of any dtype."""
    return as_row(tensor).view(torch.uint8)


def copy_unless_same(target: Tensor, source: Tensor) -> None:
    """Copy, unless both are the same memory."""
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


def same_memory(left: Tensor, right: Tensor) -> bool:
    """Return whether two contiguous tensors are the same memory."""
    return left.data_ptr() == right.data_ptr() and left.nbytes == right.nbytes


def overlap(left: Tensors, right: Tensors) -> bool:
    """Return whether a contiguous tensor of `left` and one of `right` share memory."""
    spans = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in right if each.numel()]
    return any(
        each.data_ptr() < high and low < each.data_ptr() + each.nbytes
        for each in left
        if each.numel()
        for low, high in spans
    )
