"""Models to train on a device: a ResNet-50 on images, and a GPT of 124 M parameters on tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.tools.models.gpt import GPT, token_loss
from paceline.tools.models.gpt_sizes import gpt_size

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # width and blocks; arXiv 1512.03385, table 1
CLASSES = 1000


def normalised(before: int, after: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution and its BatchNorm."""
    conv = nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(after))


class Bottleneck(nn.Module):
    """Three convolutions beside a short cut; the stride is the middle one's."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.narrow = normalised(before, width, 1)
        self.middle = normalised(width, width, 3, stride)
        self.widen = normalised(width, 4 * width, 1)
        change = stride > 1 or before != 4 * width
        self.short = normalised(before, 4 * width, 1, stride) if change else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return features of four times `width` channels."""
        inner = functional.relu(self.middle(functional.relu(self.narrow(x))))
        return functional.relu(self.widen(inner) + self.short(x))


def resnet50() -> nn.Module:
    """Return the network: images [batch, 3, side, side] in, logits [batch, 1000] out."""
    layers: list[nn.Module] = [normalised(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    before = 64
    for stage, (width, blocks) in enumerate(STAGES):
        for block in range(blocks):
            layers.append(Bottleneck(before, width, 2 if stage and not block else 1))
            before = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))


class Workload(NamedTuple):
    """A model with its batch: `draw` returns inputs and targets, `loss` takes the model's output and the targets."""

    name: str
    batch_size: int
    build: Callable[[], nn.Module]
    draw: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]


def images(batch_size: int, side: int) -> Workload:
    """Return the ResNet-50, its memory laid out by channels last."""

    def draw() -> tuple[Tensor, Tensor]:
        drawn = torch.randn(batch_size, 3, side, side).contiguous(memory_format=torch.channels_last)
        return drawn, torch.randint(CLASSES, (batch_size,))

    def build() -> nn.Module:
        return resnet50().to(memory_format=torch.channels_last)

    return Workload("ResNet-50", batch_size, build, draw, functional.cross_entropy)


def tokens(batch_size: int, context: int, size: str = "small") -> Workload:
    """Return a GPT with GPT-2's vocabulary, its head tied: 124 M parameters where the size is ``small``."""
    shapes = gpt_size(size, vocabulary=50_257, context=context)

    def draw() -> tuple[Tensor, Tensor]:
        drawn = torch.randint(shapes.vocabulary, (batch_size, context + 1))
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    name = f"GPT, {shapes.parameters(tie=True) / 1e6:.0f} M"
    return Workload(name, batch_size, lambda: GPT(shapes, tie=True), draw, token_loss)


def picture_step(batch: int) -> tuple[nn.Module, tuple[Tensor], Callable[[Tensor], Tensor]]:
    """Return the ResNet-50 with a batch and a loss, as ``paceline plan memory`` takes a user's model."""
    pictures, kinds = torch.randn(batch, 3, 224, 224), torch.randint(CLASSES, (batch,))
    return resnet50(), (pictures,), lambda logits: functional.cross_entropy(logits, kinds)
