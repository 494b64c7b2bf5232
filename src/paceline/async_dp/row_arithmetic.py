"""Rows of float32: numpy arrays where they are short, torch tensors where they are long, on the same memory.

A torch call costs several times as much as a numpy call, and that dominates for short rows; from some thousand elements
on torch is as fast, then faster, since it uses all cores. Expressions that both understand, such as ``a -= b`` and
``a[...] = b``, are written out where they are needed; everything else is here.
"""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "NUMPY_MAX_NUMEL",
    "FloatRow",
    "add_scaled",
    "as_array",
    "as_row",
    "as_tensor",
    "copy_into",
    "from_bf16",
    "l2_norm",
    "subtract",
    "to_bf16",
]

FloatRow = Tensor | NDArray[np.float32]

NUMPY_MAX_NUMEL = 1 << 13
"""Longest row that numpy handles."""


def as_row(tensor: Tensor) -> FloatRow:
    """Return a view of a tensor: an array if it is short, float32 and on the CPU, else the detached tensor."""
    short = (
        tensor.numel() <= NUMPY_MAX_NUMEL and tensor.dtype == torch.float32 and tensor.device.type == "cpu"
    )
    return tensor.detach().numpy() if short else tensor.detach()


def as_tensor(row: FloatRow) -> Tensor:
    """Return a row as a tensor on the same memory."""
    return torch.from_numpy(row) if type(row) is np.ndarray else cast(Tensor, row)


def as_array(row: FloatRow) -> NDArray[np.float32]:
    """Return a row as an array on the same memory."""
    return row if type(row) is np.ndarray else cast(Tensor, row).numpy()


def copy_into(row: FloatRow, into: FloatRow) -> None:
    """Copy a row into another."""
    if type(into) is np.ndarray:
        into[...] = as_array(row)
    else:
        as_tensor(into).copy_(as_tensor(row))


def subtract(row: FloatRow, other: FloatRow, into: FloatRow) -> None:
    """Compute into = row − other."""
    if type(into) is np.ndarray:
        np.subtract(as_array(row), as_array(other), into)
    else:
        torch.sub(as_tensor(row), as_tensor(other), out=as_tensor(into))


def add_scaled(row: FloatRow, factor: float, other: FloatRow) -> None:
    """Compute row += factor · other."""
    if type(row) is np.ndarray:
        row += np.float32(factor) * as_array(other)
    else:
        as_tensor(row).add_(as_tensor(other), alpha=factor)


def to_bf16(row: NDArray[np.float32], into: NDArray[np.uint16]) -> None:
    """Round to bfloat16, to the nearest, ties to even; NaN stays NaN."""
    bits = row.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += bits
    rounded += 0x7FFF
    rounded >>= 16
    into[...] = rounded
    if math.isnan(np.maximum.reduce(row)):
        into[np.isnan(row)] = 0x7FC0


def from_bf16(row: NDArray[np.uint16], into: NDArray[np.float32]) -> None:
    """Widen bfloat16 to float32."""
    np.left_shift(row, 16, out=into.view(np.uint32), dtype=np.uint32)


def l2_norm(row: FloatRow) -> float:
    """Return the Euclidean norm; NaN or infinite if an element is."""
    if type(row) is np.ndarray:
        with np.errstate(over="ignore"):  # then it is infinite
            return math.sqrt(row.dot(row))
    return float(torch.linalg.vector_norm(as_tensor(row)))
