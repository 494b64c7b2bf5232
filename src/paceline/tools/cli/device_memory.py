"""The memory of a device, by name or by size, and what is taken of it before a step: what two commands ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline._core.units import parse_bytes
from paceline.errors import UsageError, unknown

if TYPE_CHECKING:
    from paceline.tools.plan.memory.memory_forecast import DeviceMemory

__all__ = ["CUDA_CONTEXT", "KINDS", "available_memory", "capacity_of"]

KINDS = ("cuda", "cpu")
CUDA_CONTEXT = "800MiB"
"""What driver and kernels take of a GPU, about."""

_CUBLAS_NBYTES = 32 << 20
"""Of cuBLAS's workspace on Hopper and later, the largest there is by default."""


def capacity_of(device: str | None, device_memory: str | None) -> int | None:
    """Return the bytes of a device's memory; None: neither says it.

    Args:
        device: a GPU by name (``"h100-sxm"``), a kind of `KINDS`, or None. device_memory: ``"24GiB"``; wins.

    Raises:
        UsageError: no device has that name, or no memory is that much.
    """
    if device_memory is not None:
        nbytes = parse_bytes(device_memory)
        if nbytes < 1:
            raise UsageError(
                f"--device-memory {device_memory}", remedy="give the memory of one device, such as 24GiB"
            )
        return nbytes
    if device is None or device in KINDS:
        return None
    from paceline.cost_model import hardware_catalog

    try:
        return hardware_catalog.find_device(device).memory_nbytes
    except UsageError:
        raise unknown("device", device, [*KINDS, *hardware_catalog.DEVICES]) from None


def available_memory(
    kind: str, capacity: int | None, cuda_context: str = CUDA_CONTEXT, data: str = "0"
) -> DeviceMemory:
    """Return the memory that a training can use on a device.

    Args:
        kind: one of `KINDS`. capacity: bytes, None: not known. cuda_context: what driver and kernels take of a GPU.
        data: bytes that stay on the device in addition to the training.
    """
    from paceline.tools.plan.memory.memory_forecast import DeviceMemory
    from paceline.tools.plan.memory.memory_ledger import NonTensorMemory

    gpu = kind == "cuda"
    return DeviceMemory(
        capacity,
        NonTensorMemory(
            context_nbytes=parse_bytes(cuda_context) if gpu else 0,
            library_nbytes=_CUBLAS_NBYTES if gpu else 0,
            data_nbytes=parse_bytes(data),
        ),
    )
