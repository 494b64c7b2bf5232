"""A convolutional network with BatchNorm, data-parallel: a small ResNet learns to tell drawn shapes apart.

torchrun --nproc-per-node 2 examples/convnet.py

Running statistics are buffers. Every rank keeps those of its own batches; before evaluating, all take rank 0's.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional

import paceline

SIDE, BATCH, STEPS = 16, 32, 60
SHAPES = ("disc", "square", "cross", "ring")


class Shapes(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Images [1, 16, 16] of shapes somewhere, of some size, with noise; sample n is always the same."""

    def __init__(self, samples: int, seed: int = 0) -> None:
        self.samples, self.seed = samples, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        kind = index % len(SHAPES)
        centre = torch.rand(2, 1, 1, generator=draw) * 6 + 5
        radius = torch.rand((), generator=draw) * 2 + 2.5
        dy, dx = (torch.stack(torch.meshgrid(*[torch.arange(SIDE)] * 2, indexing="ij")) - centre).abs()
        far, edge = torch.hypot(dy, dx), torch.maximum(dy, dx)
        shape = (
            far < radius,
            edge < radius,
            (torch.minimum(dy, dx) < 1) & (edge < radius),
            (far - radius).abs() < 1,
        )[kind]
        noise = torch.randn(SIDE, SIDE, generator=draw)
        return (shape + 0.2 * noise)[None], kind


class Block(nn.Module):
    """Two convolutions beside a short cut."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
        self.short = nn.Conv2d(before, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of half the side where the stride is 2."""
        return functional.relu(self.second(self.first(x)) + self.short(x))


def build() -> nn.Module:
    """Return the network: images [batch, 1, 16, 16] in, logits [batch, 4] out."""
    torch.manual_seed(0)
    blocks = [Block(1, 16, 1), Block(16, 32, 2), Block(32, 32, 2)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, len(SHAPES)))


def train(
    net: nn.Module, steps: int = STEPS, batch_size: int = BATCH, sync: str = "bucketed"
) -> tuple[paceline.DataParallel, list[float]]:
    """Train on this rank; return the model and its losses."""
    world = paceline.init()
    model = paceline.DataParallel(net.to(world.device), sync=sync)
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=0.03, momentum=0.9, weight_decay=1e-4)
    loader = paceline.Loader(Shapes(4096), batch_size)
    losses = []
    for batch in itertools.islice(loader, steps):
        images, kinds = (tensor.to(world.device) for tensor in batch)
        loss = functional.cross_entropy(model(images), kinds)
        model.backward(loss, samples=batch.samples)
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
        if world.rank == 0 and len(losses) % 20 == 0:
            print(f"step {len(losses)}/{steps}  loss {loss.item():.3f}", flush=True)
    return model, losses


def accuracy(model: paceline.DataParallel, samples: int = 512) -> float:
    """Return the share of new images that are told right, over all ranks, with rank 0's running statistics."""
    device = next(model.parameters()).device
    model.broadcast_buffers()

    def right(model: nn.Module, batch: list[Tensor]) -> Tensor:
        images, kinds = (tensor.to(device) for tensor in batch)
        return (model(images).argmax(1) == kinds).double().mean()

    return paceline.evaluate(model, paceline.Loader(Shapes(samples, seed=1), 128, shuffle=False), right)


if __name__ == "__main__":
    trained, _ = train(build())
    share = accuracy(trained)
    if paceline.init().rank == 0:
        print(f"accuracy on new images: {share:.1%}")
    paceline.shutdown()
