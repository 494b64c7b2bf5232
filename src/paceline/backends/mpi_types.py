"""What MPI calls torch's dtypes and reductions.

MPI has no 16-bit floats: they are reduced as float32 and rounded once, as the paceline backend does for more than
two ranks. It has no bool either: a bool is a byte of 0 or 1, its sum or maximum is "or", its product or minimum "and".
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.backends.reduction import Reduction

__all__ = ["WIDENED", "MpiTypes"]

WIDENED = (torch.float16, torch.bfloat16)
"""Dtypes that are reduced as float32."""

_NAMES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
    torch.uint8: "UINT8_T",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.bool: "UINT8_T",
}
_OPS = {"SUM": "SUM", "AVG": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX"}
_OPS |= {"BAND": "BAND", "BOR": "BOR", "BXOR": "BXOR"}
_BOOL_OPS = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}


class MpiTypes:
    """Datatypes and reductions of an MPI library.

    Args:
        mpi: the module ``mpi4py.MPI``.
    """

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi

    def datatype(self, dtype: torch.dtype) -> Any:
        """Return MPI's datatype for the elements of a reduction."""
        return getattr(self._mpi, _NAMES[dtype])

    def op(self, how: Reduction, dtype: torch.dtype) -> Any:
        """Return MPI's operation for a reduction; for a mean, that of its sum."""
        names = _OPS | _BOOL_OPS if dtype == torch.bool else _OPS
        return getattr(self._mpi, names[how.name])
