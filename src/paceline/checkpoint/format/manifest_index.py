"""Puts the pieces of all ranks together to the manifest of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from xxhash import xxh3_128_hexdigest

from paceline.checkpoint.format.manifest import (
    Layout,
    Manifest,
    PieceFile,
    RankPiece,
    StoredTensor,
    piece_name,
)

__all__ = ["OWN", "make_manifest"]

_PAIRED = 256  # boxes that are compared with all others at a time

OWN = "rank."
"""Beginning of the names of tensors that belong to a rank's own state: they are in its piece only."""


def make_manifest(pieces: Sequence[RankPiece], texts: Sequence[bytes], head: Mapping[str, Any]) -> Manifest:
    """Return the manifest of a checkpoint.

    Several ranks may have written the same box, with the same elements: a DTensor on a part of a mesh has replicas on
    the other parts, which nobody here knows of. That of the first rank counts.

    Args:
        pieces: of all ranks.
        texts: their texts.
        head: what else the manifest has.

    Raises:
        ValueError: a tensor is not covered, or elements of it were written twice in different boxes, or with other
            values; names it.
    """
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    boxes: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, str]]] = {}
    for rank, piece in enumerate(pieces):
        for chunk in (chunk for file in piece.files.values() for chunk in file.chunks.values()):
            name, kind = chunk.tensor, (chunk.dtype, chunk.shape)
            if name.startswith(OWN):
                continue
            if found.setdefault(name, kind) != kind:
                raise ValueError(f"ranks have written {name!r} as {found[name]} and as {kind}")
            written = boxes.setdefault(name, {}).setdefault(
                (chunk.offsets, chunk.sizes), (rank, chunk.checksums)
            )
            if written[1] != chunk.checksums:
                raise ValueError(f"rank {written[0]} and rank {rank} have written {name!r} with other values")
    layouts: dict[Layout, int] = {}
    tensors = {}
    for name, (dtype, shape) in found.items():
        layout = tuple((rank, *box) for box, (rank, _) in boxes[name].items())
        numel = sum(math.prod(sizes) for _, _, sizes in layout)
        if numel != math.prod(shape):
            raise ValueError(f"{numel} of the {math.prod(shape)} elements of {name!r} were written")
        if layout not in layouts and _overlap([box for _, *box in layout]):
            raise ValueError(f"elements of {name!r} were written twice")
        tensors[name] = StoredTensor(dtype, shape, layouts.setdefault(layout, len(layouts)))
    values: dict[str, int] = {}
    for rank, piece in enumerate(pieces):
        for name, value in piece.values.items():
            if pieces[values.setdefault(name, rank)].values[name] != value:
                raise ValueError(f"rank {values[name]} and rank {rank} have written other values of {name!r}")
    return Manifest(
        nbytes=sum(piece.nbytes for piece in pieces),
        pieces=[PieceFile(piece_name(rank), xxh3_128_hexdigest(text)) for rank, text in enumerate(texts)],
        layouts=list(layouts),
        tensors=tensors,
        values=values,
        **head,
    )


def _overlap(boxes: Sequence[Sequence[Sequence[int]]]) -> bool:
    """Return whether two of the boxes, each its offsets and sizes, have elements in common."""
    filled = [box for box in boxes if math.prod(box[1])]
    if len(filled) < 2:
        return False
    low = np.array([offsets for offsets, _ in filled])
    high = low + np.array([sizes for _, sizes in filled])
    for at in range(0, len(filled), _PAIRED):
        some_low, some_high = low[at : at + _PAIRED, None], high[at : at + _PAIRED, None]
        common = np.all((some_low < high) & (low < some_high), axis=2)
        if np.count_nonzero(common) > len(some_low):  # more than each with itself
            return True
    return False
