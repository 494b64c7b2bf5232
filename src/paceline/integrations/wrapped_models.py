"""Wraps a library's models in `DataParallel`, and makes their optimizers sharded where the strategy shards."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.checkpoint.parts.model_weights import load_weights
from paceline.errors import UsageError
from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.sharding.zero import ShardedOptimizer
from paceline.parallel.strategy import Sync
from paceline.world.control_collectives import rank_and_size

__all__ = [
    "WrappedModels",
    "check_ranks",
    "load_whole_state",
    "missing_library",
    "redirect_scheduler",
    "whole_state",
]


def missing_library(module: str, library: str, error: ImportError) -> UsageError:
    """Return the error for an integration whose library can't be imported.

    Args:
        module: the integration.
        library: what it needs.
        error: of the import; a library of another version may lack a name.
    """
    installed = not isinstance(error, ModuleNotFoundError)
    reason = f"whose installed version does not fit: {error}" if installed else "which is not installed"
    return UsageError(f"{module} needs {library}, {reason}", remedy="pip install 'paceline[integrations]'")


def check_ranks(name: str, ranks: int) -> None:
    """Raise if a library counts another number of ranks than the process group that Paceline uses.

    Args:
        name: the class, for the message.
        ranks: as the library counts them.

    Raises:
        UsageError: it does; the launcher's variables are missing, for example.
    """
    _, size = rank_and_size(None)
    if size != ranks:
        raise UsageError(
            f"{name} counts {ranks} ranks, and the process group has {size}",
            remedy="start with `paceline run` or torchrun, which set RANK, WORLD_SIZE and LOCAL_RANK",
        )


class WrappedModels:
    """The models that a library's object has wrapped, with the optimizers that update them.

    Args:
        sync: strategy of all models, as in `DataParallel`.

    Raises:
        UsageError: an unknown strategy.
    """

    def __init__(self, sync: str | Sync) -> None:
        self.sync = sync
        plan = None if sync == "auto" else Sync.of(sync)
        self.shards_optimizer = plan is None or plan.shard != "none"
        """Whether optimizers have to be `ShardedOptimizer`s."""
        self.shards_parameters = plan is not None and plan.shard == "parameters"
        """Whether parameters become DTensors."""
        self.models: list[DataParallel] = []
        self._names: list[dict[int, str]] = []  # of the parameters before wrapping, by id; per model

    def wrap(self, module: nn.Module) -> DataParallel:
        """Return `module`, wrapped."""
        names = {id(param): name for name, param in module.named_parameters()}
        model = DataParallel(module, self.sync)
        self.models.append(model)
        self._names.append(names)
        return model

    def adopt(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer to use instead of `optimizer`, with its groups, options and state.

        It is another object only if the strategy shards. Groups stay the same dicts, so what a scheduler of the given
        optimizer sets reaches the new one.

        Raises:
            UsageError: the strategy shards, and the optimizer holds parameters of no or of several wrapped models, or
                can't update shards.
        """
        if not self.shards_optimizer or isinstance(optimizer, ShardedOptimizer):
            return optimizer
        index = self._index_of(optimizer)
        state = optimizer.state_dict() if optimizer.state else None
        present = dict(self.models[index].module.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [present[self._names[index][id(param)]] for param in group["params"]]
        sharded = ShardedOptimizer(
            self.models[index], type(optimizer), optimizer.param_groups, **_options(optimizer)
        )
        if state is not None:
            sharded.load_state_dict(state)
        return sharded

    def only(self) -> DataParallel:
        """Return the only model.

        Raises:
            UsageError: there is none, or there are several.
        """
        if len(self.models) != 1:
            raise UsageError(
                f"samples= with {len(self.models)} wrapped models, of which one has to be meant",
                remedy="prepare the model first; with several, call model.backward(loss, samples=n) of the one",
            )
        return self.models[0]

    def _index_of(self, optimizer: torch.optim.Optimizer) -> int:
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for index in reversed(range(len(self.models))):  # a model that is wrapped again has a new entry
            known = self._names[index]
            known.update({id(param): name for name, param in self.models[index].module.named_parameters()})
            if held <= known.keys():
                return index
        raise UsageError(
            f"sync={self.sync!r} with a {type(optimizer).__name__} whose parameters are not those of one wrapped model",
            remedy="prepare the model before its optimizer, or both in one call, with an optimizer for each model",
        )


def _options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the arguments with which an optimizer of the same defaults is created."""
    accepted = inspect.signature(type(optimizer)).parameters
    anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted.values())
    return {key: value for key, value in optimizer.defaults.items() if anything or key in accepted}


def redirect_scheduler(scheduler: Any, optimizers: Mapping[int, torch.optim.Optimizer]) -> None:
    """Let a scheduler, and those inside it, set the rates of the optimizers that replace its own.

    Args:
        scheduler: a torch learning-rate scheduler.
        optimizers: the new optimizer by the id of the one that it replaces.
    """
    new = optimizers.get(id(scheduler.optimizer), scheduler.optimizer)
    if new is not scheduler.optimizer:
        scheduler.optimizer = new
        _track_steps(new)
    for inner in getattr(scheduler, "_schedulers", []):
        redirect_scheduler(inner, optimizers)


def _track_steps(optimizer: Any) -> None:
    """Record steps as torch's schedulers do, which otherwise warn that they step before the optimizer."""
    step = optimizer.step

    @functools.wraps(step)
    def tracked(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return step(*args, **kwargs)

    tracked._wrapped_by_lr_sched = True  # pyright: ignore[reportAttributeAccessIssue]
    optimizer.step = tracked


def whole_state(module: nn.Module) -> dict[str, Any]:
    """Return a bare module's state_dict: whole tensors, each in memory of its own; tied ones stay tied.

    Parameters whose optimizer is sharded are views of one buffer, of which libraries would save one and drop the rest
    as tied. A collective if the parameters themselves are sharded.
    """
    held = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    object_of = {name: id(tensor) for name, tensor in held}
    whole: dict[int, Tensor] = {}
    state = module.state_dict()
    for name, value in state.items():
        if isinstance(value, Tensor):
            key = object_of.get(name, id(value))
            if key not in whole:
                whole[key] = _separate(value)
            state[name] = whole[key]
    return state


def _separate(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def load_whole_state(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load a whole state_dict into a bare module, whose parameters may be sharded."""
    if not any(isinstance(param, DTensor) for param in module.parameters()):
        module.load_state_dict(state, strict=strict)
        return
    missing = module.state_dict().keys() - state.keys()
    if missing:
        raise UsageError(
            f"the state has no {min(missing)!r}", remedy="load a state_dict of the same model, all of it"
        )
    load_weights(module, lambda name: state[name])
