"""Parameter hooks that report gradients to an engine without keeping it alive; gradients that arrive late.

In an ordinary backward, of a bucket's small gradients only the last one is reported, as a call costs about as much as
the gradient; see [Note: taking gradients over] in `bucket`.

[Note: gradients only computed] ``torch.autograd.grad`` runs a model's hooks too, but accumulates nothing, and one rank
may call it alone. Called for a parameter, or for anything before one, it will not run that parameter's accumulation,
although the graph leads there. A backward that accumulates nothing since the graph leads to no parameter is another
thing: the rank has skipped the whole model, and the others have not.

[Note: order of hooks] torch calls a parameter's hooks in the order of registration. The engine's come last, so that a
program's hooks see and may change the gradient of their rank before it is sent: they are registered again in every
backward before there are buckets. Hooks of the program that are registered after its first step find ``param.grad``
sent already, and None, where their parameter is the last of its bucket.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from paceline.parallel.buckets.grad_slot import GradSlot, SlotBucket
from paceline.parallel.gradient_collectives import Comm

__all__ = ["GradHooks", "LateGradients", "accumulates_nothing"]

T = TypeVar("T")
Callback = Callable[[T, int], None]


class GradHooks:
    """Reports gradients after autograd has added to them, until the engine is deleted.

    Args:
        engine: held weakly; the hooks are removed with it.
        slots: its parameters.
        after: called with the engine and a slot's index after autograd has added to its gradient.
        small: called instead for a small gradient, if it is the last of its bucket or `watching`.

    Attributes:
        remove: removes the hooks.
        watching: not empty: small gradients are all reported.
    """

    def __init__(self, engine: T, slots: Sequence[GradSlot], after: Callback[T], small: Callback[T]) -> None:
        self.watching = [True]
        self._engine, self._after, self._small = weakref.ref(engine), after, small
        self._handles: list[RemovableHandle] = []
        for slot in slots:
            hook = _reporting_hook(self._engine, slot.index, after)
            self._handles.append(slot.param.register_post_accumulate_grad_hook(hook))
        self.remove = weakref.finalize(engine, _remove, self._handles)

    def move_last(self) -> None:
        """Move the hooks behind all that were registered since; see [Note: order of hooks]."""
        for handle in self._handles:
            hooks = handle.hooks_dict_ref()
            if hooks is not None and handle.id in hooks:
                hooks[handle.id] = hooks.pop(handle.id)

    def skip_small(self, slots: Sequence[GradSlot]) -> None:
        """Report small gradients as above, now that all are in buckets."""
        for handle, slot in zip(self._handles, slots, strict=True):
            hooks = handle.hooks_dict_ref()
            if hooks is not None and handle.id in hooks:
                hooks[handle.id] = self._hook_of(slot)

    def _hook_of(self, slot: GradSlot) -> Callable[[torch.Tensor], None]:
        if not slot.small:
            return _reporting_hook(self._engine, slot.index, self._after)
        report = _reporting_hook(self._engine, slot.index, self._small)
        last = slot is slot.bucket.last_small
        return report if last else _skipping_hook(slot.bucket, report, self.watching)


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _reporting_hook(
    engine: weakref.ref[T], index: int, callback: Callback[T]
) -> Callable[[torch.Tensor], None]:
    def hook(_param: torch.Tensor) -> None:
        alive = engine()
        if alive is not None:
            callback(alive, index)

    hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # a pickled parameter has no hook, as in DDP
    return hook


def _skipping_hook(
    bucket: SlotBucket, report: Callable[[torch.Tensor], None], watching: list[bool]
) -> Callable[[torch.Tensor], None]:
    def hook(param: torch.Tensor) -> None:
        if watching:
            report(param)

    def hook_on_streams(param: torch.Tensor) -> None:
        bucket.note_writer()
        if watching:
            report(param)

    chosen = hook if bucket.writers is None else hook_on_streams
    chosen.__torch_unserializable__ = True  # type: ignore[attr-defined]
    return chosen


def accumulates_nothing(params: Callable[[], Iterable[torch.Tensor]]) -> bool:
    """Return whether the running backward only computes gradients; see [Note: gradients only computed].

    Called in a hook. In a backward that accumulates, this looks no further than the first parameter in the graph.

    Args:
        params: returns the model's parameters, as they are in the graph.
    """
    trained = (param for param in params() if param.requires_grad)
    try:
        if any(torch._C._will_engine_execute_node(get_gradient_edge(param).node) for param in trained):
            return False
    except RuntimeError:  # torch refuses the question for a leaf that torch.autograd.grad was called for
        return True
    return _leads_to(torch._C._current_autograd_node(), set(map(id, params())))


def _leads_to(start: Any, params: set[int]) -> bool:
    """Return whether the graph from the node `start` leads to one of `params`, given by their ids."""
    seen, ahead = set(), [start]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        if id(getattr(node, "variable", None)) in params:
            return True
        seen.add(node)
        ahead += [following for following, _ in node.next_functions]
    return False


class LateGradients:
    """Gradients that arrived after their bucket was launched; see [Note: late gradients] in `reducer`."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, slot: GradSlot) -> None:
        """Take the gradient that autograd has just put outside the launched bucket of `slot`."""
        grad = slot.param.grad
        assert grad is not None, "the hook runs after accumulation"
        late = grad.detach().to(slot.view.dtype)
        before = self._kept.get(slot.index)
        self._kept[slot.index] = late if before is None else before + late
        slot.param.grad = None

    def reduce(self, slots: Sequence[GradSlot], comm: Comm, device: torch.device, *, mean: bool) -> None:
        """Add all ranks' late gradients to the reduced ones, and correct the expected number of firings.

        All ranks call this when the round status reports a late gradient on any of them.
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
        """Discard them."""
        self._kept.clear()
