"""Stored boxes of tensors, and what a read has in common with one: bytes of a file that go to a region of a tensor.

Complex numbers are pairs of real ones here, which have a last dimension of 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.checkpoint.format.manifest import StoredChunk, StoredTensor, item_nbytes
from paceline.checkpoint.format.tensor_files import bytes_of
from paceline.checkpoint.parts.boxes import Box, boxes_of_range

__all__ = ["Overlap", "StoredBox", "as_real", "overlaps"]


@dataclass(frozen=True)
class StoredBox:
    """A stored box, its label and its file."""

    file: str
    file_nbytes: int
    label: str
    stored: StoredChunk

    @property
    def box(self) -> Box:
        """The box, with complex numbers as pairs of real ones."""
        return as_real(self.stored, Box(self.stored.offsets, self.stored.sizes))

    @property
    def itemsize(self) -> int:
        """Bytes of an element of it."""
        return item_nbytes(self.stored.dtype) // (2 if self.stored.dtype.startswith("complex") else 1)


class Overlap:
    """What a stored box and a read have in common.

    Args:
        chunk: the stored box.
        common: the region.
        target: the part of the tensor to fill that it belongs to; None: it is verified only.
    """

    def __init__(self, chunk: StoredBox, common: Box, target: Tensor | None) -> None:
        self.chunk, self.common, self.target = chunk, common, target
        flat = common.flat_range_in(chunk.box)
        if flat is None:  # from its first element to its last
            corner = tuple(a + n - 1 for a, n in zip(common.offsets, common.sizes, strict=True))
            ends = (replace(common, sizes=(1,) * len(corner)), Box(corner, (1,) * len(corner)))
            (first, _), (_, stop) = (end.flat_range_in(chunk.box) or (0, 0) for end in ends)
            self.span = first * chunk.itemsize, stop * chunk.itemsize
        else:
            self.span = flat[0] * chunk.itemsize, flat[1] * chunk.itemsize
        self.direct: memoryview | None = None
        if flat is not None and target is not None and target.is_contiguous():
            self.direct = bytes_of(target)

    def place(self, first: int, nbytes: int) -> memoryview | None:
        """Return where a block that begins at byte `first` of the stored box can be read into place; None: it can't."""
        start, stop = self.span
        if self.direct is None or first < start or first + nbytes > stop:
            return None
        return self.direct[first - start : first - start + nbytes]

    def take(self, data: memoryview, first: int) -> None:
        """Copy the elements in common from a block that begins at byte `first` of the stored box."""
        if self.direct is not None:
            start, stop = self.span
            low, high = max(first, start), min(first + len(data), stop)
            self.direct[low - start : high - start] = data[low - first : high - first]
        elif self.target is not None:
            self._scatter(data, first, self.target)

    def _scatter(self, data: memoryview, first: int, target: Tensor) -> None:
        box, itemsize = self.chunk.box, self.chunk.itemsize
        start, stop = max(first, self.span[0]), min(first + len(data), self.span[1])
        flat = torch.frombuffer(data, dtype=torch.uint8)[start - first : stop - first].view(target.dtype)
        for run in boxes_of_range(box.sizes, start // itemsize, stop // itemsize):
            moved = Box(tuple(a + b for a, b in zip(run.offsets, box.offsets, strict=True)), run.sizes)
            values, flat = flat[: run.numel].view(run.sizes), flat[run.numel :]
            common = moved.intersection(self.common)
            if common is not None:
                target[common.index_in(self.common)] = values[common.index_in(moved)]


def overlaps(chunks: Iterable[StoredBox], wanted: Box, into: Tensor | None) -> Iterator[Overlap]:
    """Yield what stored boxes and a read have in common; all with complex numbers as pairs of real ones."""
    for chunk in chunks:
        common = chunk.box.intersection(wanted)
        if common is not None:
            yield Overlap(chunk, common, None if into is None else into[common.index_in(wanted)])


def as_real(stored: StoredTensor | StoredChunk, box: Box) -> Box:
    """Return a box of a stored tensor with complex numbers as pairs of real ones, which it may have already."""
    if not stored.dtype.startswith("complex") or len(box.sizes) > len(stored.shape):
        return box
    return Box((*box.offsets, 0), (*box.sizes, 2))
