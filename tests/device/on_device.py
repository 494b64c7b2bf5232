"""Models, batches and steps for any device, in float64, so that wrong gradients show."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

WIDTH, SAMPLES, RATE = 12, 8, 0.01


class Plain(nn.Module):
    """Convolution, normalisation, an embedding, linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.words = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x[:, None])).mean(1) + self.words((x[:, 0].abs() * 7).long() % 16)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.last(x)


class TwoStreams(nn.Module):
    """Two branches, each on a stream of its own where there are streams: so are their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Linear(WIDTH, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh()) for _ in range(2)
        )
        self.last = nn.Linear(256, 1)
        self.side: torch.cuda.Stream | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return self.last(self.left(x) + self.right(x))
        main = torch.cuda.current_stream(x.device)
        self.side = side = self.side or torch.cuda.Stream(x.device)
        side.wait_stream(main)
        x.record_stream(side)
        with torch.cuda.stream(side):
            right = self.right(x)
        left = self.left(x)
        main.wait_stream(side)
        right.record_stream(main)
        return self.last(left + right)


MODELS = {"Plain": Plain, "TwoStreams": TwoStreams}


def build(name: str, device: str) -> nn.Module:
    """Return the model in float64, the same every time."""
    torch.manual_seed(3)
    return MODELS[name]().to(device, torch.float64)


def batch(step: int, ranks: Sequence[int], device: str) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of some ranks' batches, one after another."""
    parts = []
    for rank in ranks:
        draw = torch.Generator().manual_seed(100 * step + rank)
        sizes = ((SAMPLES, WIDTH), (SAMPLES, 1))
        parts.append([torch.randn(size, generator=draw, dtype=torch.float64) for size in sizes])
    inputs, targets = (torch.cat(part).to(device) for part in zip(*parts, strict=True))
    return inputs, targets


def loss_of(model: Callable[[Tensor], Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss over the samples."""
    return (model(inputs) - targets).square().mean()


def one_process(name: str, device: str, steps: int, ranks: Sequence[int] = (0,)) -> list[Tensor]:
    """Train the bare model on all ranks' batches; return the parameters."""
    model = build(name, device)
    optim = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(steps):
        loss_of(model, *batch(step, ranks, device)).backward()
        optim.step()
        optim.zero_grad()
    return [param.detach() for param in model.parameters()]


def max_difference(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Return the largest difference of any element."""
    return max((a.detach() - b.detach()).abs().max().item() for a, b in zip(left, right, strict=True))
