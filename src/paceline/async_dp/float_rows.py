"""Rows of float32 numbers: few of them as a numpy array, many as a torch tensor, of the same memory either way.

A call of torch takes several times as long as one of numpy, which is all that counts for a few numbers; from some
thousands on torch is as quick, and then quicker, since it uses all cores. What both understand, such as ``a -= b`` and
``a[...] = b``, is written so; what they don't is here.
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
    "as_tensor",
    "to_bf16",
    "copy_into",
    "fastest_form",
    "from_bf16",
    "l2_norm",
    "subtract",
]

FloatRow = Tensor | NDArray[np.float32]

NUMPY_MAX_NUMEL = 1 << 13
"""As many as are handled by numpy."""


def fastest_form(tensor: Tensor) -> FloatRow:
    """Return the same numbers as an array, if they are few float32 ones in the memory of the CPU."""
    few = tensor.numel() <= NUMPY_MAX_NUMEL and tensor.dtype == torch.float32 and tensor.device.type == "cpu"
    return tensor.detach().numpy() if few else tensor.detach()


def as_tensor(numbers: FloatRow) -> Tensor:
    """Return the same numbers as a tensor."""
    return torch.from_numpy(numbers) if type(numbers) is np.ndarray else cast(Tensor, numbers)


def as_array(numbers: FloatRow) -> NDArray[np.float32]:
    """Return the same numbers as an array."""
    return numbers if type(numbers) is np.ndarray else cast(Tensor, numbers).numpy()


def copy_into(numbers: FloatRow, into: FloatRow) -> None:
    """Copy numbers."""
    if type(into) is np.ndarray:
        into[...] = as_array(numbers)
    else:
        as_tensor(into).copy_(as_tensor(numbers))


def subtract(numbers: FloatRow, other: FloatRow, into: FloatRow) -> None:
    """Write numbers − other."""
    if type(into) is np.ndarray:
        np.subtract(as_array(numbers), as_array(other), into)
    else:
        torch.sub(as_tensor(numbers), as_tensor(other), out=as_tensor(into))


def add_scaled(numbers: FloatRow, factor: float, other: FloatRow) -> None:
    """Do numbers += factor · other."""
    if type(numbers) is np.ndarray:
        numbers += np.float32(factor) * as_array(other)
    else:
        as_tensor(numbers).add_(as_tensor(other), alpha=factor)


def to_bf16(numbers: NDArray[np.float32], into: NDArray[np.uint16]) -> None:
    """Write numbers as bfloat16, rounded to the nearest, ties to even; NaN stays NaN."""
    bits = numbers.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += bits
    rounded += 0x7FFF
    rounded >>= 16
    into[...] = rounded
    if math.isnan(np.maximum.reduce(numbers)):
        into[np.isnan(numbers)] = 0x7FC0


def from_bf16(given: NDArray[np.uint16], into: NDArray[np.float32]) -> None:
    """Write bfloat16 numbers as float32."""
    np.left_shift(given, 16, out=into.view(np.uint32), dtype=np.uint32)


def l2_norm(numbers: FloatRow) -> float:
    """Return the square root of the sum of their squares; NaN or infinite if one of them is."""
    if type(numbers) is np.ndarray:
        return math.sqrt(numbers.dot(numbers))
    return float(torch.linalg.vector_norm(as_tensor(numbers)))
