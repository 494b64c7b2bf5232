"""Is an optimizer one of this model? What hooks onto both asks first."""

from __future__ import annotations

import torch

from paceline.errors import UsageError
from paceline.sync.engine import DataParallel

__all__ = ["refuse_foreign"]


def refuse_foreign(name: str, model: object, optimizer: object) -> None:
    """Raise unless `model` is wrapped and `optimizer` updates parameters of it.

    Args:
        name: of what takes them, for the message.

    Raises:
        UsageError: the model is not wrapped, the optimizer is none, or holds no parameter of the model.
    """
    if not isinstance(model, DataParallel):
        raise UsageError(
            f"{name}({type(model).__name__}, ...)", remedy="wrap the model: paceline.DataParallel(model)"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"{name}(model, {type(optimizer).__name__}, ...)", remedy="pass the optimizer of the model"
        )
    if not any(model.engine.holds(param) for group in optimizer.param_groups for param in group["params"]):
        raise UsageError(
            f"{name}: the {type(optimizer).__name__} holds no parameter of this model",
            remedy="pass the optimizer that was made from the wrapped model's parameters",
        )
