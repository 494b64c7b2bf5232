"""Makes the optimizer state the same on all ranks after local training.

Ranks that trained locally have equal parameters afterwards, but different moments in their optimizers. Synchronous
training needs the same update on every rank, so before its first step the states are averaged: tensors become their
mean over the ranks that have them, and step counts become the largest. That step also checks that all ranks have the
same gradients: after local training, a `GradScaler` may have another scale on each.

A single number may be either: a step count, or a per-element entry of a parameter without dimensions. It is the latter
if entries of the same name have dimensions for other parameters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from paceline.errors import SyncError
from paceline.parallel.gradient_collectives import Comm
from paceline.world.control_collectives import gather_texts

__all__ = ["average_state", "average_state_before_next_step", "cancel_state_averaging"]

_Entry = tuple[int, str]
"""Index of a parameter in the optimizer, and the name of one of its state entries."""

_scheduled: WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle] = WeakKeyDictionary()


def average_state_before_next_step(optimizer: torch.optim.Optimizer, comm: Comm) -> None:
    """Average the state of `optimizer` right before its next step, which all ranks must take."""

    def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cancel_state_averaging(optimizer)
        _check_same_gradients(optimizer, comm)
        average_state(optimizer, comm)

    cancel_state_averaging(optimizer)
    _scheduled[optimizer] = optimizer.register_step_pre_hook(before)


def cancel_state_averaging(optimizer: torch.optim.Optimizer) -> None:
    """Cancel a scheduled averaging: ranks train locally again."""
    if optimizer in _scheduled:
        _scheduled.pop(optimizer).remove()


def _check_same_gradients(optimizer: torch.optim.Optimizer, comm: Comm) -> None:
    """Raise on all ranks if the gradients, or the factor by which the optimizer unscales them, differ; a collective."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [
        param.grad.contiguous().view(integers[param.grad.element_size()]).sum(dtype=torch.int64)
        for group in optimizer.param_groups
        for param in group["params"]
        if param.grad is not None
    ]
    checksum = int(torch.stack(sums).sum()) if sums else 0
    # Set by a GradScaler if the optimizer unscales them itself.
    scale = getattr(optimizer, "grad_scale", None)
    texts = gather_texts(f"{checksum} {1.0 if scale is None else float(scale)}", comm.group)
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise SyncError(
                "in the first synchronous step after local training, gradients differ from rank 0's: a GradScaler has "
                "another scale, or they were changed",
                rank=rank,
                remedy="give all ranks the same scale first: scaler.update(new_scale=2.0**16), or a new GradScaler",
            )


@torch.no_grad()
def average_state(optimizer: torch.optim.Optimizer, comm: Comm) -> None:
    """Give all ranks the same state of `optimizer`; a collective.

    Args:
        optimizer: with the same parameters in the same order on all ranks.
        comm: the ranks.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    mine = {
        (place, key): value
        for place, param in enumerate(params)
        for key, value in optimizer.state.get(param, {}).items()
        if isinstance(value, Tensor | float | int) and not isinstance(value, bool)
    }
    forms: dict[_Entry, list[Any]] = {}
    counts: dict[_Entry, int] = {}
    for text in gather_texts(json.dumps(_describe(mine)), comm.group):
        for place, key, *form in json.loads(text):
            forms.setdefault((place, key), form)
            counts[place, key] = counts.get((place, key), 0) + 1
    averaged = {key for (_, key), (_, shape, _) in forms.items() if shape}
    for (place, key), form in sorted(forms.items()):
        value = mine.get((place, key))
        state = optimizer.state[params[place]]
        count = counts[place, key] if key in averaged else None
        state[key] = _reduced(value, form, params[place], count, comm)


def _describe(entries: Mapping[_Entry, Any]) -> list[list[Any]]:
    """Return index, key, whether it is a tensor, shape and dtype of every entry."""
    return [
        [place, key, True, list(value.shape), str(value.dtype).removeprefix("torch.")]
        if isinstance(value, Tensor)
        else [place, key, False, [], type(value).__name__]
        for (place, key), value in entries.items()
    ]


def _reduced(value: Any, form: list[Any], param: Tensor, count: int | None, comm: Comm) -> Any:
    """Return an entry reduced over all ranks.

    Args:
        value: of this rank; None: it has none.
        form: from `_describe`: whether it is a tensor, shape and dtype.
        param: the parameter.
        count: ranks that have the entry, for their mean; None: take the maximum.
        comm: the ranks.
    """
    is_tensor, shape, dtype = form
    kind = getattr(torch, dtype) if is_tensor else torch.float64
    wide = kind if kind.is_floating_point and kind.itemsize >= 4 else torch.float64
    whole = torch.zeros(shape, dtype=wide, device=param.device)
    if value is not None:
        whole.copy_(value if isinstance(value, Tensor) else torch.tensor(value))
    op = dist.ReduceOp.MAX if count is None else dist.ReduceOp.SUM
    dist.all_reduce(whole, op=op, group=comm.group)
    if count is not None:
        whole.div_(count)
    if not is_tensor:
        return int(whole) if dtype == "int" else float(whole)
    result = whole.to(kind)
    return result.to(value.device) if isinstance(value, Tensor) else result
