"""Guard that keeps ``optimizer.step()`` from using gradients that were not synchronised.

torch's DistributedDataParallel lets three mistakes through: a layer skipped on all ranks, a flag toggled between
forward and backward, and ``no_sync`` around only the backward. Here a hook before every ``step()`` of every torch
optimizer checks the engines whose parameters it holds. Gradients of one rank alone are synchronised at that point (all
ranks step, so all take part); what can't be synchronised raises, by name.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline._core.format import plural
from paceline._core.step_state import step_state
from paceline.errors import UnsyncedGradients, UsageError
from paceline.parallel.engine import grad_scaler
from paceline.parallel.engine.engine_protocols import PlanController
from paceline.parallel.engine.grad_scaler import ScaledEngine
from paceline.testing import fault_injection

__all__ = ["ConsumesShards", "GuardedEngine", "ensure_synchronised", "forget_engine", "register_engine"]


class GuardedEngine(ScaledEngine, Protocol):
    """An engine as the guard uses it."""

    module: torch.nn.Module | None
    local_only: bool
    module: torch.nn.Module | None
    follows_torch: bool
    sharded: bool
    tuner: PlanController | None
    step: int

    @property
    def unsynced(self) -> bool:
        """Whether there are gradients of this rank that no round has reduced."""
        ...

    def named_parameters(self) -> Sequence[tuple[str, torch.Tensor]]:
        """Return all parameters of the model with their names, as optimizers hold them."""
        ...

    def trains(self) -> Sequence[tuple[str, torch.nn.Parameter]]:
        """Return the trainable parameters that the model has at present, with their names."""
        ...

    def retire(self) -> None:
        """Leave the parameters to another engine."""
        ...

    def refuse_replaced(self, params: Sequence[torch.Tensor]) -> None:
        """Raise if one of `params` was the model's before wrapping replaced it."""
        ...

    def recover(self) -> bool:
        """Complete a backward that an exception interrupted; return whether there was one."""
        ...

    def synchronise(self) -> None:
        """Synchronise the gradients of this rank; all ranks take part."""
        ...

    def apply_pending_plan(self, *, if_empty: bool = False) -> None:
        """Switch to the plan that the tuner has decided on, `if_empty` only if there are no gradients."""
        ...


class ConsumesShards:
    """Marks optimizers that update shards, and so may step a sharded model."""


log = logging.getLogger("paceline.parallel")

_engines: weakref.WeakSet[GuardedEngine] = weakref.WeakSet()
_held_by_optimizer: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Held] = weakref.WeakKeyDictionary()
_installed = False


def register_engine(engine: GuardedEngine) -> None:
    """Check `engine` before every optimizer step from now on, as long as it lives.

    Another engine of the same parameters retires: their model was wrapped again.

    Raises:
        UsageError: another engine has some of the parameters, and others.
    """
    global _installed
    for other in [each for each in _engines if each.comm.size > 1]:
        shared = [name for name, param in engine.trains() if other.holds(param)]
        own = [name for name, param in other.trains() if not engine.holds(param)]
        if shared and own:
            raise UsageError(
                f"parameter {shared[0]!r} belongs to another DataParallel, too, which has others such as {own[0]!r}",
                rank=engine.comm.rank,
                remedy="wrap one module that contains both models",
            )
        if shared:
            other.retire()
            _engines.discard(other)
    _engines.add(engine)
    _held_by_optimizer.clear()
    if not _installed:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        grad_scaler.install(_synchronised_engines)
        _installed = True


def forget_engine(engine: GuardedEngine) -> None:
    """Check `engine` no more."""
    _engines.discard(engine)
    _held_by_optimizer.clear()


