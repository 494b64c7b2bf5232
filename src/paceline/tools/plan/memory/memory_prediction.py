"""Model states in closed form: what is known of a training's memory where its steps can't be traced.

ZeRO's table (Rajbhandari et al., arXiv 1910.02054 §3 and §5; `sharded` is its P_os beside whole gradients, `full-shard`
its P_os+g+p) in the bytes that torch uses. Activations, gathered units and messages come on top.

Predicts the memory of a training by running it on tensors without memory, among ranks that are not there.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

from paceline._core.format import format_bytes
from paceline.errors import UsageError, unknown
from paceline.parallel.engine.comm import Comm
from paceline.tools.plan.memory.fake_world import FakeComm, fake_process_group
from paceline.tools.plan.memory.kernel_workspaces import cpu_workspace
from paceline.tools.plan.memory.memory_timeline import MemoryTimeline
from paceline.tools.plan.memory.tensor_tracer import TensorTracer
from paceline.tools.plan.memory.traced_training import STEPS, train_subject
from paceline.tools.plan.memory.training_subject import TrainingSetting, TrainingSubject

__all__ = ["MemoryPrediction", "States", "Untraceable", "predict_memory", "states_of"]

_NUMBERS_OF_OPTIMIZER = {"adamw": 2, "sgd-momentum": 1, "sgd": 0}


_SHARDED = {"alone": (), "naive": (), "flat": (), "overlap": (), "bucketed": (), "sharded": ("optimizer",)}


_SHARDED |= {"full-shard": ("parameters", "gradients", "optimizer")}


@dataclass(frozen=True)
class States:
    """Bytes of a device's model states."""

    parameter_nbytes: float
    gradient_nbytes: float
    optimizer_nbytes: float

    @property
    def nbytes(self) -> float:
        """All of them."""
        return self.parameter_nbytes + self.gradient_nbytes + self.optimizer_nbytes


def states_of(parameter_nbytes: int, strategy: str, ranks: int, optimizer: str = "adamw") -> States:
    """Return a device's model states.

    Args:
        parameter_nbytes: of the whole model; gradients and the optimizer's numbers are of the same type.
        strategy: its name. ranks: devices.
        optimizer: ``adamw``, ``sgd-momentum`` or ``sgd``.

    Raises:
        UsageError: an unknown strategy or optimizer.

    Example:
        >>> states_of(4_000_000, "full-shard", 8).nbytes / 1e6  # 16 bytes a parameter, an eighth of them
        2.0
    """
    if strategy not in _SHARDED:
        raise unknown("strategy", strategy, _SHARDED)
    if optimizer not in _NUMBERS_OF_OPTIMIZER:
        raise unknown("optimizer", optimizer, _NUMBERS_OF_OPTIMIZER)

    def share(kind: str) -> float:
        return parameter_nbytes / (ranks if kind in _SHARDED[strategy] else 1)

    return States(
        share("parameters"), share("gradients"), _NUMBERS_OF_OPTIMIZER[optimizer] * share("optimizer")
    )


class Untraceable(UsageError):
    """A model's memory depends on values, which tensors without memory don't have."""


@dataclass(frozen=True)
class MemoryPrediction:
    """What a training would take.

    Attributes:
        setting: how it is trained.
        timeline: every block of the build, the wrapping and the steps.
        parameters: number of the model's parameters.
        parameter_nbytes: bytes of the whole model's parameters.
        questions: how often the program asked for a value and was told 1.
        seconds: the prediction took.
    """

    setting: TrainingSetting
    timeline: MemoryTimeline
    parameters: int
    parameter_nbytes: int
    value_reads: int
    seconds: float


class _FakeTensorMode(FakeTensorMode):
    """The one mode of a prediction, also of modules that are copied (``nn.TransformerEncoder`` copies its layer)."""

    def __deepcopy__(self, memo: dict[int, object]) -> _FakeTensorMode:
        return self


class _Watching(TensorTracer):
    """A tracer that also learns how large the model is."""

    parameters = 0
    parameter_nbytes = 0

    def model(self, module: torch.nn.Module) -> None:
        self.modules.name(module)
        every = list(module.parameters())
        self.parameters = sum(param.numel() for param in every)
        self.parameter_nbytes = sum(param.nbytes for param in every)


def predict_memory(
    subject: TrainingSubject, setting: TrainingSetting, steps: int = STEPS
) -> MemoryPrediction:
    """Return what training `subject` as `setting` says takes on each rank.

    Raises:
        Untraceable: shapes depend on values (``nonzero``, boolean masks); tells the states, which don't.
        UsageError: what the subject builds is no model.
    """
    began = time.perf_counter()
    tracer = _Watching(cpu_workspace if setting.device == "cpu" else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with fake_process_group(setting.ranks) if setting.ranks > 1 else nullcontext():
            comm = FakeComm(setting.backend) if setting.ranks > 1 else Comm()
            with _traceable(subject, setting, tracer), _FakeTensorMode(), tracer:
                train_subject(subject, _shortened(setting), comm, tracer, steps)
    return MemoryPrediction(
        setting,
        tracer.timeline(),
        tracer.parameters,
        tracer.parameter_nbytes,
        tracer.value_reads,
        time.perf_counter() - began,
    )


def _shortened(setting: TrainingSetting) -> TrainingSetting:
    """Return the setting with two micro-batches where there are more: all after the first are alike."""
    return replace(setting, accumulate=min(setting.accumulate, 2))


@contextmanager
def _traceable(subject: TrainingSubject, setting: TrainingSetting, tracer: _Watching) -> Iterator[None]:
    """Say of what can't be traced what is known all the same: its states."""
    try:
        yield
    except (
        DynamicOutputShapeException,
        DataDependentOutputException,
        UnsupportedFakeTensorException,
    ) as error:
        raise Untraceable(
            f"the memory of {subject.name} depends on values: {error}{_known(setting, tracer)}",
            remedy="keep what depends on values out of the step that is planned, or plan it with a stand-in",
        ) from error


def _known(setting: TrainingSetting, tracer: _Watching) -> str:
    """Return the model states in words, by formula; "" for an optimizer without one."""
    if not tracer.parameter_nbytes or ":" in setting.optimizer:
        return ""
    states = states_of(tracer.parameter_nbytes, setting.strategy, setting.ranks, setting.optimizer)
    return f"; parameters, gradients and optimizer state alone take {format_bytes(round(states.nbytes))} a device"
