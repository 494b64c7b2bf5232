"""Where the parameters of a fragment lie in its flat buffers, and which of their numbers are sent together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.parallel.compression.codecs import Codec
from paceline.parallel.compression.error_feedback import ErrorFeedback

__all__ = ["FragmentLayout", "ParamSlot", "Piece"]

_ALIGN = 16
"""Pieces are multiples of this many numbers per rank, so that views of other dtypes are aligned."""


@dataclass(frozen=True)
class ParamSlot:
    """Position of a parameter, or of an averaged buffer, in the flat buffers."""

    name: str
    param: Tensor
    start: int
    shape: torch.Size
    """Its shape when this was created; `param` may have been given other data since."""

    def of(self, flat: Tensor) -> Tensor:
        """Return its part of `flat`, in its shape."""
        return flat[self.start : self.start + self.shape.numel()].view(self.shape)


@dataclass(frozen=True)
class Piece:
    """Numbers of the flat buffers that are compressed and sent together."""

    start: int
    stop: int
    codec: Codec
    feedback: ErrorFeedback | None


class FragmentLayout:
    """Slots and pieces of a fragment, which `append` adds.

    Args:
        ranks: among which each piece is divided.
        piece_numel: numbers per piece.
    """

    def __init__(self, ranks: int, piece_numel: int) -> None:
        self._unit, self._piece_numel = ranks * _ALIGN, piece_numel
        self.slots: list[ParamSlot] = []
        self.pieces: list[Piece] = []
        self.end = 0

    def append(
        self,
        named: Sequence[tuple[str, Tensor]],
        codec: Codec,
        *,
        feedback: bool = False,
        decay: float = 1.0,
    ) -> None:
        """Add parameters, with their names, that are compressed in the same way; see `ErrorFeedback` for `decay`."""
        start = end = self.end
        for name, param in named:
            self.slots.append(ParamSlot(name, param, end, param.shape))
            end += param.numel()
        self.end = start + -(-(end - start) // self._unit) * self._unit
        step = max(self._unit, self._piece_numel // self._unit * self._unit)
        for begin in range(start, self.end, step):
            stop = min(begin + step, self.end)
            device = named[0][1].device
            residual = ErrorFeedback(codec, stop - begin, device, decay=decay) if feedback else None
            self.pieces.append(Piece(begin, stop, codec, residual))
