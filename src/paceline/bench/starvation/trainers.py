"""One training step under torch DDP, FSDP2 and Paceline (torch)."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from paceline.bench.starvation.task import RATE, Batch
from paceline.sync.engine import DataParallel
from paceline.sync.shard import ShardedOptimizer

__all__ = ["DDP", "FSDP2", "Paceline", "Trainer", "trainer"]


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
