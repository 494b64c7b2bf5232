"""Clipping by the norm of the whole gradient, wherever its parts lie.

[Note: one norm for all plans] A sum over shards is rounded otherwise than a sum over whole gradients. Where the plan
may change from step to step (``sync="auto"``) that would change parameters in their last bits. So there the norm is
summed in float64 and rounded to float32: what the order of a sum changes in float64 is gone then.
"""

from __future__ import annotations

import math

import torch

from paceline.parallel.engine.reducer import Reducer

__all__ = ["clip_global_norm_", "global_norm", "note_norm"]

_BLOCK = 1 << 16
"""Elements that are turned into float64 at a time: they stay in the cache."""


def clip_global_norm_(engine: Reducer, max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale the gradients in place so that their global norm is at most `max_norm`; return the norm before.

    The factor is ``max_norm / (norm + 1e-6)``, at most 1, as in ``torch.nn.utils.clip_grad_norm_``.
    """
    shards, wholes = engine.local_grads()
    norm = _global(engine, shards, wholes, norm_type)
    if engine.finite_check is not None:
        note_norm(engine, norm)
    if grads := shards + wholes:
        torch._foreach_mul_(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def global_norm(engine: Reducer, norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of the gradient over all parameters and shards; all ranks call this."""
    return _global(engine, *engine.local_grads(), norm_type)


def note_norm(engine: Reducer, norm: torch.Tensor) -> None:
    """Have all ranks look where a norm is not finite, before a clipped NaN is everywhere.

    Where ranks measure what they bring, they know already; see [Note: without peaks] in `finite_check`.
    """
    finite_check = engine.finite_check
    assert finite_check is not None, "somebody asks"
    finite_check.norm = norm
    if not finite_check.measures and engine.non_finite is None and not math.isfinite(norm):
        engine.look_closely(() if engine.local_only else finite_check.bad_losses(engine.comm))


def _global(
    engine: Reducer, shards: list[torch.Tensor], wholes: list[torch.Tensor], norm_type: float
) -> torch.Tensor:
    take = _norm if engine.tuner is None else _precise_norm
    norm = take(wholes, norm_type, engine.device)
    if engine.splits_gradients:
        part = engine.comm.combine_norms(take(shards, norm_type, engine.device), norm_type)
        norm = _join(part, norm, norm_type)
    return norm if engine.tuner is None else norm.to(torch.float32)


def _norm(grads: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    grads = [grad for grad in grads if grad.numel()]  # of nothing there is no largest
    if not grads:
        return torch.zeros((), device=device)
    return torch.nn.utils.get_total_norm(grads, norm_type)


def _precise_norm(grads: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Return the norm in float64; see [Note: one norm for all plans]."""
    parts = [
        torch.linalg.vector_norm(part, norm_type, dtype=_precise(grad.dtype))
        for grad in grads
        for part in grad.reshape(-1).split(_BLOCK)
        if part.numel()
    ]
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.linalg.vector_norm(torch.stack(parts), norm_type)


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _join(one: torch.Tensor, other: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the p-norm of two parts from the p-norm of each."""
    if norm_type == math.inf:
        return torch.maximum(one, other)
    return (one**norm_type + other**norm_type) ** (1 / norm_type)
