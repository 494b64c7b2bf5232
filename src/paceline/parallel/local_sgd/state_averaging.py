"""One state of the optimizer for all ranks, after each had its own.

Ranks that trained apart have equal parameters afterwards, but the moments that their optimizers keep differ. Training
in step needs the same update on every rank, so before its first step the states are levelled: tensors become their
mean over the ranks that have them, and what counts steps becomes the largest.

A number alone may be either: a count of steps, or what an optimizer keeps of a parameter without dimensions. It is the
latter if other parameters' entries of the same name have dimensions.
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

from paceline.parallel.engine.comm import Comm
from paceline.world.object_collectives import gather_texts

__all__ = ["average_state", "average_state_before_next_step", "cancel_state_averaging"]

_Entry = tuple[int, str]
"""A parameter's place in the optimizer, and the name of one of its states."""

_due: WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle] = WeakKeyDictionary()


def average_state_before_next_step(optimizer: torch.optim.Optimizer, comm: Comm) -> None:
    """Have the state of `optimizer` levelled when its next step is about to be made, which all ranks make."""

    def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cancel_state_averaging(optimizer)
        average_state(optimizer, comm)

    cancel_state_averaging(optimizer)
    _due[optimizer] = optimizer.register_step_pre_hook(before)


def cancel_state_averaging(optimizer: torch.optim.Optimizer) -> None:
    """Have it not levelled after all: ranks train apart again."""
    if optimizer in _due:
        _due.pop(optimizer).remove()


@torch.no_grad()
def average_state(optimizer: torch.optim.Optimizer, comm: Comm) -> None:
    """Give all ranks the same state of `optimizer`; all ranks call this.

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
    everybodys = [json.loads(text) for text in gather_texts(json.dumps(_described(mine)), comm.group)]
    forms: dict[_Entry, list[Any]] = {}
    counts: dict[_Entry, int] = {}
    for told in everybodys:
        for place, key, *form in told:
            forms.setdefault((place, key), form)
            counts[place, key] = counts.get((place, key), 0) + 1
    averaged = {key for (_, key), (_, shape, _) in forms.items() if shape}
    for (place, key), form in sorted(forms.items()):
        value = mine.get((place, key))
        state = optimizer.state[params[place]]
        count = counts[place, key] if key in averaged else None
        state[key] = _levelled(value, form, params[place], count, comm)


def _described(entries: Mapping[_Entry, Any]) -> list[list[Any]]:
    """Return place, key, whether it is a tensor, its shape and dtype, of every entry."""
    return [[place, key, isinstance(value, Tensor), *_form(value)] for (place, key), value in entries.items()]


def _form(value: Any) -> list[Any]:
    if not isinstance(value, Tensor):
        return [[], type(value).__name__]
    return [list(value.shape), str(value.dtype).removeprefix("torch.")]


def _levelled(value: Any, form: list[Any], param: Tensor, count: int | None, comm: Comm) -> Any:
    """Return an entry as all ranks shall have it.

    Args:
        value: this rank's, None where it has none. form: what `_described` tells of it. param: whose it is.
        count: of ranks that have one, whose mean it shall be; None: it shall be the largest.
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
