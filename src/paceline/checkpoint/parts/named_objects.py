"""Names of the models, optimizers and other objects in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from paceline.checkpoint.parts.loader_states import check_savable, is_loader
from paceline.errors import UsageError
from paceline.parallel.data_parallel import DataParallel

__all__ = ["NamedObjects", "unwrap"]


def unwrap(model: nn.Module) -> nn.Module:
    """Return the bare module inside a `DataParallel` or torch's DistributedDataParallel."""
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
        """Return `unnamed` objects under the names of their kinds, and `named` ones.

        Raises:
            UsageError: an object has no state, or one that only its loader can collect, two have the same name, or a
                name can't be that of a file.
        """
        objects = dict(named)
        for each in unnamed:
            name = _default_name(each)
            if name in objects:
                raise UsageError(
                    f"two objects of the checkpoint are called {name!r}",
                    remedy=f"name them: paceline.Checkpoint(folder, {name}=…, other_{name}=…)",
                )
            objects[name] = each
        for name, each in objects.items():
            if name == "rank" or set(name) & set("./\0"):  # "rank" begins the names of ranks' own states
                raise UsageError(
                    f"an object of the checkpoint is called {name!r}",
                    remedy="name it differently: not 'rank', and without '.' and '/'",
                )
            if not (callable(getattr(each, "state_dict", None)) and hasattr(each, "load_state_dict")):
                raise UsageError(
                    f"{name}, a {type(each).__qualname__}, has no state_dict() and load_state_dict()",
                    remedy="pass models, optimizers, loaders, schedulers, or objects with these two methods",
                )
            check_savable(name, each)
        models = {name: each for name, each in objects.items() if isinstance(each, nn.Module)}
        optimizers = {name: each for name, each in objects.items() if isinstance(each, torch.optim.Optimizer)}
        rest = {name: each for name, each in objects.items() if name not in models and name not in optimizers}
        return cls(models, optimizers, rest)

    def with_other(self, name: str, other: Any) -> NamedObjects:
        """Return these objects and another one."""
        return NamedObjects(self.models, self.optimizers, {**self.others, name: other})

    @cached_property
    def param_names(self) -> Mapping[int, str]:
        """Names of all parameters by id, prefixed by their model if there are several."""
        several = len(self.models) > 1
        return {
            id(param): f"{model}/{name}" if several else name
            for model, module in self.models.items()
            for name, param in _named_parameters(module)
        }


def _default_name(each: Any) -> str:
    if isinstance(each, nn.Module):
        return "model"
    if isinstance(each, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(each, torch.optim.lr_scheduler.LRScheduler):
        return "scheduler"
    if is_loader(each):
        return "loader"
    return type(each).__name__.lower()


def _named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return (name, parameter) of a model, as optimizers hold them.

    While FSDP2 has a module's parameters gathered, the module holds other tensors; the engine knows the sharded ones.
    """
    if not isinstance(model, DataParallel):
        return list(unwrap(model).named_parameters())
    return model.engine.named_parameters()
