"""Page-locked memory of the host, which torch's CPU build cannot allocate: ordinary memory that is known as such."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["is_pinned", "page_locked_memory", "pin"]

FACTORIES = (
    "empty", "zeros", "ones", "full", "tensor", "rand", "randn", "arange",
    "empty_like", "zeros_like", "ones_like", "full_like", "empty_strided",
)  # fmt: skip
_pinned: dict[int, weakref.ref[Any]] = {}  # storages, by address


def pin(tensor: Tensor) -> Tensor:
    """Note that the memory of a tensor of the host is page-locked, and return it."""
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    _pinned[address] = weakref.ref(storage, lambda _: _pinned.pop(address, None))
    return tensor


def is_pinned(tensor: Tensor, device: Any = None) -> bool:
    """Return whether the memory of a tensor is page-locked."""
    return tensor.is_cpu and tensor.untyped_storage().data_ptr() in _pinned


def _pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
    return tensor if is_pinned(tensor) else pin(tensor.clone())


def _factory(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = original(*args, **kwargs)
        return pin(made) if pin_memory else made

    return make


@contextlib.contextmanager
def page_locked_memory() -> Iterator[None]:
    """Let torch's functions that take ``pin_memory`` accept it."""
    replaced: list[tuple[Any, str, Any]] = [
        *((torch, name, _factory(getattr(torch, name))) for name in FACTORIES),
        (Tensor, "pin_memory", _pin_memory),
        (Tensor, "is_pinned", is_pinned),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in replaced:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, replacement)
        yield
