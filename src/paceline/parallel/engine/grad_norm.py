"""Norm of, and clipping by, the whole gradient, whichever ranks hold its parts.

[Note: one norm for any number of ranks] With virtual ranks the norm may depend neither on the ranks nor on the buckets.
There every gradient starts at a multiple of `NORM_BLOCK` elements, and so does every rank's part. The norms of these
blocks are gathered, and their squares added in the order of the parameters.

[Note: one norm for all plans] A sum over shards rounds differently than a sum over whole gradients. Where the plan may
change from step to step (``sync="auto"``) that would change the last bits of parameters. There the norm is summed in
float64 and rounded to float32, which hides the order of the sum.
"""

from __future__ import annotations

import math

import torch

from paceline.parallel.engine.loss_weights import multiply_by
from paceline.parallel.engine.reducer import Reducer
from paceline.world.control_collectives import gather_rows

__all__ = ["NORM_BLOCK", "clip_global_norm_", "global_norm", "note_norm"]

NORM_BLOCK = 256
"""See [Note: one norm for any number of ranks]."""

_BLOCK = 1 << 16
"""Elements that a CPU converts to float64 at a time, so that they stay in its cache."""


def clip_global_norm_(engine: Reducer, max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale the gradients in place so that their global norm is at most `max_norm`; return the norm before.

    The factor is ``max_norm / (norm + 1e-6)``, at most 1, as in ``torch.nn.utils.clip_grad_norm_``.
    """
    shards, wholes = engine.local_grads()
    norm = _global(engine, shards, wholes, norm_type)
    if engine.finite_check is not None:
        note_norm(engine, norm)
    grads = [*shards, *wholes, *engine.copied_grads()]
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if engine.device.type != "cpu":  # there a factor of another dtype takes a kernel per gradient
        multiply_by(grads, factor)
    elif grads:
        torch._foreach_mul_(grads, factor)
    return norm


def global_norm(engine: Reducer, norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of the gradient over all parameters and shards; all ranks call this."""
    return _global(engine, *engine.local_grads(), norm_type)


def note_norm(engine: Reducer, norm: torch.Tensor) -> None:
    """Record the norm for the finite check; if it is not finite, all ranks inspect the gradient before it is clipped.

    Ranks that measure peaks know already; see [Note: without peaks] in `gradient_finite_check`. So does an accelerator
    that has inspected the result.
    """
    finite_check = engine.finite_check
    assert finite_check is not None, "a finite check is installed"
    finite_check.norm = norm
    if finite_check.present is not None:
        return
    if not finite_check.measures and engine.non_finite is None and not math.isfinite(norm):
        engine.inspect_result(() if engine.local_only else finite_check.ranks_with_bad_loss(engine.comm))


def _global(
    engine: Reducer, shards: list[torch.Tensor], wholes: list[torch.Tensor], norm_type: float
) -> torch.Tensor:
    if engine.virtual_ranks is not None:
        return _norm_of_blocks(engine, norm_type)
    norm_of = _norm if engine.tuner is None else _precise_norm
    norm = norm_of(wholes, norm_type, engine.device)
    if engine.splits_gradients:
        part = engine.comm.combine_norms(norm_of(shards, norm_type, engine.device), norm_type)
        if norm_type == math.inf:
            norm = torch.maximum(part, norm)
        else:
            norm = (part**norm_type + norm**norm_type) ** (1 / norm_type)
    return norm if engine.tuner is None else norm.to(torch.float32)


def _norm_of_blocks(engine: Reducer, norm_type: float) -> torch.Tensor:
    """Return the norm that is the same to the bit on any ranks; see [Note: one norm for any number of ranks]."""
    held = [bucket.grads for bucket in engine.buckets if bucket.slots]
    if engine.sharded:
        held = [bucket.result(low, high) for bucket, low, high in engine.launch_queue.owned_ranges()]
    if not held:
        return torch.zeros((), device=engine.device)
    parts = [torch.linalg.vector_norm(flat.view(-1, NORM_BLOCK), norm_type, dim=1) for flat in held]
    own = torch.cat([part.to(torch.float64) for part in parts])
    rows = torch.stack(gather_rows(own, engine.comm.group)) if engine.sharded else own
    if engine.block_order is None:
        engine.block_order = _block_order(engine, [len(part) for part in parts]).to(rows.device)
    norms = rows.view(-1)[engine.block_order].to(engine.device)
    if norm_type == math.inf:
        return norms.max().to(torch.float32)
    return ((norms**norm_type).sum() ** (1 / norm_type)).to(torch.float32)


def _block_order(engine: Reducer, lengths: list[int]) -> torch.Tensor:
    """Return where the blocks of every parameter are in the gathered rows, in the order of the parameters.

    Args:
        engine: the reducer.
        lengths: blocks of this rank's part of each bucket, as of every other rank's.
    """
    firsts = [sum(lengths[:index]) for index in range(len(lengths))]
    places: list[int] = []
    for slot in engine.slots:
        bucket, first = slot.bucket, slot.start // NORM_BLOCK
        for block in range(first, first - -slot.numel // NORM_BLOCK):
            part, place = divmod(block, lengths[bucket.index])
            places.append(part * sum(lengths) + firsts[bucket.index] + place)
    return torch.tensor(places, dtype=torch.int64)


def _norm(grads: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    grads = [grad for grad in grads if grad.numel()]  # the maximum of nothing is an error
    if not grads:
        return torch.zeros((), device=device)
    return torch.nn.utils.get_total_norm(grads, norm_type)


def _precise_norm(grads: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Return the norm in float64; see [Note: one norm for all plans]."""
    blocks = [
        block
        for grad in grads
        if grad.numel()
        for block in (grad.reshape(-1).split(_BLOCK) if grad.device.type == "cpu" else [grad])
    ]
    parts = [
        torch.linalg.vector_norm(
            block, norm_type, dtype=torch.complex128 if block.is_complex() else torch.float64
        )
        for block in blocks
    ]
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.linalg.vector_norm(torch.stack(parts), norm_type)
