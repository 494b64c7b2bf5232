"""What torch does with memory that no operator tells of: two of its methods, replaced while a tracer is active."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

__all__ = ["shapes_only", "told_of_resizing"]


@contextmanager
def told_of_resizing(tell: Callable[[Any, int], None]) -> Iterator[None]:
    """Call `tell(storage, nbytes)` for every ``resize_`` of a storage, with which FSDP2 frees what it has gathered."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
        before = storage.nbytes()
        result = original(storage, nbytes)
        if storage.nbytes() != before:
            tell(storage, storage.nbytes())
        return result

    torch.UntypedStorage.resize_ = resize_  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original


@contextmanager
def shapes_only(ignoring: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Have `ignoring` around the places where DTensor works out shapes on tensors without memory of its own.

    It does so for the whole tensor of which a rank has a shard (torch/distributed/tensor/_sharding_prop.py), and finds
    the tracer's fake mode for it. A torch that keeps this elsewhere is left as it is.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "_propagate_tensor_meta_non_cached"
    original = getattr(ShardingPropagator, name, None)
    if original is None:
        yield
        return

    @functools.wraps(original)
    def ignored(*args: Any, **kwargs: Any) -> Any:
        with ignoring():
            return original(*args, **kwargs)

    setattr(ShardingPropagator, name, ignored)
    try:
        yield
    finally:
        setattr(ShardingPropagator, name, original)
