"""Tensors as the backend takes them: on the CPU, contiguous, holding their values."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Dense", "DenseList", "are_plain", "dense_of", "nbytes_of"]

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
