"""State of a training run that members bring to the same values: snapshots before a step, and transfers to others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.api import Checkpoint
from paceline.checkpoint.parts.loader_states import check_moves, is_loader
from paceline.checkpoint.parts.model_weights import load_weights, weights_of
from paceline.checkpoint.parts.named_objects import NamedObjects, unwrap
from paceline.checkpoint.parts.optimizer_state_pieces import load_optimizer, optimizer_state
from paceline.errors import UsageError
from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.sharding.optimizer_probe import group_options
from paceline.parallel.sharding.update_groups import copied, take_over
from paceline.parallel.sharding.zero import ShardedOptimizer
from paceline.world.value_collectives import broadcast_value, gather_values

__all__ = ["StepSnapshot", "TrainingState"]


@dataclass(frozen=True)
class _EngineMark:
    """What a round changes beside parameters: its number, the reference of loss weights, buffers."""

    step: int
    reference: Any
    agreed: bool
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True)
class StepSnapshot:
    """What a step that is given up has to go back to, besides what its update would have changed."""

    engines: Mapping[str, _EngineMark]
    groups: Mapping[str, list[dict[str, Any]]]
    others: Mapping[str, Any]


class TrainingState:
    """The objects of a training run.

    Args:
        objects: models, optimizers and others.
    """

    def __init__(self, objects: NamedObjects) -> None:
        self._objects = objects
        self._moves = False  # ranks may leave and join

    def add(self, name: str, other: Any) -> None:
        """Add an object that is neither model nor optimizer.

        Raises:
            UsageError: `check` has passed, and this object can't move.
        """
        if self._moves:
            _check_other(name, other)
        self._objects = self._objects.with_other(name, other)

    @property
    def objects(self) -> NamedObjects:
        """The objects."""
        return self._objects

    @property
    def models(self) -> dict[str, DataParallel]:
        """The wrapped models."""
        return {
            name: model for name, model in self._objects.models.items() if isinstance(model, DataParallel)
        }

    def check(self, checkpoint: Checkpoint | None = None) -> None:
        """Check that the objects can move to another world without losing anything.

        Args:
            checkpoint: of the run; its loaders have to move, too.

        Raises:
            UsageError: names what can't.
        """
        for name, model in self._objects.models.items():
            if not isinstance(model, DataParallel):
                problem, remedy = f"{name}, which is not wrapped", "wrap it: paceline.DataParallel(model)"
            elif model.engine.tuner is not None or model.plan.shard == "parameters":
                problem = f"sync={'auto' if model.engine.tuner is not None else model.plan.name!r}"
                remedy = 'use "bucketed", "sharded" or another strategy by name'
            elif model.plan.compression is not None:
                problem = f"compression={str(model.plan.compression)!r}, whose residuals belong to ranks"
                remedy = "leave the compression out"
            elif model.engine.launch_queue.hook is not None or model.comm.shard_axis is not model.comm:
                problem, remedy = "a communication hook, or a device mesh of two axes", "leave it out"
            else:
                continue
            raise UsageError(f"live recovery with {problem}", remedy=remedy)
        for name, each in self._objects.others.items():
            _check_other(name, each)
        if checkpoint is not None:
            checkpoint.check_rejoin(self._objects.others.values())
        self._moves = True

    # ------------------------------------------------------------------ a step that is given up

    def snapshot(self) -> StepSnapshot:
        """Return what is needed to give up the step that begins now."""
        engines = {
            name: _EngineMark(
                model.engine.step,
                model.engine.weights.reference,
                model.engine.weights.agreed,
                {key: each.detach().clone() for key, each in model.module.named_buffers()},
            )
            for name, model in self.models.items()
        }
        groups = {
            name: [copied(group_options(group)) for group in each.param_groups]
            for name, each in self._objects.optimizers.items()
        }
        others = {name: copy.deepcopy(each.state_dict()) for name, each in self._objects.others.items()}
        return StepSnapshot(engines, groups, others)

    @torch.no_grad()
    def give_up(self, snapshot: StepSnapshot) -> None:
        """Go back to where a step began; its update was not applied."""
        for name, model in self.models.items():
            mark, engine = snapshot.engines[name], model.engine
            engine.step = mark.step
            engine.weights.reference = mark.reference
            engine.weights.agreed = mark.agreed
            for key, each in model.module.named_buffers():
                each.copy_(mark.buffers[key])
        for name, each in self._objects.optimizers.items():
            for group, options in zip(each.param_groups, snapshot.groups[name], strict=True):
                take_over(group, options)
        for name, each in self._objects.others.items():
            each.load_state_dict(snapshot.others[name])

    # ------------------------------------------------------------------ another world

    def rejoin(self, *, whole: bool = True) -> None:
        """Continue on the ranks of the new process group.

        Args:
            whole: every rank has the whole state of sharded optimizers; else they start without any.
        """
        for model in self.models.values():
            model.rejoin()
        for optimizer in self._objects.optimizers.values():
            if isinstance(optimizer, ShardedOptimizer):
                optimizer.rejoin(self._model_of(optimizer), None if whole else {})
        for each in self._objects.others.values():
            rejoin = getattr(each, "rejoin", None)
            if rejoin is not None:
                rejoin()

    def _model_of(self, optimizer: ShardedOptimizer) -> DataParallel:
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        return next(
            model for model in self.models.values() if any(id(param) in held for param in model.parameters())
        )

    def send(self, source: int, before_loading: Callable[[], None] | None) -> None:
        """Give the state of rank `source` to the ranks that receive it; all ranks call this.

        Args:
            source: of the state.
            before_loading: on a rank that receives it, called when the state has arrived and is about to be loaded.
        """
        state = broadcast_value(self._whole(), source)
        if before_loading is not None:
            before_loading()
            self._load(state)
        for optimizer in self._objects.optimizers.values():
            if isinstance(optimizer, ShardedOptimizer) and optimizer.in_shards:
                optimizer.resume_state(optimizer.gather_state())  # all ranks build what was loaded

    def _whole(self) -> dict[str, Any]:
        objects, names = self._objects, self._objects.param_names
        parts = {name: weights_of(model) for name, model in objects.models.items()}
        return {
            "weights": {name: tensors for name, (tensors, _) in parts.items()},
            "extra": {name: extra for name, (_, extra) in parts.items()},
            "optimizers": {
                name: optimizer_state(optimizer, names) for name, optimizer in objects.optimizers.items()
            },
            "engines": {
                name: [model.engine.step, float(model.engine.weights.reference), model.engine.weights.agreed]
                for name, model in self.models.items()
            },
            "others": {name: each.state_dict() for name, each in objects.others.items()},
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        objects = self._objects
        for name, model in objects.models.items():
            load_weights(model, state["weights"][name].__getitem__)
            if state["extra"][name]:
                unwrap(model).load_state_dict(state["extra"][name], strict=False)
        for name, model in self.models.items():
            engine = model.engine
            engine.step, engine.weights.reference, engine.weights.agreed = state["engines"][name]
        for name, optimizer in objects.optimizers.items():
            saved = state["optimizers"][name]
            load_optimizer(optimizer, saved["groups"], saved["pieces"], objects.param_names)
        for name, each in objects.others.items():
            each.load_state_dict(state["others"][name])

    def agree(self) -> None:
        """Let the next round agree on loss weights anew unless all ranks have; all ranks call this."""
        for model in self.models.values():
            weights = model.engine.weights
            every = gather_values([weights.agreed, float(weights.reference)])
            if not all(agreed for agreed, _ in every):
                weights.restart()


def _check_other(name: str, other: Any) -> None:
    """Raise unless an object that is neither model nor optimizer can move to another world."""
    if is_loader(other):
        check_moves(name, other)
    check = getattr(other, "check_rejoin", None)
    if check is not None:
        check()
