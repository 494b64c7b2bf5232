"""Predicts the memory of a training by running it on tensors without memory, among ranks that are not there."""

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

from paceline.bench.footprint.setting import Setting
from paceline.bench.footprint.subject import Subject
from paceline.bench.footprint.training import STEPS, train
from paceline.errors import UsageError
from paceline.plan.memory.states import states_of
from paceline.plan.memory.timeline import Timeline
from paceline.plan.memory.trace import Tracer
from paceline.plan.memory.workspaces import cpu_workspace
from paceline.sync.rehearsal import RehearsedWire, rehearsed_world
from paceline.sync.wire import Wire
from paceline.units import format_bytes

__all__ = ["Prediction", "Untraceable", "predict"]


class Untraceable(UsageError):
    """A model's memory depends on values, which tensors without memory don't have."""


@dataclass(frozen=True)
class Prediction:
    """What a training would take.

    Attributes:
        setting: how it is trained.
        timeline: every block of the build, the wrapping and the steps.
        parameters: number of the model's parameters.
        parameter_nbytes: bytes of the whole model's parameters.
        questions: how often the program asked for a value and was told 1.
        seconds: the prediction took.
    """

    setting: Setting
    timeline: Timeline
    parameters: int
    parameter_nbytes: int
    questions: int
    seconds: float


class _FakeTensorMode(FakeTensorMode):
    """The one mode of a prediction, also of modules that are copied (``nn.TransformerEncoder`` copies its layer)."""

    def __deepcopy__(self, memo: dict[int, object]) -> _FakeTensorMode:
        return self


class _Watching(Tracer):
    """A tracer that also learns how large the model is."""

    parameters = 0
    parameter_nbytes = 0

    def model(self, module: torch.nn.Module) -> None:
        self.modules.name(module)
        every = list(module.parameters())
        self.parameters = sum(param.numel() for param in every)
        self.parameter_nbytes = sum(param.nbytes for param in every)


def predict(subject: Subject, setting: Setting, steps: int = STEPS) -> Prediction:
    """Return what training `subject` as `setting` says takes on each rank.

    Raises:
        Untraceable: shapes depend on values (``nonzero``, boolean masks); tells the states, which don't.
        UsageError: what the subject builds is no model.
    """
    began = time.perf_counter()
    tracer = _Watching(cpu_workspace if setting.device == "cpu" else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with rehearsed_world(setting.ranks) if setting.ranks > 1 else nullcontext():
            wire = RehearsedWire(setting.backend) if setting.ranks > 1 else Wire()
            with _traceable(subject, setting, tracer), _FakeTensorMode(), tracer:
                train(subject, _shortened(setting), wire, tracer, steps)
    return Prediction(
        setting,
        tracer.timeline(),
        tracer.parameters,
        tracer.parameter_nbytes,
        tracer.questions,
        time.perf_counter() - began,
    )


def _shortened(setting: Setting) -> Setting:
    """Return the setting with two micro-batches where there are more: all after the first are alike."""
    return replace(setting, accumulate=min(setting.accumulate, 2))


@contextmanager
def _traceable(subject: Subject, setting: Setting, tracer: _Watching) -> Iterator[None]:
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


def _known(setting: Setting, tracer: _Watching) -> str:
    """Return the model states in words, by formula; "" for an optimizer without one."""
    if not tracer.parameter_nbytes or ":" in setting.optimizer:
        return ""
    states = states_of(tracer.parameter_nbytes, setting.strategy, setting.ranks, setting.optimizer)
    return f"; parameters, gradients and optimizer state alone take {format_bytes(round(states.nbytes))} a device"
