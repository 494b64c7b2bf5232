"""Clipping by the norm of the whole gradient, wherever its parts lie."""

from __future__ import annotations

import math

import torch

from paceline.sync.reducer import Reducer

__all__ = ["clip_global_norm_", "global_norm", "note_norm"]


def clip_global_norm_(engine: Reducer, max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale the gradients in place so that their global norm is at most `max_norm`; return the norm before.

    The factor is ``max_norm / (norm + 1e-6)``, at most 1, as in ``torch.nn.utils.clip_grad_norm_``.
    """
    shards, wholes = engine.local_grads()
    norm = _global(engine, shards, wholes, norm_type)
    if engine.gauge is not None:
        note_norm(engine, norm)
    if grads := shards + wholes:
        torch._foreach_mul_(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def global_norm(engine: Reducer, norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of the gradient over all parameters and shards; all ranks call this."""
    return _global(engine, *engine.local_grads(), norm_type)


def note_norm(engine: Reducer, norm: torch.Tensor) -> None:
    """Have all ranks look where a norm is not finite, before a clipped NaN is everywhere.

    Where ranks measure what they bring, they know already; see [Note: without peaks] in `gauge`.
    """
    gauge = engine.gauge
    assert gauge is not None, "somebody asks"
    gauge.norm = norm
    if not gauge.measures and engine.broken is None and not math.isfinite(norm):
        engine.look_closely(() if engine.apart else gauge.bad_losses(engine.wire))


def _global(
    engine: Reducer, shards: list[torch.Tensor], wholes: list[torch.Tensor], norm_type: float
) -> torch.Tensor:
    norm = _norm(wholes, norm_type, engine.device)
    if engine.splits_gradients:
        part = engine.wire.combine_norms(_norm(shards, norm_type, engine.device), norm_type)
        norm = _join(part, norm, norm_type)
    return norm


def _norm(grads: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    grads = [grad for grad in grads if grad.numel()]  # of nothing there is no largest
    if not grads:
        return torch.zeros((), device=device)
    return torch.nn.utils.get_total_norm(grads, norm_type)


def _join(one: torch.Tensor, other: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the p-norm of two parts from the p-norm of each."""
    if norm_type == math.inf:
        return torch.maximum(one, other)
    return (one**norm_type + other**norm_type) ** (1 / norm_type)
