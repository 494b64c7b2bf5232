"""What a checkpoint is of: models, optimizers, and whatever else has a state, each under a name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from paceline.data.loader import Loader
from paceline.errors import UsageError
from paceline.parallel.data_parallel import DataParallel

__all__ = ["NamedObjects", "bare"]


def bare(model: nn.Module) -> nn.Module:
    """Return the module itself: not Paceline's wrapper around it, nor torch's."""
    wrapped = isinstance(model, DataParallel | nn.parallel.DistributedDataParallel)
    return model.module if wrapped else model


@dataclass(frozen=True)
class NamedObjects:
    """Models, optimizers and others, by name."""

    models: Mapping[str, nn.Module]
    optimizers: Mapping[str, torch.optim.Optimizer]
    others: Mapping[str, Any]

    @classmethod
    def of(cls, unnamed: Sequence[Any], named: Mapping[str, Any]) -> NamedObjects:
        """Return `unnamed` under the names of their kinds, and `named` under their own.

        Raises:
            UsageError: something has no state, or two have one name.
        """
        objects = dict(named)
        for each in unnamed:
            name = _kind(each)
            if name in objects:
                raise UsageError(
                    f"two objects of the checkpoint are called {name!r}",
                    remedy=f"name them: paceline.Checkpoint(folder, {name}=…, other_{name}=…)",
                )
            objects[name] = each
        for name, each in objects.items():
            if not (callable(getattr(each, "state_dict", None)) and hasattr(each, "load_state_dict")):
                raise UsageError(
                    f"{name}, a {type(each).__qualname__}, has no state_dict() and load_state_dict()",
                    remedy="pass models, optimizers, loaders, schedulers, or objects with these two methods",
                )
        models = {name: each for name, each in objects.items() if isinstance(each, nn.Module)}
        optimizers = {name: each for name, each in objects.items() if isinstance(each, torch.optim.Optimizer)}
        rest = {name: each for name, each in objects.items() if name not in models and name not in optimizers}
        return cls(models, optimizers, rest)

    def with_other(self, name: str, other: Any) -> NamedObjects:
        """Return the same with one more."""
        return NamedObjects(self.models, self.optimizers, {**self.others, name: other})

    @cached_property
    def name_of_param(self) -> Mapping[int, str]:
        """The name of every parameter by its id, told apart by model where there are several."""
        several = len(self.models) > 1
        return {
            id(param): f"{model}/{name}" if several else name
            for model, module in self.models.items()
            for name, param in _parameters(module)
        }


def _kind(each: Any) -> str:
    """Return what people call an object of this kind."""
    if isinstance(each, nn.Module):
        return "model"
    if isinstance(each, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(each, torch.optim.lr_scheduler.LRScheduler):
        return "scheduler"
    if isinstance(each, Loader):
        return "loader"
    return type(each).__name__.lower()


def _parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return (name, parameter) of a model, as optimizers hold them.

    While FSDP2 has a module gathered, the module shows other tensors; the engine knows the ones that stay.
    """
    if not isinstance(model, DataParallel):
        return list(bare(model).named_parameters())
    return model.engine.named_parameters()
