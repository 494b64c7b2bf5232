"""Prediction of a training's memory: the real engine runs on tensors without memory, in a fake process group.

If the steps can't be traced, model states are still known in closed form: ZeRO's table (Rajbhandari et al., arXiv
1910.02054 §3 and §5; `sharded` is its P_os with whole gradients, `full-shard` its P_os+g+p) in the bytes that torch
uses. Activations, gathered units and messages are not included.
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
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.sharding.matrix_parameters import matrix_parameters
from paceline.tools.plan.memory.cuda_operators import cuda_operators
from paceline.tools.plan.memory.fake_world import FakeComm, fake_process_group
from paceline.tools.plan.memory.kernel_workspaces import cpu_workspace
from paceline.tools.plan.memory.memory_timeline import MemoryTimeline
from paceline.tools.plan.memory.tensor_tracer import TensorTracer
from paceline.tools.plan.memory.traced_training import MUON, STEPS, train_subject
from paceline.tools.plan.memory.training_subject import TrainingSetting, TrainingSubject

__all__ = ["MemoryPrediction", "States", "Untraceable", "predict_memory", "states_of"]

_MOMENTS_OF_OPTIMIZER = {"adamw": 2, "sgd-momentum": 1, "sgd": 0, MUON: 2}
_MOMENTS_OF_MATRIX = 1  # with Muon
_FP32_NBYTES = 4

_SHARDED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("alone", "naive", "flat", "overlap", "bucketed"), ()),
    "sharded": ("optimizer",),
    "full-shard": ("parameters", "gradients", "optimizer"),
}


@dataclass(frozen=True)
class States:
    """Bytes of the model states on a device."""

    parameter_nbytes: float
    gradient_nbytes: float
    optimizer_nbytes: float

    @property
    def nbytes(self) -> float:
        """Sum of all."""
        return self.parameter_nbytes + self.gradient_nbytes + self.optimizer_nbytes


def states_of(
    parameter_nbytes: int,
    strategy: str,
    ranks: int,
    optimizer: str = "adamw",
    *,
    matrix_nbytes: int = 0,
    master_nbytes: int = 0,
) -> States:
    """Return the model states on a device; where matrices have owners, the mean over devices.

    Args:
        parameter_nbytes: of the whole model; gradients have the same type, and without masters optimizer state too.
        strategy: its name.
        ranks: devices.
        optimizer: ``adamw``, ``sgd-momentum``, ``sgd`` or ``muon``.
        matrix_nbytes: part of `parameter_nbytes` that Muon updates.
        master_nbytes: of copies of all parameters that are updated in their place, in the type of the state; 0: none.

    Raises:
        UsageError: unknown strategy or optimizer.

    Example:
        >>> states_of(4_000_000, "full-shard", 8).nbytes / 1e6  # 16 bytes per parameter, on 8 ranks
        2.0
    """
    if strategy not in _SHARDED:
        raise unknown("strategy", strategy, _SHARDED)
    if optimizer not in _MOMENTS_OF_OPTIMIZER:
        raise unknown("optimizer", optimizer, _MOMENTS_OF_OPTIMIZER)

    def share(kind: str) -> float:
        return parameter_nbytes / (ranks if kind in _SHARDED[strategy] else 1)

    moments = float(_MOMENTS_OF_OPTIMIZER[optimizer])
    if optimizer == MUON:
        moments -= (moments - _MOMENTS_OF_MATRIX) * matrix_nbytes / parameter_nbytes
    numbers = moments * (master_nbytes or parameter_nbytes) + master_nbytes
    return States(share("parameters"), share("gradients"), numbers / parameter_nbytes * share("optimizer"))


class Untraceable(UsageError):
    """Raised if a model's memory depends on values, which tensors without memory don't have."""


@dataclass(frozen=True, kw_only=True)
class MemoryPrediction:
    """Predicted memory of a training.

    Attributes:
        setting: of the training.
        timeline: every block of building, wrapping and the steps.
        parameters: number of the model's parameters.
        parameter_nbytes: bytes of the whole model's parameters.
        value_reads: number of values that the program read; each was 1.
        seconds: duration of the prediction.
    """

    setting: TrainingSetting
    timeline: MemoryTimeline
    parameters: int
    parameter_nbytes: int
    value_reads: int
    seconds: float


class _FakeTensorMode(FakeTensorMode):
    """A mode that copied modules share (``nn.TransformerEncoder`` copies its layer)."""

    def __deepcopy__(self, memo: dict[int, object]) -> _FakeTensorMode:
        return self


class _ModelTracer(TensorTracer):
    """A tracer that also records the size of the model."""

    parameters = 0
    parameter_nbytes = 0
    matrix_nbytes = 0

    def model(self, module: torch.nn.Module) -> None:
        self.modules.name(module)
        every = list(module.parameters())
        self.parameters = sum(param.numel() for param in every)
        self.parameter_nbytes = sum(param.nbytes for param in every)
        self.matrix_nbytes = sum(param.nbytes for _, param in matrix_parameters(module)[0])


def predict_memory(
    subject: TrainingSubject, setting: TrainingSetting, steps: int = STEPS
) -> MemoryPrediction:
    """Predict the memory of training `subject` on each rank; where ranks differ, on the one that needs the most.

    Raises:
        Untraceable: shapes depend on values (``nonzero``, boolean masks); the message has the model states.
        UsageError: the subject builds no model.
    """
    began = time.perf_counter()
    tracer, owned = _trace(subject, setting, steps, rank=0)
    if owned and owned[0] < max(owned):  # the rank that owns the most takes more
        other, _ = _trace(subject, setting, steps, rank=owned.index(max(owned)))
        tracer = max(tracer, other, key=lambda each: each.timeline().steps().peak().nbytes)
    return MemoryPrediction(
        setting=setting,
        timeline=tracer.timeline(),
        parameters=tracer.parameters,
        parameter_nbytes=tracer.parameter_nbytes,
        value_reads=tracer.value_reads,
        seconds=time.perf_counter() - began,
    )


def _trace(
    subject: TrainingSubject, setting: TrainingSetting, steps: int, *, rank: int
) -> tuple[_ModelTracer, list[int]]:
    """Return the trace of a rank, and the bytes of the parameters that each rank owns; see `train_subject`."""
    tracer = _ModelTracer(cpu_workspace if setting.device == "cpu" else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with fake_process_group(setting.ranks, rank) if setting.ranks > 1 else nullcontext():
            comm = FakeComm(setting.backend) if setting.ranks > 1 else Comm()
            operators = cuda_operators() if setting.device == "cuda" else nullcontext()
            with _traceable(subject, setting, tracer), _FakeTensorMode(), tracer, operators:
                return tracer, train_subject(subject, _shortened(setting), comm, tracer, steps)


def _shortened(setting: TrainingSetting) -> TrainingSetting:
    """Return the setting with at most two micro-batches: all after the first are alike."""
    return replace(setting, accumulate=min(setting.accumulate, 2))


@contextmanager
def _traceable(subject: TrainingSubject, setting: TrainingSetting, tracer: _ModelTracer) -> Iterator[None]:
    """Add the model states to the error if the subject can't be traced."""
    try:
        yield
    except (
        DynamicOutputShapeException,
        DataDependentOutputException,
        UnsupportedFakeTensorException,
    ) as error:
        raise Untraceable(
            f"the memory of {subject.name} depends on values: {error}{_states_text(setting, tracer)}",
            remedy="remove value-dependent shapes from the step, or replace them for planning",
        ) from error


def _states_text(setting: TrainingSetting, tracer: _ModelTracer) -> str:
    """Return the model states as text; "" if the optimizer has no formula."""
    if not tracer.parameter_nbytes or ":" in setting.optimizer:
        return ""
    states = states_of(
        tracer.parameter_nbytes,
        setting.strategy,
        setting.ranks,
        setting.optimizer,
        matrix_nbytes=tracer.matrix_nbytes,
        master_nbytes=_FP32_NBYTES * tracer.parameters if setting.master_weights == "fp32" else 0,
    )
    return f"; parameters, gradients and optimizer state alone take {format_bytes(round(states.nbytes))} per device"
