"""The training loop that predictions trace and measurements run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from paceline.errors import UsageError
from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.engine.reducer import Reducer
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.sharding.matrix_parameters import matrix_parameters
from paceline.parallel.sharding.zero import ShardedOptimizer
from paceline.parallel.strategy import STRATEGIES, Sync
from paceline.tools.plan.memory.training_subject import (
    ALONE,
    BuiltSubject,
    TrainingSetting,
    TrainingSubject,
    import_named,
)

__all__ = ["MUON", "STEPS", "SilentObserver", "TrainingObserver", "resolve_optimizer", "train_subject"]

MUON = "muon"
"""Name of Muon on hidden matrices with AdamW on the rest, as `matrix_parameters` divides them."""

STEPS = 2
"""The first step builds the buckets and the optimizer state; all later ones are alike."""


class TrainingObserver(Protocol):
    """Receives the phases of a training, and the purpose of its tensors."""

    def begin(self, step: int, phase: str) -> None: ...

    def claim(self, category: str, tensors: Iterable[Tensor | None]) -> None: ...

    def label_allocations(self, category: str) -> AbstractContextManager[None]: ...

    def model(self, module: torch.nn.Module) -> None: ...

    def end(self) -> None: ...


class SilentObserver:
    """Observes nothing."""

    def begin(self, step: int, phase: str) -> None:
        """Do nothing."""

    def claim(self, category: str, tensors: Iterable[Tensor | None]) -> None:
        """Do nothing."""

    def label_allocations(self, category: str) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def model(self, module: torch.nn.Module) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class _Trained:
    """A wrapped model with its optimizers and backward function."""

    model: torch.nn.Module
    optimizers: list[torch.optim.Optimizer]
    backward: Callable[[Tensor], None]


def train_subject(
    subject: TrainingSubject,
    setting: TrainingSetting,
    comm: Comm,
    observer: TrainingObserver,
    steps: int = STEPS,
) -> list[int]:
    """Build the subject and train it for some steps.

    Args:
        subject: to train.
        setting: of the training.
        comm: of the ranks.
        observer: receives phases and the purpose of tensors.
        steps: optimizer steps.

    Returns:
        The bytes of the parameters that each rank owns; empty where the optimizers need no whole parameters.
    """
    observer.begin(0, "build")
    built = _in_dtype(subject.build(setting), setting)
    observer.model(built.module)
    _claim_states(observer, built.module)
    observer.begin(0, "wrap")
    trained = _wrapped(built, setting, comm)
    for step in range(steps):
        for _ in range(setting.accumulate - 1):
            with trained.model.accumulate() if isinstance(trained.model, DataParallel) else nullcontext():
                _micro_step(built, trained, setting, observer, step)
        held = _micro_step(built, trained, setting, observer, step)
        _claim_gradients(observer, trained.model)
        observer.begin(step, "optimizer")
        for optimizer in trained.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        _claim_states(observer, built.module)
        for optimizer in trained.optimizers:
            _claim_optimizer_state(observer, optimizer)
        del held
    observer.end()
    return _owned_nbytes(trained, comm.size)


def _in_dtype(built: BuiltSubject, setting: TrainingSetting) -> BuiltSubject:
    """Return the subject with its parameters and floating-point inputs in the setting's type."""
    if setting.dtype == "fp32":
        return built

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor

    draw = built.draw
    return replace(
        built,
        module=built.module.to(torch.bfloat16),
        draw=lambda: pytree.tree_map_only(Tensor, cast, draw()),
    )


def _micro_step(
    built: BuiltSubject, trained: _Trained, setting: TrainingSetting, observer: TrainingObserver, step: int
) -> Any:
    """Run forward and backward of one micro-batch; return it, since a training loop holds it until the next one."""
    observer.begin(step, "forward")
    with observer.label_allocations("inputs"):
        batch = built.draw()
    with _autocast(setting):
        loss = built.loss(trained.model, batch)
    observer.begin(step, "backward")
    trained.backward(loss)
    return batch


def _autocast(setting: TrainingSetting) -> AbstractContextManager[object]:
    if setting.autocast == "off":
        return nullcontext()
    dtype = torch.bfloat16 if setting.autocast == "bf16" else torch.float16
    # Predictions run on the CPU, for any device.
    return torch.autocast(torch.get_default_device().type, dtype)


