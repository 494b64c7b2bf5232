"""Models of the training scenes: computing on two streams, with layers that are left out or used more often."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["WIDTH", "Repeated", "TwoStreams", "Unused", "layers"]

WIDTH = 16


class TwoStreams(nn.Module):
    """Two branches of layers that alternate in forward, the second one on a stream of its own.

    So buckets hold gradients of both streams, and their last gradient comes from either.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.right = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.large = nn.Linear(WIDTH, 1100)  # more than `SMALL_NBYTES`: copied to its bucket at once
        self.side: Any = None

    def forward(self, x: Tensor) -> Tensor:
        one = other = x
        if self.side is not None:
            self.side.wait_stream(torch.get_device_module(x.device).current_stream())
            x.record_stream(self.side)
        for left, right in zip(self.left, self.right, strict=True):
            one = torch.tanh(left(one))
            with self.beside(other):
                other = torch.tanh(right(other))
        with self.beside(other):
            wide = self.large(other).mean(1, keepdim=True)
        if self.side is not None:
            now = torch.get_device_module(x.device).current_stream()
            now.wait_stream(self.side)
            for each in (other, wide):
                each.record_stream(now)
        return one[:, :4] + other[:, :4] * wide

    def beside(self, x: Tensor) -> contextlib.AbstractContextManager[Any]:
        if self.side is None:
            return contextlib.nullcontext()
        return torch.get_device_module(x.device).stream(self.side)


class Unused(nn.Module):
    """Layers of which some ranks, or in one step all, leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.used = True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.sometimes(x)) if self.used else x)


class Repeated(nn.Module):
    """Uses one layer in re-entrant checkpoints, more often in later steps: late gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 4),
        )
        self.times = 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = torch.utils.checkpoint.checkpoint(lambda z: torch.tanh(self.shared(z)), x, use_reentrant=True)
        return self.last(x)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 48), nn.Tanh(), nn.Linear(48, 40), nn.Tanh(), nn.Linear(40, 4))
