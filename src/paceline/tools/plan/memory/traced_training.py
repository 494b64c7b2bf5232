"""The training loop that predictions trace and measurements run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.engine.reducer import Reducer
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.sharding.zero import ShardedOptimizer
from paceline.parallel.strategy import STRATEGIES, Sync
from paceline.tools.plan.memory.training_subject import (
    ALONE,
    BuiltSubject,
    TrainingSetting,
    TrainingSubject,
    import_named,
)

__all__ = ["STEPS", "SilentObserver", "TrainingObserver", "resolve_optimizer", "train_subject"]

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
    """A wrapped model with its optimizer and backward function."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    backward: Callable[[Tensor], None]


def train_subject(
    subject: TrainingSubject,
    setting: TrainingSetting,
    comm: Comm,
    observer: TrainingObserver,
    steps: int = STEPS,
) -> None:
    """Build the subject and train it for some steps.

    Args:
        subject: to train.
        setting: of the training.
        comm: of the ranks.
        observer: receives phases and the purpose of tensors.
        steps: optimizer steps.
    """
    observer.begin(0, "build")
    built = subject.build(setting)
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
        trained.optimizer.step()
        trained.optimizer.zero_grad()
        _claim_states(observer, built.module)
        _claim_optimizer_state(observer, trained.optimizer)
        del held
    observer.end()


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
    kind, options = resolve_optimizer(setting)
    if setting.strategy == ALONE:
        return _Trained(built.module, kind(built.module.parameters(), **options), Tensor.backward)
    plan = STRATEGIES[setting.strategy]
    if setting.bucket_mib is not None:
        plan = Sync(bucket_mib=setting.bucket_mib, overlap=plan.overlap, shard=plan.shard)
    gather_dtype = torch.bfloat16 if setting.gather == "bf16" else None
    model = DataParallel(built.module, sync=plan, group=comm, gather_dtype=gather_dtype)
    # A prediction's tensors hold no numbers that could be compared.
    model.engine.replica_check_every = 0
    return _Trained(model, ShardedOptimizer(model, kind, **options), model.backward)


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
    inner = [part.optimizer for part in getattr(optimizer, "_groups", [])]
    for each in filter(None, [optimizer, *inner]):
        for state in each.state.values():
            observer.claim(
                "optimizer state", [value for value in state.values() if isinstance(value, Tensor)]
            )
