"""The forms in which torch makes a call, and what they come to.

Whether the tensors of a call fit together, before anything is written.

Tensors as the backend takes them: on the CPU, contiguous, holding their values.

Contiguous tensors seen as the memory they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import UsageError

__all__ = [
    "Dense",
    "DenseList",
    "are_plain",
    "bytes_of",
    "check_list",
    "check_parts",
    "check_peer",
    "copy",
    "dense_of",
    "flat_of",
    "listed",
    "nbytes_of",
    "one_by_one",
    "options_of",
    "overlap",
    "same_memory",
    "seconds_of",
    "split",
]


def one_by_one(call: Callable[..., dist.Work], pairs: Iterable[tuple[Any, Any]], opts: Any) -> dist.Work:
    """Make several calls; all but the last are done on return."""
    *before, last = [call(output, tensor, opts) for output, tensor in pairs]
    for work in before:
        work.wait()
    return last


def listed(tensors: Any) -> list[torch.Tensor]:
    """Return a list of tensors from such a list or from one tensor."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def options_of(given: Any, kind: type) -> Any:
    """Return options from options, a reduction, a root rank or nothing."""
    if isinstance(given, kind):
        return given
    options = kind()
    if isinstance(given, dist.ReduceOp | dist.ReduceOp.RedOpType):
        options.reduceOp = given
    elif isinstance(given, int):
        options.rootRank = given
    return options


def seconds_of(options: Any) -> float | None:
    """Return the time-out of a call, None if it is the group's."""
    timeout = getattr(options, "timeout", None)
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else -1.0
    return seconds if seconds > 0 else None


def check_list(op: str, tensors: Sequence[torch.Tensor], like: torch.Tensor, ranks: int) -> None:
    """Raise unless there is one tensor per rank, each as large as `like` and of its dtype."""
    if len(tensors) != ranks:
        raise UsageError(f"{op} got {len(tensors)} tensors for {ranks} ranks")
    for rank, tensor in enumerate(tensors):
        if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
            raise UsageError(
                f"{op}: the tensor for rank {rank} is {tensor.dtype} of {tensor.numel()} elements, "
                f"the other one {like.dtype} of {like.numel()}",
                remedy="give tensors of one size and dtype",
            )


def check_parts(op: str, whole: torch.Tensor, part: torch.Tensor, ranks: int) -> None:
    """Raise unless `whole` is as large as one `part` per rank, and of its dtype."""
    if whole.numel() != part.numel() * ranks or whole.dtype != part.dtype:
        raise UsageError(
            f"{op}: {whole.dtype} of {whole.numel()} elements is not {ranks} times "
            f"{part.dtype} of {part.numel()}",
            remedy=f"make the large tensor {ranks} times the size of the small one",
        )


def check_peer(op: str, rank: int, me: int, ranks: int) -> None:
    """Raise unless `rank` is another rank of the group."""
    if rank == me or not 0 <= rank < ranks:
        raise UsageError(
            f"{op}: rank {rank} is none of the other ranks of this group of {ranks}",
            remedy="a rank can't send to itself" if rank == me else "",
        )


def split(name: str, tensor: torch.Tensor, splits: Sequence[int], ranks: int) -> list[torch.Tensor]:
    """Cut a tensor into rows for each rank, as many as `splits` say, or equally many."""
    if splits:
        if sum(splits) != tensor.size(0) or len(splits) != ranks:
            raise UsageError(
                f"all_to_all_single: {name} splits {list(splits)} don't add up to {tensor.size(0)} rows "
                f"for {ranks} ranks"
            )
        return list(tensor.split(list(splits)))
    if tensor.size(0) % ranks:
        raise UsageError(
            f"all_to_all_single: {tensor.size(0)} rows of {name} can't be split over {ranks} ranks"
        )
    return list(tensor.split([tensor.size(0) // ranks] * ranks))  # one for each rank, of nothing too


Tensors = Sequence[torch.Tensor]


class Dense:
    """A contiguous stand-in for a tensor that is not, copied back at the end."""

    def __init__(self, tensor: torch.Tensor, *, read: bool = True, write: bool = True) -> None:
        self._tensor, self._write = tensor.detach(), write
        dense = self._tensor.is_contiguous() and not self._tensor.is_conj() and not self._tensor.is_neg()
        fill = torch.clone if read else torch.empty_like
        self.dense = self._tensor if dense else fill(self._tensor, memory_format=torch.contiguous_format)

    def __enter__(self) -> torch.Tensor:
        return self.dense

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None and self._write and self.dense is not self._tensor:
            self._tensor.copy_(self.dense)


class DenseList:
    """The same for several tensors that are written and not read."""

    def __init__(self, tensors: Tensors) -> None:
        self._each = [Dense(tensor, read=False) for tensor in tensors]

    def __enter__(self) -> list[torch.Tensor]:
        return [each.dense for each in self._each]

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for each in self._each:
            each.__exit__(kind, error, trace)


def dense_of(tensors: Tensors) -> list[torch.Tensor]:
    """Return contiguous tensors whose memory holds their values: no lazily conjugated or negated ones."""
    return [tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in tensors]


def nbytes_of(tensors: Tensors) -> int:
    """Return the bytes of all tensors together."""
    return sum(tensor.nbytes for tensor in tensors)


def are_plain(tensors: Tensors) -> bool:
    """Return whether all tensors are ordinary ones on the CPU."""
    return all(tensor.device.type == "cpu" and tensor.layout == torch.strided for tensor in tensors)


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as one row."""
    flat = tensor.view(-1)
    # A tensor of one element is contiguous with any stride, and keeps it.
    return flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor of any dtype."""
    return flat_of(tensor).view(torch.uint8)


def copy(place: torch.Tensor, source: torch.Tensor) -> None:
    """Copy, unless both are the same memory."""
    if place.data_ptr() != source.data_ptr():
        place.copy_(source)


def same_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two contiguous tensors are the same memory."""
    return left.data_ptr() == right.data_ptr() and left.nbytes == right.nbytes


def overlap(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    """Return whether a contiguous tensor of `left` and one of `right` share memory."""
    ends = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in right if each.numel()]
    return any(
        each.data_ptr() < high and low < each.data_ptr() + each.nbytes
        for each in left
        if each.numel()
        for low, high in ends
    )
