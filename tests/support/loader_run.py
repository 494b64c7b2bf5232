"""A program that trains on the batches of any loader, with checkpoints; dropout makes it draw random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import paceline
from paceline.errors import UsageError

__all__ = ["LoaderRun"]


class LoaderRun:
    """The program; `named` are further objects of its checkpoints."""

    def __init__(
        self, folder: Path, loader: Any, *objects: Any, every: int | None = None, **named: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = paceline.DataParallel(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)))
        self.optim = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.loader = loader
        self.checkpoint = paceline.Checkpoint(folder, self.model, self.optim, *objects, every=every, **named)
        torch.manual_seed(10 + self.checkpoint._writer.rank)

    def train(self, *, epochs: int = 3, stop: int | None = None) -> list[tuple[int, list[int], float]]:
        """Train until step `stop`; return for each step its epoch, the numbers in its batch and a random number."""
        served = []
        for batch in self.checkpoint.resume(self.loader, epochs=epochs):
            values = batch["x"] if isinstance(batch, dict) else batch
            numbers = [int(value) for value in values]
            row = torch.zeros(4)
            row[: len(numbers)] = torch.tensor(numbers[:4]) / 400
            self.model(row).square().mean().backward()
            self.optim.step()
            self.optim.zero_grad()
            served.append((self.checkpoint.epoch, numbers, float(torch.rand(()))))
            if self.checkpoint.step == stop:
                break
        self.checkpoint.wait()
        self.checkpoint.close()
        return served

    @property
    def resumed_step(self) -> int:
        """The step that this run resumed from; 0 without a checkpoint."""
        return self.checkpoint.resumed.step if self.checkpoint.resumed else 0

    @property
    def weights(self) -> list[Any]:
        """The parameters."""
        return [param.tolist() for param in self.model.parameters()]

    def refusal(self) -> str:
        """Train, and return why that is refused; nothing was changed by it."""
        before = self.weights
        try:
            self.train()
        except UsageError as error:
            assert self.weights == before
            assert self.checkpoint.step == 0
            return str(error)
        finally:
            self.checkpoint.close()
        raise AssertionError("it was resumed")