def _wrapped(built: BuiltSubject, setting: TrainingSetting, comm: Comm) -> _Trained:
    plain = setting.strategy == ALONE and setting.master_weights == "off" and setting.optimizer != MUON
    if plain:
        kind, options = resolve_optimizer(setting)
        return _Trained(built.module, [kind(built.module.parameters(), **options)], Tensor.backward)
    plan = STRATEGIES["bucketed" if setting.strategy == ALONE else setting.strategy]
    if setting.bucket_mib is not None:
        plan = Sync(bucket_mib=setting.bucket_mib, overlap=plan.overlap, shard=plan.shard)
    gather_dtype = torch.bfloat16 if setting.gather == "bf16" else None
    model = DataParallel(built.module, sync=plan, group=comm, gather_dtype=gather_dtype)
    # A prediction's tensors hold no numbers that could be compared.
    model.engine.replica_check_every = 0
    return _Trained(model, _optimizers(model, setting), model.backward)


def _optimizers(model: DataParallel, setting: TrainingSetting) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a wrapped model: one, or Muon and AdamW."""
    masters = {} if setting.master_weights == "off" else {"master_dtype": torch.float32}
    kind, options = resolve_optimizer(setting)
    if setting.optimizer != MUON:
        return [ShardedOptimizer(model, kind, **masters, **options)]
    matrices, rest = matrix_parameters(model)
    experts = {name: param.shape[0] for name, param in matrices if param.dim() > 2}
    optimizers = []
    if matrices:
        optimizers.append(ShardedOptimizer(model, kind, matrices, split=experts, **masters, **options))
    if rest:
        kind, options = resolve_optimizer(replace(setting, optimizer="adamw"))
        optimizers.append(ShardedOptimizer(model, kind, rest, **masters, **options))
    return list(optimizers)


def resolve_optimizer(setting: TrainingSetting) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the optimizer's class and its options.

    On CUDA torch's optimizers by default update all parameters at once (``foreach``), which needs temporaries the size
    of the parameters (torch/optim/optimizer.py, `_default_to_fused_or_foreach`).

    Raises:
        UsageError: it is not an optimizer.
    """
    at_once = {"foreach": setting.device == "cuda"}
    known: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
        "adamw": (torch.optim.AdamW, {"lr": 1e-3, **at_once}),
        "sgd": (torch.optim.SGD, {"lr": 1e-3, **at_once}),
        "sgd-momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, **at_once}),
        MUON: (torch.optim.Muon, {"lr": 1e-3}),
    }
    if setting.optimizer in known:
        return known[setting.optimizer]
    named = import_named(setting.optimizer) if ":" in setting.optimizer else None
    if not (isinstance(named, type) and issubclass(named, torch.optim.Optimizer)):
        raise UsageError(
            f"{setting.optimizer!r} is not an optimizer",
            remedy=f"valid: {', '.join(known)}, or package.module:Class",
        )
    return named, {"lr": 1e-3}


def _claim_states(observer: TrainingObserver, module: torch.nn.Module) -> None:
    observer.claim("parameters", module.parameters())
    observer.claim("buffers", module.buffers())


def _claim_gradients(observer: TrainingObserver, model: torch.nn.Module) -> None:
    engine = model.engine if isinstance(model, DataParallel) else None
    if isinstance(engine, Reducer):
        observer.claim("buckets", [bucket.flat for bucket in engine.buckets])
        observer.claim("parameters", [bucket.params for bucket in engine.buckets])
    observer.claim("gradients", [param.grad for param in model.parameters()])


def _claim_optimizer_state(observer: TrainingObserver, optimizer: torch.optim.Optimizer) -> None:
    groups = getattr(optimizer, "_groups", [])
    for each in filter(None, [optimizer, *(group.optimizer for group in groups)]):
        for state in each.state.values():
            observer.claim(
                "optimizer state", [value for value in state.values() if isinstance(value, Tensor)]
            )
    masters = [unit.inner for group in groups for unit in group.units if unit.copied]
    observer.claim("optimizer state", masters)


def _owned_nbytes(trained: _Trained, ranks: int) -> list[int]:
    """Return the bytes of the parameters that each rank owns, whole; empty if there are none."""
    owned = [
        exchange.owned_nbytes() for each in trained.optimizers for exchange in getattr(each, "_exchanges", [])
    ]
    engine = trained.model.engine if isinstance(trained.model, DataParallel) else None
    for bucket in engine.buckets if isinstance(engine, Reducer) and engine.sharded else []:
        if bucket.whole:
            parts = (bucket.pieces(rank, ranks) for rank in range(ranks))
            owned.append([sum(piece.data.nbytes for piece in part) for part in parts])
    return [sum(of_rank) for of_rank in zip(*owned, strict=True)]