def ensure_synchronised(engine: GuardedEngine) -> None:
    """Synchronise this rank's gradients if they are not, or raise.

    Raises:
        UnsyncedGradients: backward was interrupted by an exception.
        UsageError: a hook calls this inside backward.
    """
    step = engine.step  # of the interrupted backward, whose round `recover` closes
    if engine.recover():
        raise UnsyncedGradients(
            "the last backward ended in an exception, so there is no global gradient",
            rank=engine.comm.rank,
            step=step,
            remedy="run forward and backward again before optimizer.step()",
        )
    if not engine.unsynced:
        return
    if engine.comm.size > 1 and torch._C._current_graph_task_id() != -1:
        raise UsageError(
            "optimizer.step() inside backward, before the gradients of all ranks are there",
            rank=engine.comm.rank,
            step=engine.step,
            remedy="call optimizer.step() after backward",
        )
    engine.synchronise()


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for engine in _synchronised_engines(optimizer):
        if engine.tuner is not None:
            engine.tuner.optimizer_stepping(optimizer)
        step_state.enter_phase("optimizer")


def _synchronised_engines(optimizer: torch.optim.Optimizer) -> list[GuardedEngine]:
    """Return the engines whose parameters `optimizer` holds, once their gradients are synchronised."""
    held = _held_by(optimizer)
    engines = [engine for reference in held.engines if (engine := reference()) is not None]
    if held.foreign and any(engine.comm.size > 1 and not engine.local_only for engine in engines):
        _refuse_foreign(optimizer, held.foreign, engines[0])
    for engine in engines:
        if engine.sharded and not isinstance(optimizer, ConsumesShards):
            name = type(optimizer).__name__
            raise UsageError(
                f"{name} holds parameters of a model with sync='sharded', where no rank has whole gradients",
                rank=engine.comm.rank,
                step=engine.step,
                remedy=f"use paceline.ShardedOptimizer(model, torch.optim.{name}, ...)",
            )
        ensure_synchronised(engine)
    return engines


def _after_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for reference in _held_by(optimizer).engines:
        step_state.enter_phase("outside")
        engine = reference()
        if engine is None:
            continue
        # ShardedOptimizer has dropped the gradients; others leave them to zero_grad().
        engine.apply_pending_plan(if_empty=True)
        if fault_injection.armed:
            fault_injection.end_step(step_state.step, engine.named_parameters())


def _refuse_foreign(
    optimizer: torch.optim.Optimizer, foreign: list[torch.Tensor], engine: GuardedEngine
) -> None:
    """Raise for gradients that no wrapped model has synchronised; under torch's rules, warn once."""
    local = [
        param for param in foreign if param.grad is not None and not getattr(param, "unsynchronised", False)
    ]
    if not local:
        return
    shapes = ", ".join(str(list(param.shape)) for param in local[:3]) + (", …" if len(local) > 3 else "")
    error = UnsyncedGradients(
        f"{type(optimizer).__name__} holds {plural(len(local), 'parameter')} of no wrapped model (shapes {shapes}) "
        "with gradients of this rank only",
        rank=engine.comm.rank,
        step=engine.step,
        remedy="register them in the wrapped module or wrap their module; or set parameter.unsynchronised = True "
        "where ranks are meant to differ, or something else synchronises them",
    )
    if not engine.follows_torch:
        raise error
    log.warning("%s", error)
    foreign.clear()


@dataclass(frozen=True)
class _Held:
    """What an optimizer holds.

    Attributes:
        count: number of its parameters.
        engines: those of its parameters.
        foreign: parameters of no wrapped model.
    """

    count: int
    engines: list[weakref.ref[GuardedEngine]]
    foreign: list[torch.Tensor]


def _held_by(optimizer: torch.optim.Optimizer) -> _Held:
    """Return what `optimizer` holds; looked up again if its number of parameters changes."""
    known = _held_by_optimizer.get(optimizer)
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if known is not None and known.count == count:
        return known
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for engine in _engines:
        engine.refuse_replaced(params)
    engines = [engine for engine in _engines if any(map(engine.holds, params))]
    ours = {
        id(param) for engine in _engines if engine.module is not None for param in engine.module.parameters()
    }
    foreign = [
        param
        for param in params
        if engines
        and id(param) not in ours
        and not isinstance(param, DTensor)
        and not any(engine.holds(param) for engine in _engines)
    ]
    held = _held_by_optimizer[optimizer] = _Held(count, [weakref.ref(engine) for engine in engines], foreign)
    return held
