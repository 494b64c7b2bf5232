"""Contiguous tensors seen as the memory they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["bytes_of", "copy", "flat_of", "overlap", "same_memory"]


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
