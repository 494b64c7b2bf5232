"""Device memory besides tensors: CUDA context and library workspaces, in the amounts that a plan assumes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CUBLAS_NBYTES", "CUDA_CONTEXT", "NonTensorMemory"]

CUDA_CONTEXT = "800MiB"
"""Memory that driver and kernels occupy on a GPU, about."""

CUBLAS_NBYTES = 32 << 20
"""Workspace of cuBLAS on Hopper and later, the largest default."""


@dataclass(frozen=True)
class NonTensorMemory:
    """Memory that the tensors of a step don't account for.

    Attributes:
        context_nbytes: driver, CUDA context and loaded kernels.
        library_nbytes: held by libraries: cuBLAS's workspace.
        data_nbytes: of data that stay on the device.
    """

    context_nbytes: int = 0
    library_nbytes: int = 0
    data_nbytes: int = 0
