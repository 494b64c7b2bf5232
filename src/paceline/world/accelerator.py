"""Streams, events and page-locked memory of any accelerator: CUDA, XPU and others, by torch's device modules."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

__all__ = [
    "current_stream",
    "current_stream_key",
    "has_streams",
    "host_buffer",
    "is_capturing",
    "make_stream",
    "on_stream",
]


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
