"""Boxes: the rectangular regions of a tensor that ranks hold and files store.

A shard of a DTensor is a box. A range of a flattened tensor, as ZeRO cuts parameters, is a few boxes: what is left of
the first row, whole rows, the beginning of the last one; in several dimensions, of rows of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from paceline.errors import UsageError

__all__ = ["Box", "box_of_shard", "boxes_of_range", "storage_order", "writes_replica"]


@dataclass(frozen=True)
class Box:
    """A rectangular region of a tensor; without dimensions, its only element.

    Attributes:
        offsets: of its first element, per dimension.
        sizes: per dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def intersection(self, other: Box) -> Box | None:
        """Return the box that both have in common; None: they have no element in common."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = (
            min(a + m, b + n)
            for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(end - start for start, end in zip(offsets, ends, strict=True))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    def index_in(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices that select it in a tensor with the elements of `outer`.

        Example:
            >>> Box((2, 1), (1, 3)).index_in(Box((2, 0), (4, 4)))
            (slice(0, 1, None), slice(1, 4, None))
        """
        return tuple(
            slice(a - b, a - b + n) for a, n, b in zip(self.offsets, self.sizes, outer.offsets, strict=True)
        )

    def flat_range_in(self, outer: Box) -> tuple[int, int] | None:
        """Return start and stop of its elements in a flattened tensor of `outer`; None: they are not contiguous."""
        start, stride, open_ended = 0, 1, True  # whether all inner dimensions are whole
        count = 1
        for a, n, b, m in zip(
            reversed(self.offsets),
            reversed(self.sizes),
            reversed(outer.offsets),
            reversed(outer.sizes),
            strict=True,
        ):
            if n > 1 and not open_ended:
                return None
            start += (a - b) * stride
            count *= n
            stride *= m
            open_ended = open_ended and n == m
        return start, start + count

    def permuted(self, order: Sequence[int]) -> Box:
        """Return it with its dimensions in another order."""
        return Box(tuple(self.offsets[at] for at in order), tuple(self.sizes[at] for at in order))


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that elements start … stop - 1 of a flattened tensor form, in their order.

    Each is contiguous in the flattened tensor. There are at most 2 · dimensions - 1.

    Example:
        >>> [each.sizes for each in boxes_of_range((5, 10), 8, 42)]
        [(1, 2), (3, 10), (1, 2)]
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row_numel = math.prod(shape[1:])
    first, last = -(-start // row_numel), stop // row_numel  # whole rows
    if first > last:  # inside one row
        yield from _in_row(shape, last, start - last * row_numel, stop - last * row_numel)
        return
    if start < first * row_numel:
        yield from _in_row(shape, first - 1, start - (first - 1) * row_numel, row_numel)
    if first < last:
        yield Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
    if last * row_numel < stop:
        yield from _in_row(shape, last, 0, stop - last * row_numel)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_range(shape[1:], start, stop):
        yield Box((row, *box.offsets), (1, *box.sizes))


def storage_order(tensor: Tensor) -> list[int]:
    """Return the dimensions of a dense tensor in the order in which it is stored, the slowest first.

    Example:
        >>> storage_order(torch.empty(1, 3, 4, 5).to(memory_format=torch.channels_last))
        [0, 2, 3, 1]
    """
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda at: (-strides[at], at))


def box_of_shard(name: str, tensor: DTensor) -> Box:
    """Return the box of a DTensor that this rank holds.

    Args:
        name: of the tensor, for the error.
        tensor: sharded in any way that gives every rank one box.

    Raises:
        UsageError: it is sharded in another way.
    """
    if (simple := _simple_box(tensor)) is not None:
        return simple
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise UsageError(
                f"{name!r} is a sum that is not yet reduced ({placement} on axis {axis} of its mesh)",
                remedy="redistribute it to Shard or Replicate before it is saved or loaded",
            )
        if not isinstance(placement, Replicate) and type(placement) is not Shard:
            _check_rows(name, tensor, placement.dim)  # type: ignore[attr-defined]
    (chunk,) = tensor.__create_chunk_list__()
    if math.prod(chunk.sizes) == 0:
        return Box((0,) * tensor.dim(), tuple(tensor.to_local().shape))
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def _simple_box(tensor: DTensor) -> Box | None:
    """Return the box of a DTensor of which each dimension is cut at most once; None: it is cut in another way.

    This is what `__create_chunk_list__` returns, in a twentieth of the time.
    """
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    place = tensor.device_mesh.get_coordinate()
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        if (
            type(placement) is not Shard
            or place is None
            or sizes[placement.dim] != tensor.shape[placement.dim]
        ):
            return None
        whole = sizes[placement.dim]
        chunk = -(-whole // tensor.device_mesh.shape[axis])
        start = chunk * place[axis]
        if start >= whole:
            return None
        offsets[placement.dim], sizes[placement.dim] = start, min(chunk, whole - start)
    return Box(tuple(offsets), tuple(sizes)) if math.prod(sizes) else None


def _check_rows(name: str, tensor: DTensor, dim: int) -> None:
    """Raise unless the indices along `dim` that this rank holds, with strided shards, are neighbours."""
    rows = torch.arange(tensor.shape[dim])
    for axis, placement in enumerate(tensor.placements):
        if getattr(placement, "dim", None) == dim:
            runs = rows.chunk(getattr(placement, "split_factor", 1))
            rank, ranks = tensor.device_mesh.get_local_rank(axis), tensor.device_mesh.size(axis)
            parts = [run.chunk(ranks) for run in runs]
            rows = torch.cat([part[rank] if rank < len(part) else rows[:0] for part in parts])
    if len(rows) > 1 and int(rows[-1] - rows[0]) != len(rows) - 1:
        raise UsageError(
            f"{name!r}, shape {list(tensor.shape)}, is sharded as {tensor.placements}: this rank holds several regions",
            remedy="choose a size that divides evenly over the mesh, or another placement",
        )


def writes_replica(tensor: DTensor, number: int) -> bool:
    """Return whether this rank writes its shard, of the ranks that hold the same one.

    Args:
        tensor: the tensor.
        number: of the tensor; consecutive ones are dealt to different replicas.
    """
    mesh = tensor.device_mesh
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            if mesh.get_local_rank(axis) != number % mesh.size(axis):
                return False
            number //= mesh.size(axis)
    return True
