"""Selects the device of a rank and the backend that fits it."""

from __future__ import annotations

import os
import re

from paceline.errors import UsageError, WorldError

__all__ = ["BACKENDS", "choose_device"]

_CPU_BACKENDS = ("paceline", "gloo", "mpi4py")
BACKENDS = (*_CPU_BACKENDS, "nccl")


def choose_device(
    device: str | None, backend: str | None, local_rank: int, local_size: int
) -> tuple[str, str]:
    """Return the device (``"cpu"`` or ``"cuda:<index>"``) and the backend of a rank.

    Without `device`, CUDA is used if there is a GPU and the backend is not one for the CPU. If a launcher shows each
    rank one GPU only (CUDA_VISIBLE_DEVICES), that is GPU 0 for each.

    Raises:
        WorldError: CUDA is requested and absent, or the node has fewer GPUs than ranks.
        UsageError: `device` is not a device, or `backend` does not support it.
    """
    import torch

    valid = isinstance(device, str) and re.fullmatch(r"cpu|cuda(:\d+)?", device)
    if device not in (None, "") and not valid:
        raise UsageError(f"unknown device {device!r}", remedy="valid: cpu, cuda, cuda:<index>")
    kind, _, index = (device or "").partition(":")
    if not kind:
        available = torch.cuda.is_available() and backend not in _CPU_BACKENDS
        kind = "cuda" if available or backend == "nccl" else "cpu"
    if kind == "cpu":
        if backend == "nccl":
            raise UsageError(
                "backend 'nccl' needs GPUs, but device is 'cpu'", remedy="use backend='paceline' on CPU"
            )
        return "cpu", backend or "paceline"
    if index:
        number = int(index)
    else:  # this rank's GPU is its local rank, or 0 if it sees only one
        sees_one = torch.cuda.device_count() == 1 and local_size > 1 and "CUDA_VISIBLE_DEVICES" in os.environ
        number = 0 if sees_one else local_rank
    _check_gpu(number, f"device {device!r}" if device else f"backend {backend!r}")
    return f"cuda:{number}", backend or "nccl"


def _check_gpu(number: int, requested: str) -> None:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        reason = "no GPU can be used here" if built else "this PyTorch is built without CUDA"
        raise WorldError(
            f"{requested} requires CUDA, but {reason}", remedy="use device='cpu', or see `paceline doctor`"
        )
    count = torch.cuda.device_count()
    if number >= count:
        raise WorldError(
            f"this rank should use GPU {number}, but the node has {count}",
            remedy=f"start at most {count} ranks on this node, or use device='cpu'",
        )
