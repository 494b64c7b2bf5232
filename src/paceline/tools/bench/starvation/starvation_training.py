"""Training of the starvation benchmark: a small regression in float64, under torch DDP, FSDP2 and Paceline."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import TensorDataset

from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.sharding.zero import ShardedOptimizer
from paceline.tools.bench.starvation.starvation_settings import Numbers, StarvationSettings

__all__ = [
    "RATE",
    "DdpTrainer",
    "Fsdp2Trainer",
    "PacelineTrainer",
    "RegressionTask",
    "SampleBatch",
    "SingleProcessReference",
    "StarvationTrainer",
    "make_trainer",
    "relative_error",
]

RATE = 0.1
"""Learning rate of all trainers' plain gradient descent, so that a step shows the gradient it applied."""

_INPUTS, _HIDDEN = 8, 16
_DRIFT = 0.5  # change of the data from the first sample to the last, in standard deviations


class SampleBatch(NamedTuple):
    """Inputs ``[batch, 8]``, targets ``[batch, 1]``, and the number of samples that count: 0 for a filler batch."""

    x: Tensor
    y: Tensor
    samples: int


class RegressionTask:
    """Samples, and the model that is fitted to them; the same on every rank.

    Args:
        settings: number of samples, and the seed.

    Attributes:
        dataset: the samples, pairs of inputs ``[8]`` and target ``[1]``.
    """

    def __init__(self, settings: StarvationSettings) -> None:
        dealing = settings.balance.dispatch
        generator = torch.Generator().manual_seed(dealing.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        drift = torch.linspace(-_DRIFT, _DRIFT, dealing.samples, dtype=torch.float64)[:, None]
        x = normal(dealing.samples, _INPUTS) + drift
        y = torch.sin(x @ normal(_INPUTS, 1)) + 0.3 * normal(dealing.samples, 1)
        self.dataset = TensorDataset(x, y)
        self._seed = dealing.seed

    def batch(self, numbers: Numbers) -> SampleBatch:
        """Return the samples `numbers`."""
        index = torch.from_numpy(numbers)
        x, y = self.dataset[index]
        return SampleBatch(x, y, len(index))

    def model(self) -> torch.nn.Module:
        """Return the initial model."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self._seed)
            layers = torch.nn.Linear(_INPUTS, _HIDDEN), torch.nn.Tanh(), torch.nn.Linear(_HIDDEN, 1)
            return torch.nn.Sequential(*layers).double()


class SingleProcessReference:
    """Gradients and parameters of one process that trains on the global batch of every step.

    Args:
        task: the training.
        settings: the samples of each step.
    """

    def __init__(self, task: RegressionTask, settings: StarvationSettings) -> None:
        self._task, self._settings = task, settings
        self._model = task.model()
        self._start = parameters_to_vector(self._model.parameters()).detach().clone()

    def gradient(self, parameters: Tensor, step: int) -> Tensor:
        """Return the mean gradient, ``[parameters]``, over the samples of all ranks in `step`."""
        vector_to_parameters(parameters.clone(), self._model.parameters())
        batch = self._task.batch(self._settings.global_batch(step))
        loss = mse_loss(self._model(batch.x), batch.y)
        return parameters_to_vector(torch.autograd.grad(loss, list(self._model.parameters())))

    def error(self, before: Tensor, after: Tensor, step: int) -> float:
        """Return the relative error of the gradient applied between the parameters `before` and `after`."""
        true = self.gradient(before, step)
        return relative_error((before - after) / RATE, true, true)

    def parameter_error(self, parameters: Tensor) -> float:
        """Return the distance of `parameters` from the reference after the epoch, relative to its movement."""
        reference = self._start
        for step in range(self._settings.steps):
            reference = reference - RATE * self.gradient(reference, step)
        return relative_error(parameters, reference, reference - self._start)


def relative_error(left: Tensor, right: Tensor, scale: Tensor) -> float:
    """Return ‖left − right‖ / ‖scale‖."""
    return float((left - right).norm() / scale.norm())


class StarvationTrainer(Protocol):
    """Trains a model step by step."""

    def step(self, batch: SampleBatch) -> None:
        """Train one step on `batch`."""
        ...

    def full_parameters(self) -> Tensor | None:
        """Return a copy of all parameters as a vector; None if that takes a collective that others don't call."""
        ...


class _TorchTrainer:
    """Trains a model that torch has wrapped."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step(self, batch: SampleBatch) -> None:
        """Train one step on `batch`."""
        self._optimizer.zero_grad()
        mse_loss(self.model(batch.x), batch.y).backward()
        self._optimizer.step()


class DdpTrainer(_TorchTrainer):
    """torch's DistributedDataParallel, as in its documentation."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(DistributedDataParallel(model, gradient_as_bucket_view=True))

    def full_parameters(self) -> Tensor | None:
        """Return a copy of all parameters as a vector."""
        return parameters_to_vector(self.model.parameters()).detach().clone()


class Fsdp2Trainer(_TorchTrainer):
    """torch's fully_shard, as in its documentation."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),))))

    def full_parameters(self) -> Tensor | None:
        """Return None: gathering the parameters takes a collective."""
        return None


class PacelineTrainer:
    """`paceline.DataParallel` with one of its strategies; every rank takes part in every step, without data too."""

    def __init__(self, model: torch.nn.Module, strategy: str) -> None:
        self._model = DataParallel(model, sync=strategy)
        self._optimizer = ShardedOptimizer(self._model, torch.optim.SGD, lr=RATE)

    def step(self, batch: SampleBatch) -> None:
        """Train one step on `batch`, which may have 0 samples."""
        self._model.backward(mse_loss(self._model(batch.x), batch.y), samples=batch.samples)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def full_parameters(self) -> Tensor | None:
        """Return a copy of all parameters as a vector; a collective."""
        return torch.cat([param.flatten() for param in self._model.whole_parameters()])


def make_trainer(name: str, model: torch.nn.Module) -> StarvationTrainer:
    """Return the trainer of a case (`StarvationCase.trainer`) for `model`."""
    if name in ("DDP", "FSDP2"):
        return DdpTrainer(model) if name == "DDP" else Fsdp2Trainer(model)
    return PacelineTrainer(model, name)
