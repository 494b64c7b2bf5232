"""Data-parallel training of a convolutional network with BatchNorm: a small ResNet classifies drawn shapes.

torchrun --nproc-per-node 2 examples/convnet.py

BatchNorm's running statistics are buffers: each rank has those of its own batches. Before evaluation they are broadcast
from rank 0.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional

import paceline

IMAGE_SIZE, BATCH_SIZE, STEPS = 16, 32, 60
SHAPES = ("disc", "square", "cross", "ring")


class Shapes(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Images [1, 16, 16] of shapes at random places and sizes, with noise. Sample n is always the same."""

    def __init__(self, samples: int, seed: int = 0) -> None:
        self.samples, self.seed = samples, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        label = index % len(SHAPES)
        centre = torch.rand(2, 1, 1, generator=generator) * 6 + 5
        radius = torch.rand((), generator=generator) * 2 + 2.5
        dy, dx = (torch.stack(torch.meshgrid(*[torch.arange(IMAGE_SIZE)] * 2, indexing="ij")) - centre).abs()
        radial, largest = torch.hypot(dy, dx), torch.maximum(dy, dx)
        shape = (
            radial < radius,
            largest < radius,
            (torch.minimum(dy, dx) < 1) & (largest < radius),
            (radial - radius).abs() < 1,
        )[label]
        noise = torch.randn(IMAGE_SIZE, IMAGE_SIZE, generator=generator)
        return (shape + 0.2 * noise)[None], label


class Block(nn.Module):
    """Residual block of two convolutions."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(),
        )
        self.second = nn.Sequential(
            nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False), nn.BatchNorm2d(out_channels)
        )
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features, of half the height and width if the stride is 2."""
        return functional.relu(self.second(self.first(x)) + self.shortcut(x))


def build() -> nn.Module:
    """Return the network: logits [batch, 4] from images [batch, 1, 16, 16]."""
    torch.manual_seed(0)
    blocks = [Block(1, 16, 1), Block(16, 32, 2), Block(32, 32, 2)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, len(SHAPES)))


def train(
    net: nn.Module, steps: int = STEPS, batch_size: int = BATCH_SIZE, sync: str = "bucketed"
) -> tuple[paceline.DataParallel, list[float]]:
    """Train on this rank; return the model and its losses."""
    world = paceline.init()
    model = paceline.DataParallel(net.to(world.device), sync=sync)
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=0.03, momentum=0.9, weight_decay=1e-4)
    loader = paceline.Loader(Shapes(4096), batch_size)
    losses = []
    for batch in itertools.islice(loader, steps):
        images, labels = (tensor.to(world.device) for tensor in batch)
        loss = functional.cross_entropy(model(images), labels)
        model.backward(loss, samples=batch.samples)
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
        if world.rank == 0 and len(losses) % 20 == 0:
            print(f"step {len(losses)}/{steps}  loss {loss.item():.3f}", flush=True)
    return model, losses


def accuracy(model: paceline.DataParallel, samples: int = 512) -> float:
    """Return the accuracy on new images, over all ranks, with rank 0's running statistics."""
    device = next(model.parameters()).device
    model.broadcast_buffers()

    def batch_accuracy(model: nn.Module, batch: list[Tensor]) -> Tensor:
        images, labels = (tensor.to(device) for tensor in batch)
        return (model(images).argmax(1) == labels).double().mean()

    held_out = paceline.Loader(Shapes(samples, seed=1), 128, shuffle=False)
    return paceline.evaluate(model, held_out, batch_accuracy)


if __name__ == "__main__":
    trained, _ = train(build())
    held_out_accuracy = accuracy(trained)
    if paceline.init().rank == 0:
        print(f"accuracy on new images: {held_out_accuracy:.1%}")
    paceline.shutdown()
