"""The model and optimizer that local training synchronises: which engine rests meanwhile, and what must not change."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.engine.reducer import Reducer
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.local_sgd.model_fragment import ModelFragment
from paceline.world.control_collectives import gather_texts

__all__ = ["CHANGE_REMEDY", "find_change", "local_engine", "refuse_changes"]

CHANGE_REMEDY = "change model and optimizer first, then create this one for them"


def local_engine(model: nn.Module, comm: Comm) -> Reducer | None:
    """Return the engine that must not synchronise gradients in the block; None if there is none over these ranks.

    Raises:
        UsageError: it shares some ranks besides this one with `comm`, but not all; or it shards.
    """
    if not isinstance(model, DataParallel) or model.comm.size == 1:
        return None
    inner, outer = model.comm.ranks, comm.ranks
    if len(inner & outer) == 1:
        return None
    if inner != outer:
        raise UsageError(
            f"the model synchronises gradients among ranks {sorted(inner)}, this one parameters among {sorted(outer)}",
            remedy="give the group of the ranks that have the same position in each of the model's groups",
        )
    if model.engine.tuner is not None:
        raise UsageError(
            "sync='auto' searches for the fastest way to synchronise gradients, which are not synchronised here",
            remedy="use 'bucketed'",
        )
    if model.engine.splits_gradients:
        raise UsageError(
            f"sync={model.plan.name!r} leaves each rank a part of the gradient, so no rank can train locally",
            remedy="use 'bucketed'; or shard within a group of ranks, and synchronise these groups: group=",
        )
    return model.engine


def find_change(
    module: nn.Module, optimizer: torch.optim.Optimizer, fragments: Sequence[ModelFragment]
) -> str:
    """Return what in the model or the optimizer is no longer as when the fragments were created; else nothing.

    Buffers that were replaced are averaged from now on.
    """
    params = dict(module.named_parameters())
    present = {id(param) for param in params.values()}
    known = {id(param): name for fragment in fragments for name, param in fragment.params}
    for param_id, name in known.items():
        if param_id not in present:
            return f"parameter {name!r} is no longer one of the model: it was replaced or removed"
    for name, param in params.items():
        if param.requires_grad and id(param) not in known:
            return f"parameter {name!r} is not synchronised: it was added or unfrozen later"
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in present:
                shape = list(param.shape)
                return f"the optimizer holds a parameter of shape {shape} that is none of the model's"
    buffers = dict(module.named_buffers())
    for fragment in fragments:
        if change := fragment.find_change():
            return change
        for name in fragment.take_up_buffers(buffers):
            # Others are caches of the module's own.
            if name in module.state_dict():
                return f"buffer {name!r} was removed or has another shape"
    return ""


def refuse_changes(user: str, change: str, comm: Comm) -> None:
    """Raise on all ranks if one of them has a `change`, in the model or optimizer of `user`; collective.

    Raises:
        UsageError: naming the rank and the change.
    """
    for rank, found in enumerate(gather_texts(change, comm.group)):
        if found:
            raise UsageError(f"{user}: {found}", rank=rank, remedy=CHANGE_REMEDY)
