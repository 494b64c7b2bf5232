"""Memory of a device, from its name or size on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline._core.units import parse_bytes
from paceline.errors import UsageError
from paceline.tools.plan.memory.non_tensor_memory import CUBLAS_NBYTES, CUDA_CONTEXT, NonTensorMemory

if TYPE_CHECKING:
    from paceline.tools.plan.memory.memory_forecast import DeviceMemory

__all__ = ["KINDS", "available_memory", "parse_device_memory"]

KINDS = ("cuda", "cpu")


def parse_device_memory(hardware: str | None, device_memory: str | None) -> int | None:
    """Return the memory of a device in bytes; None: unknown.

    Args:
        hardware: name of a GPU, such as ``"h100-sxm"``.
        device_memory: ``"24GiB"``; takes precedence over `hardware`.

    Raises:
        UsageError: the GPU is unknown, or the size is not valid.
    """
    if device_memory is not None:
        nbytes = parse_bytes(device_memory)
        if nbytes < 1:
            raise UsageError(
                f"--device-memory {device_memory}", remedy="give the memory of one device, such as 24GiB"
            )
        return nbytes
    if hardware is None:
        return None
    from paceline.cost_model.hardware_catalog import find_device

    return find_device(hardware).memory_nbytes


def available_memory(
    kind: str, capacity: int | None, cuda_context: str = CUDA_CONTEXT, data: str = "0"
) -> DeviceMemory:
    """Return the memory of a device with what occupies it besides the training.

    Args:
        kind: one of `KINDS`.
        capacity: its memory in bytes; None: unknown.
        cuda_context: memory of driver and kernels on a GPU.
        data: memory of data that stays on the device.
    """
    from paceline.tools.plan.memory.memory_forecast import DeviceMemory

    is_gpu = kind == "cuda"
    outside = NonTensorMemory(
        context_nbytes=parse_bytes(cuda_context) if is_gpu else 0,
        library_nbytes=CUBLAS_NBYTES if is_gpu else 0,
        data_nbytes=parse_bytes(data),
    )
    return DeviceMemory(capacity, outside)
