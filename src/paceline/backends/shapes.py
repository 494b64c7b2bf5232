"""Whether the tensors of a call fit together, before anything is written."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.errors import UsageError

__all__ = ["check_list", "check_parts", "check_peer", "split"]


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
