"""Which device a rank computes on, and the backend that fits it."""

from __future__ import annotations

import os
import re

from paceline.errors import UsageError, WorldError

__all__ = ["BACKENDS", "choose_device"]

CPU_BACKENDS = ("paceline", "gloo", "mpi4py")
BACKENDS = (*CPU_BACKENDS, "nccl")


def choose_device(
    device: str | None, backend: str | None, local_rank: int, local_size: int
) -> tuple[str, str]:
    """Return the device (``"cpu"`` or ``"cuda:<index>"``) and the backend of a rank.

    Without `device`, CUDA is taken where there is a GPU and the backend is none for the CPU. A launcher that shows
    each rank one GPU of its own (CUDA_VISIBLE_DEVICES) makes that GPU number 0 for each.

    Raises:
        WorldError: CUDA is asked for and absent, or the node has fewer GPUs than ranks.
        UsageError: `device` is no device, or `backend` can't serve it.
    """
    import torch

    if device not in (None, "") and not (
        isinstance(device, str) and re.fullmatch(r"cpu|cuda(:\d+)?", device)
    ):
        raise UsageError(f"unknown device {device!r}", remedy="valid: cpu, cuda, cuda:<index>")
    kind, _, index = (device or "").partition(":")
    if not kind:
        kind = "cuda" if torch.cuda.is_available() and backend not in CPU_BACKENDS else "cpu"
        if backend == "nccl":
            kind = "cuda"
    if kind == "cpu":
        if backend == "nccl":
            raise UsageError(
                "backend 'nccl' needs GPUs, but device is 'cpu'", remedy="use backend='paceline' on CPU"
            )
        return "cpu", backend or "paceline"
    number = int(index) if index else _gpu_of(local_rank, local_size)
    _check_gpu(number, f"device {device!r}" if device else f"backend {backend!r}")
    return f"cuda:{number}", backend or "nccl"


def _gpu_of(local_rank: int, local_size: int) -> int:
    """Return the number of this rank's GPU: its local rank, or 0 where it is shown only one."""
    import torch

    one_each = torch.cuda.device_count() == 1 and local_size > 1 and "CUDA_VISIBLE_DEVICES" in os.environ
    return 0 if one_each else local_rank


def _check_gpu(number: int, asked: str) -> None:
    import torch

    if not torch.cuda.is_available():
        why = (
            "this PyTorch is built without CUDA" if torch.version.cuda is None else "no GPU can be used here"
        )
        raise WorldError(
            f"{asked} asks for CUDA, but {why}", remedy="use device='cpu', or see `paceline doctor`"
        )
    count = torch.cuda.device_count()
    if number >= count:
        raise WorldError(
            f"this rank is to use GPU {number}, but the node shows {count}",
            remedy=f"start at most {count} ranks on this node, or use device='cpu'",
        )
