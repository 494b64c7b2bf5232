"""What is trained, and what one process finds: a small regression in float64 (torch).

One training step under torch DDP, FSDP2 and Paceline (torch).
"""

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
from paceline.tools.bench.starvation.scene_setup import Numbers, Setup

__all__ = ["DDP", "FSDP2", "RATE", "Batch", "Paceline", "Task", "Trainer", "Truth", "apart", "trainer"]

RATE = 0.1
"""Learning rate of the plain gradient descent of all trainers, so that a step tells the gradient it applied."""


_INPUTS, _HIDDEN = 8, 16


_DRIFT = 0.5  # how much the data change from the first sample to the last, in standard deviations


class Batch(NamedTuple):
    """Inputs ``[batch, 8]``, targets ``[batch, 1]``, and how many samples count: 0 where they only fill the place."""

    x: Tensor
    y: Tensor
    samples: int


class Task:
    """Samples, and the model that is fitted to them; the same on every rank.

    Args:
        setup: how many samples, and the seed.

    Attributes:
        dataset: the samples, pairs of inputs ``[8]`` and target ``[1]``.
    """

    def __init__(self, setup: Setup) -> None:
        dealing = setup.balance.dispatch
        chance = torch.Generator().manual_seed(dealing.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=chance, dtype=torch.float64)

        drift = torch.linspace(-_DRIFT, _DRIFT, dealing.samples, dtype=torch.float64)[:, None]
        x = normal(dealing.samples, _INPUTS) + drift
        y = torch.sin(x @ normal(_INPUTS, 1)) + 0.3 * normal(dealing.samples, 1)
        self.dataset = TensorDataset(x, y)
        self._seed = dealing.seed

    def batch(self, numbers: Numbers) -> Batch:
        """Return the samples `numbers`."""
        index = torch.from_numpy(numbers)
        x, y = self.dataset[index]
        return Batch(x, y, len(index))

    def model(self) -> torch.nn.Module:
        """Return the model as it is before the first step."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self._seed)
            layers = torch.nn.Linear(_INPUTS, _HIDDEN), torch.nn.Tanh(), torch.nn.Linear(_HIDDEN, 1)
            return torch.nn.Sequential(*layers).double()


class Truth:
    """What one process finds that trains on the global batch of every step.

    Args:
        task: what is trained.
        setup: which samples are in which step.
    """

    def __init__(self, task: Task, setup: Setup) -> None:
        self._task, self._setup = task, setup
        self._model = task.model()
        self._start = self._here = parameters_to_vector(self._model.parameters()).detach().clone()

    def gradient(self, parameters: Tensor, step: int) -> Tensor:
        """Return the mean gradient, ``[parameters]``, over the samples that all ranks take in `step`."""
        vector_to_parameters(parameters.clone(), self._model.parameters())
        batch = self._task.batch(self._setup.global_batch(step))
        loss = torch.nn.functional.mse_loss(self._model(batch.x), batch.y)
        return parameters_to_vector(torch.autograd.grad(loss, list(self._model.parameters())))

    def error(self, before: Tensor, after: Tensor, step: int) -> float:
        """Return how far the gradient is off that led from the parameters `before` to `after`, relatively."""
        true = self.gradient(before, step)
        return apart((before - after) / RATE, true, true)

    def parameter_error(self, parameters: Tensor) -> float:
        """Return how far `parameters` are off those of one process after the epoch, relative to its way."""
        here = self._start
        for step in range(self._setup.steps):
            here = here - RATE * self.gradient(here, step)
        return apart(parameters, here, here - self._start)


def apart(left: Tensor, right: Tensor, scale: Tensor) -> float:
    """Return ‖left − right‖ / ‖scale‖."""
    return float((left - right).norm() / scale.norm())


class Trainer(Protocol):
    """Trains a model, one step after the other."""

    def step(self, batch: Batch) -> None:
        """Make one step on `batch`."""
        ...

    def whole(self) -> Tensor | None:
        """Return a copy of all parameters in a row; None where that takes a collective that others don't make."""
        ...


class DDP:
    """torch's DistributedDataParallel, as its manual has it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)

    def step(self, batch: Batch) -> None:
        """Make one step."""
        self._optimizer.zero_grad()
        mse_loss(self.model(batch.x), batch.y).backward()
        self._optimizer.step()

    def whole(self) -> Tensor | None:
        """Return a copy of all parameters in a row."""
        return torch.nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()


class FSDP2:
    """torch's fully_shard, as its manual has it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self._optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step(self, batch: Batch) -> None:
        """Make one step."""
        self._optimizer.zero_grad()
        model: Any = self._model
        mse_loss(model(batch.x), batch.y).backward()
        self._optimizer.step()

    def whole(self) -> Tensor | None:
        """Return None: to gather the parameters takes a collective."""
        return None


class Paceline:
    """`paceline.DataParallel` with one of its strategies; every rank makes every step, without data too."""

    def __init__(self, model: torch.nn.Module, strategy: str) -> None:
        self._model = DataParallel(model, sync=strategy)
        self._optimizer = ShardedOptimizer(self._model, torch.optim.SGD, lr=RATE)

    def step(self, batch: Batch) -> None:
        """Make one step; with 0 samples, take part in it."""
        self._model.backward(mse_loss(self._model(batch.x), batch.y), samples=batch.samples)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def whole(self) -> Tensor | None:
        """Return a copy of all parameters in a row; all ranks take part."""
        return torch.cat([param.flatten() for param in self._model.whole_parameters()])


def trainer(name: str, model: torch.nn.Module) -> Trainer:
    """Return what trains `model` under a scene's `trainer`."""
    if name in ("DDP", "FSDP2"):
        return DDP(model) if name == "DDP" else FSDP2(model)
    return Paceline(model, name)
