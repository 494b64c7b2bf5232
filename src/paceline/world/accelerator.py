"""Any accelerator (CUDA, XPU and others) by torch's device modules: which there is, its streams, page-locked memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

__all__ = [
    "current_stream",
    "current_stream_key",
    "find_accelerator",
    "has_streams",
    "host_buffer",
    "is_capturing",
    "make_stream",
    "on_stream",
    "set_current_device",
    "synchronize",
    "used_accelerator",
]


def find_accelerator() -> str | None:
    """Return the type of this machine's accelerator, ``"cuda"`` if there are several; None if none can be used."""
    if torch.cuda.is_available():
        return "cuda"
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def used_accelerator() -> str | None:
    """Return the type of this machine's accelerator if this process has used it, else None."""
    found = find_accelerator()
    if found is None:
        return None
    initialised = getattr(torch.get_device_module(found), "is_initialized", None)
    return found if initialised is None or initialised() else None


def set_current_device(device: torch.device) -> None:
    """Make `device` the current one of its type; the CPU, and accelerators of which there is one, need nothing."""
    if device.type != "cpu" and (set_device := getattr(torch.get_device_module(device), "set_device", None)):
        set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done all that was queued on it; nothing on the CPU."""
    if has_streams(device):
        torch.get_device_module(device).synchronize(device)
    elif device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize()


def has_streams(device: torch.device) -> bool:
    """Return whether work on `device` is queued on streams, so that the host need not wait for it."""
    return device.type not in ("cpu", "meta") and hasattr(torch.get_device_module(device), "current_stream")


def current_stream(device: torch.device) -> Any:
    """Return the stream on which this thread queues work for `device`."""
    return torch.get_device_module(device).current_stream(device)


def is_capturing(device: torch.device) -> bool:
    """Return whether this thread's work for `device` is captured into a graph instead of being run."""
    capturing = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return capturing is not None and bool(capturing())


def current_stream_key(device: torch.device) -> Callable[[], Hashable]:
    """Return a function that returns what identifies this thread's stream; faster than `current_stream`."""
    raw = getattr(torch._C, f"_{device.type}_getCurrentRawStream", None)
    if raw is None or device.index is None:
        return partial(current_stream, device)
    return partial(raw, device.index)


def make_stream(device: torch.device) -> Any:
    """Return a new stream of `device`."""
    return torch.get_device_module(device).Stream(device)


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Queue this thread's work on `stream` in a with-block."""
    return torch.get_device_module(stream.device).stream(stream)


def host_buffer(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return uninitialised memory of the host that `device` copies from and to without the host waiting."""
    if has_streams(device):
        try:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError:  # a backend without page-locked memory
            pass
    return torch.empty(shape, dtype=dtype)
