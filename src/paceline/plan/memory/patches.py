"""What torch does with memory that no operator tells of: three of its functions, replaced while a tracer is active."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

__all__ = ["converting", "shapes_only", "told_of_resizing"]


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
def converting() -> Iterator[None]:
    """Let modules be converted: ``net.bfloat16()``, ``net.to(memory_format=…)``.

    That swaps a parameter with what it becomes, which torch refuses for a tensor that somebody refers to weakly; and a
    fake mode refers to every tensor that it made, to know it again. So it forgets those two.
    """
    original = torch.utils.swap_tensors

    def swap(one: Any, other: Any) -> None:
        for fake in (one, other):
            memo = getattr(getattr(fake, "fake_mode", None), "fake_tensor_converter", None)
            known = getattr(memo, "tensor_memo", {})
            for key in [key for key, held in known.items() if held is fake]:
                del known[key]
        original(one, other)

    torch.utils.swap_tensors = swap
    try:
        yield
    finally:
        torch.utils.swap_tensors = original


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
