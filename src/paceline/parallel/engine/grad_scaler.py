"""Makes ``torch.amp.GradScaler`` decide about a step from the gradient of all ranks, alike on every rank.

The scaler looks for infinities in ``param.grad`` before ``step()``, so the step guard comes too late for it: gradients
of one rank would make that rank alone skip the step, and leave the others waiting. And sharded gradients are not in
``param.grad``. So the gradients are synchronised before the scaler reads them; where each rank holds a shard of them,
it unscales its shard, and an infinity in any shard counts on all ranks.

[Note: torch internals] torch has no hook there. The method that reads the gradients, for ``unscale_()``, ``step()`` and
fused optimizers alike, is private to torch and replaced here. Under a torch version without it, scalers see what is in
``param.grad`` when they are called.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from paceline.parallel.gradient_collectives import Comm

__all__ = ["ScaledEngine", "hand_on_scale", "install", "skips_on_device"]

_METHOD = "_unscale_grads_"


class ScaledEngine(Protocol):
    """An engine whose gradients a scaler reads."""

    comm: Comm

    @property
    def splits_gradients(self) -> bool:
        """Whether ranks hold different parts of the synchronised gradient."""
        ...

    def holds(self, param: torch.Tensor) -> bool:
        """Return whether `param` is one of the model's."""
        ...

    def local_grads_of(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's parts of the gradients of some of the model's parameters."""
        ...


def skips_on_device(
    optimizer: torch.optim.Optimizer, updates: Callable[[torch.Tensor], bool] | None = None
) -> bool:
    """Return whether ``step()`` changes nothing where ``optimizer.found_inf`` is 1, without the host reading that.

    This is torch's protocol between scalers and fused optimizers. Before the first update it is not safe: fused SGD
    would take over a momentum that was never written.

    Args:
        optimizer: any.
        updates: returns whether the next step updates a parameter; None: if it has a gradient.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    for group in optimizer.param_groups:
        if not group.get("fused", True):
            return False
        if group.get("momentum", 1):
            first = next(
                (p for p in group["params"] if (updates(p) if updates else p.grad is not None)), None
            )
            if first is not None and not optimizer.state.get(first):
                return False
    return True


@contextlib.contextmanager
def hand_on_scale(outer: torch.optim.Optimizer, inner: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """In a with-block, let `inner` optimizers have what a scaler has set on `outer`."""
    names = [name for name in ("grad_scale", "found_inf") if getattr(outer, name, None) is not None]
    for name in names:
        for each in inner:
            setattr(each, name, getattr(outer, name))
    try:
        yield
    finally:
        for name in names:
            for each in inner:
                delattr(each, name)


def install(engines_ready_to_step: Callable[[torch.optim.Optimizer], Sequence[ScaledEngine]]) -> None:
    """Make all scalers of this process work as above.

    Args:
        engines_ready_to_step: returns the engines whose parameters an optimizer holds, with their gradients
            synchronised; raises where it must not step.
    """
    for kind in (GradScaler, ShardedGradScaler):
        original = vars(kind).get(_METHOD)  # see [Note: torch internals]
        if original is not None:
            setattr(kind, _METHOD, _synchronising(original, engines_ready_to_step))


def _synchronising(
    original: Callable[..., dict[torch.device, torch.Tensor]],
    engines_ready_to_step: Callable[[torch.optim.Optimizer], Sequence[ScaledEngine]],
) -> Callable[..., dict[torch.device, torch.Tensor]]:
    @functools.wraps(original)
    def unscale(
        scaler: GradScaler,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        *args: Any,
    ) -> dict[torch.device, torch.Tensor]:
        split = [engine for engine in engines_ready_to_step(optimizer) if engine.splits_gradients]
        if not split:
            return original(scaler, optimizer, inv_scale, found_inf, *args)
        held = SimpleNamespace(param_groups=[{"params": _stand_ins(optimizer, split)}])
        found = original(scaler, held, inv_scale, found_inf, *args) or {found_inf.device: found_inf}
        for engine in split:
            for each in found.values():
                each.copy_(engine.comm.combine_norms(each, math.inf))
        return found

    return unscale


def _stand_ins(optimizer: torch.optim.Optimizer, split: Sequence[ScaledEngine]) -> list[torch.Tensor]:
    """Return tensors with this rank's parts of the optimizer's gradients in ``.grad``, without copies."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    grads = [
        param.grad for param in params if param.grad is not None and not any(e.holds(param) for e in split)
    ]
    for engine in split:
        grads += engine.local_grads_of([param for param in params if engine.holds(param)])
    stand_ins = []
    for grad in grads:
        stand_in = grad.detach()
        stand_in.grad = grad
        stand_ins.append(stand_in)
    return stand_ins
