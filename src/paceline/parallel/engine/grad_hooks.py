"""Hooks of parameters that tell an engine of its gradients, and keep nothing alive.

Gradients that came after their bucket had left; see [Note: late gradients] in `reducer`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from paceline.parallel.engine.bucket import GradSlot
from paceline.parallel.engine.comm import Comm

__all__ = ["LateGradients", "register_grad_hooks"]

T = TypeVar("T")


Event = Callable[[T, int], None]


def register_grad_hooks(
    engine: T, slots: Sequence[GradSlot], arriving: Event[T] | None, accumulated: Event[T]
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


class LateGradients:
    """Keeps late gradients until all ranks can reduce them in a second pass."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, slot: GradSlot) -> None:
        """Take the gradient that autograd has just put beside the launched bucket of `slot`."""
        grad = slot.param.grad
        assert grad is not None, "the hook runs after accumulation"
        late = grad.detach().to(slot.view.dtype)
        before = self._kept.get(slot.index)
        self._kept[slot.index] = late if before is None else before + late
        slot.param.grad = None

    def reduce(self, slots: Sequence[GradSlot], comm: Comm, device: torch.device, *, mean: bool) -> None:
        """Add all ranks' late gradients to the reduced ones, and mend the expected number of firings.

        All ranks call this when the ledger reports a late gradient on any of them.
        """
        facts = [[slot.fired, slot.index in self._kept] for slot in slots]
        agreed = torch.tensor(facts, dtype=torch.int64, device=device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=comm.group)
        for slot, (fired, late) in zip(slots, agreed.tolist(), strict=True):
            slot.expected = max(slot.expected, fired)
            if late:
                grad = self._kept.get(slot.index)
                grad = torch.zeros_like(slot.view) if grad is None else grad.contiguous()
                comm.all_reduce(torch.view_as_real(grad) if grad.is_complex() else grad, mean=mean).wait()
                slot.view.add_(grad)
        self._kept.clear()

    def clear(self) -> None:
        """Forget them."""
        self._kept.clear()
