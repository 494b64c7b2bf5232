"""Tests that were written for GPUs, run on the CPU: their tensors and modules stay where they are made.

Inside :func:`on_cpu`, ``.cuda()``, ``.to(rank)`` and ``device="cuda:1"`` mean the CPU, and
DistributedDataParallel is given no devices, which means that a module is on the CPU.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

__all__ = ["on_cpu"]

CPU = torch.device("cpu")


class _Stay(TorchFunctionMode):
    """Has every call that would make a tensor on a GPU, or move it there, do so on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to:
            args = [args[0], *(CPU if _is_gpu(each) else each for each in args[1:])]
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = CPU
        return function(*args, **kwargs)


def _is_gpu(value: Any) -> bool:
    """Return whether `value`, given for a device, is a GPU: its number, name or device."""
    if isinstance(value, torch.device | str):
        return str(value).startswith("cuda")
    return type(value) is int


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Keep tensors and modules on the CPU instead of a GPU, in this thread."""
    make, move = DistributedDataParallel.__init__, torch.nn.Module.to

    @functools.wraps(make)
    def make_here(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **options: Any):
        make(self, module, **options)

    @functools.wraps(move)
    def move_here(self: Any, *args: Any, **kwargs: Any):
        return self if args and _is_gpu(args[0]) else move(self, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (DistributedDataParallel, "__init__", make_here),
            (torch.nn.Module, "to", move_here),
            (torch.nn.Module, "cuda", lambda self, device=None: self),
            (torch.cuda, "set_device", lambda device: None),
            (torch.cuda, "synchronize", lambda device=None: None),
            (torch.cuda, "manual_seed", torch.manual_seed),
            (torch.cuda, "current_device", lambda: CPU),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(_Stay())
        yield
