"""Puts the pieces of all ranks together to the manifest of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

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

OWN = "rank."
"""Beginning of the names of tensors that belong to a rank's own state: they are in its piece only."""


def make_manifest(pieces: Sequence[RankPiece], texts: Sequence[bytes], head: Mapping[str, Any]) -> Manifest:
    """Return the manifest of a checkpoint.

    Args:
        pieces: of all ranks.
        texts: their texts.
        head: what else the manifest has.

    Raises:
        ValueError: a tensor is not covered, or elements of it were written twice; names it.
    """
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    boxes: dict[str, list[tuple[int, tuple[int, ...], tuple[int, ...]]]] = {}
    for rank, piece in enumerate(pieces):
        for file in piece.files.values():
            for chunk in file.chunks.values():
                if chunk.tensor.startswith(OWN):
                    continue
                kind = (chunk.dtype, chunk.shape)
                if found.setdefault(chunk.tensor, kind) != kind:
                    raise ValueError(
                        f"ranks have written {chunk.tensor!r} as {found[chunk.tensor]} and as {kind}"
                    )
                boxes.setdefault(chunk.tensor, []).append((rank, chunk.offsets, chunk.sizes))
    layouts: dict[Layout, int] = {}
    tensors = {}
    for name, (dtype, shape) in found.items():
        written = sum(math.prod(sizes) for _, _, sizes in boxes[name])
        if written != math.prod(shape):
            raise ValueError(f"{written} of the {math.prod(shape)} elements of {name!r} were written")
        layout = tuple(boxes[name])
        tensors[name] = StoredTensor(dtype, shape, layouts.setdefault(layout, len(layouts)))
    values = {name: rank for rank, piece in enumerate(pieces) for name in piece.values}
    if len(values) != sum(len(piece.values) for piece in pieces):
        raise ValueError("two ranks have written the same plain value")
    return Manifest(
        nbytes=sum(piece.nbytes for piece in pieces),
        pieces=[PieceFile(piece_name(rank), xxh3_128_hexdigest(text)) for rank, text in enumerate(texts)],
        layouts=list(layouts),
        tensors=tensors,
        values=values,
        **head,
    )
