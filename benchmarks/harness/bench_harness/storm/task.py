"""What is learnt in a storm: a small network that separates points by a spiral."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = ["Learner", "points"]

_NUMEL = 2000


def points(numel: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return points on two spirals, and which one each is on."""
    drawn = torch.Generator().manual_seed(seed)
    along = torch.rand(numel, generator=drawn)
    which = torch.randint(2, (numel,), generator=drawn)
    angle = 3.5 * along + math.pi * which
    inputs = torch.stack([along * angle.cos(), along * angle.sin()], 1)
    return inputs + 0.01 * torch.randn(numel, 2, generator=drawn), which


class Learner:
    """A worker's network, optimizer and data; all workers begin alike.

    Args:
        number: of the worker.
    """

    def __init__(self, number: int) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(2, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 2)
        )
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=3e-3)
        self.inputs, self.targets = points(_NUMEL, seed=number + 1)
        self.held_out = points(500, seed=0)
        self._drawn = torch.Generator().manual_seed(number)

    def step(self) -> None:
        """Take a step."""
        rows = torch.randint(0, _NUMEL, (32,), generator=self._drawn)
        nn.functional.cross_entropy(self.net(self.inputs[rows]), self.targets[rows]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def loss(self) -> float:
        """Return the loss on points that all workers have alike."""
        inputs, targets = self.held_out
        return nn.functional.cross_entropy(self.net(inputs), targets).item()
