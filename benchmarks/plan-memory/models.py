"""The models of this benchmark beside the reference sizes, as a user would hand them to ``paceline plan memory``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Built = tuple[nn.Module, Any, Callable[..., Tensor]]


def mlp(batch: int) -> Built:
    """Return four wide layers with ReLU, as a classifier of 1000 classes."""
    layers = [nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1000)]
    targets = torch.randint(1000, (batch,))
    return (
        nn.Sequential(*layers),
        torch.randn(batch, 1024),
        lambda out: functional.cross_entropy(out, targets),
    )


class _Residual(nn.Module):
    """Two 3 × 3 convolutions with batch normalisation beside a shortcut (He et al., arXiv 1512.03385)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        narrow = stride != 1 or inputs != outputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if narrow else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(inner)) + self.shortcut(x))


def conv_net(batch: int) -> Built:
    """Return a residual network of ten convolutions on pictures of 64 × 64."""
    widths = [(32, 32, 1), (32, 64, 2), (64, 128, 2), (128, 256, 2)]
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1),
        *(_Residual(*width) for width in widths),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 100),
    )
    targets = torch.randint(100, (batch,))
    return net, torch.randn(batch, 3, 64, 64), lambda out: functional.cross_entropy(out, targets)


class _Encoder(nn.Module):
    """A BERT-like encoder from torch's own layers: LayerNorm, biases, dropout, learned positions."""

    def __init__(self, vocabulary: int, context: int, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = self.positions(torch.arange(tokens.shape[1]))
        return self.head(self.layers(self.tokens(tokens) + positions))


def encoder(batch: int, context: int) -> Built:
    """Return a small masked language model of torch's own transformer layers."""
    tokens = torch.randint(4000, (batch, context))

    def loss(logits: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    return _Encoder(4000, context), tokens, loss


class _Recurrent(nn.Module):
    """An LSTM over an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, 128)
        self.lstm = nn.LSTM(128, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 1000)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.tokens(tokens))[0])


def recurrent(batch: int, context: int) -> Built:
    """Return a recurrent language model."""
    tokens = torch.randint(1000, (batch, context))

    def loss(logits: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    return _Recurrent(), tokens, loss


def gpt2(batch: int, context: int) -> Built:
    """Return the `transformers` library's own GPT-2, small, where it is installed."""
    from transformers import GPT2Config, GPT2LMHeadModel  # pyright: ignore[reportMissingImports]

    net = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=4000, use_cache=False))
    tokens = torch.randint(4000, (batch, context))
    return net, {"input_ids": tokens, "labels": tokens}, lambda out: out.loss
