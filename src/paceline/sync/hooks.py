"""Hooks of parameters that tell an engine of its gradients, and keep nothing alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from paceline.sync.bucket import Slot

__all__ = ["hook"]

T = TypeVar("T")
Event = Callable[[T, int], None]


def hook(
    engine: T, slots: Sequence[Slot], arriving: Event[T] | None, accumulated: Event[T]
) -> list[RemovableHandle]:
    """Have `engine` told of every gradient until it is gone; return the handles of the hooks.

    Args:
        engine: who is told. slots: of its parameters.
        arriving: called with a slot's index before autograd adds to its gradient; None: nobody asks (a world of one
            has no buckets to prepare).
        accumulated: the same after that.
    """
    handles = []
    for slot in slots:
        if arriving is not None:
            handles.append(slot.param.register_hook(_tell(weakref.ref(engine), slot.index, arriving)))
        done = _tell(weakref.ref(engine), slot.index, accumulated)
        handles.append(slot.param.register_post_accumulate_grad_hook(done))
    weakref.finalize(engine, _remove, handles)
    return handles


def _tell(engine: weakref.ref[T], index: int, event: Event[T]) -> Callable[[torch.Tensor], None]:
    """Return the hook that tells `engine` of an event of slot `index`."""

    def tell(_tensor: torch.Tensor) -> None:
        alive = engine()
        if alive is not None:
            event(alive, index)

    return tell


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
