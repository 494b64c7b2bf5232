"""Is an optimizer one of this model? What hooks onto both asks first."""

from __future__ import annotations

import torch

from paceline.errors import UsageError
from paceline.parallel.data_parallel import DataParallel

__all__ = ["check_optimizer_owned"]


def check_optimizer_owned(name: str, model: object, optimizer: object, *, wrapped: bool = True) -> None:
    """Raise unless `model` is wrapped and `optimizer` updates parameters of it.

    Args:
        name: of what takes them, for the message.
        wrapped: False: a bare module will do.

    Raises:
        UsageError: the model is not wrapped, the optimizer is none, or holds no parameter of the model.
    """
    bare = isinstance(model, torch.nn.Module) and not isinstance(
        model, torch.nn.parallel.DistributedDataParallel
    )
    if not isinstance(model, DataParallel) and (wrapped or not bare):
        raise UsageError(
            f"{name}({type(model).__name__}, ...)", remedy="wrap the model: paceline.DataParallel(model)"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"{name}(model, {type(optimizer).__name__}, ...)", remedy="pass the optimizer of the model"
        )
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    assert isinstance(model, torch.nn.Module), "checked above"
    named = model.engine.named_parameters() if isinstance(model, DataParallel) else model.named_parameters()
    if not any(id(param) in held for _, param in named):
        raise UsageError(
            f"{name}: the {type(optimizer).__name__} holds no parameter of this model",
            remedy="pass the optimizer that was made from this model's parameters",
        )
