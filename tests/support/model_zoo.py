"""Models with unusual parameters (unused, tied, frozen, strided, …), small enough to compare in float64."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class Plain(nn.Module):
    """Three layers and a scalar parameter."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 1)
        )
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.layers(x) * self.scale


class Unused(Plain):
    """A layer that no rank ever uses."""

    def __init__(self):
        super().__init__()
        self.never = nn.Linear(4, 4)


class Branches(nn.Module):
    """Layers that only some samples use: on some ranks only, in some steps not at all."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(3))

    def forward(self, x):
        hidden, choice = torch.tanh(self.stem(x)), self.choice(x)
        out = x.new_zeros(len(x), 1)
        for index, branch in enumerate(self.branches):
            chosen = choice == index
            if chosen.any():
                out = out.masked_scatter(chosen[:, None], branch(hidden[chosen]))
        return out

    @staticmethod
    def choice(x):
        return torch.where(x[:, 0] > 1.6, 2, torch.where(x[:, 0] > 0.3, 1, 0))


class Tied(nn.Module):
    """One parameter under two names, and a layer used twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.head(torch.tanh(self.last(torch.tanh(self.first(hidden)))))


class Frozen(Plain):
    """Some parameters are not trained."""

    def __init__(self):
        super().__init__()
        self.layers[0].weight.requires_grad_(False)
        self.scale.requires_grad_(False)


class Checkpointed(nn.Module):
    """Activation checkpoints, one layer in two of them."""

    reentrant = False

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.last(x)

    def block(self, x):
        return torch.tanh(self.shared(x)) + x


class CheckpointedReentrant(Checkpointed):
    """The old kind, which runs a backward inside backward: the shared layer's hook fires twice."""

    reentrant = True


class Strided(nn.Module):
    """Parameters that are not contiguous, one that is complex, one that is empty."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, WIDTH).t() * 0.3)
        self.conv = nn.Conv2d(3, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.wave = nn.Parameter(torch.randn(6, dtype=torch.complex128) * 0.3)
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x):
        hidden = torch.tanh(x @ self.weight)
        image = self.conv(hidden.view(-1, 1, 3, 3).expand(-1, 3, -1, -1)).flatten(1)[:, :12]
        wave = torch.view_as_complex(image.reshape(len(x), 6, 2)) * self.wave
        return wave.real.sum(1, keepdim=True) + wave.imag.square().sum(1, keepdim=True) + self.nothing.sum()


class SeveralForwards(nn.Module):
    """Wrapped, it is called several times before one backward (see `loss_of`)."""

    def __init__(self):
        super().__init__()
        self.body = Plain()

    def forward(self, x):
        return self.body(x)


class OwnGradient(nn.Module):
    """Its gradient arrives with odd strides, from a custom function."""

    class Flip(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return weight.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad.t().contiguous().t()

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, WIDTH) * 0.3)
        self.head = nn.Linear(5, 1)

    def forward(self, x):
        return self.head(torch.tanh(F.linear(x, self.Flip.apply(self.weight))))


class Explode(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise FloatingPointError("injected")


class Exploding(Plain):
    """Raises in the middle of backward while `broken`."""

    broken = False

    def forward(self, x):
        hidden = self.layers[:3](x)
        return self.layers[3:](Explode.apply(hidden) if self.broken else hidden) * self.scale


MODELS = {
    kind.__name__: kind
    for kind in (
        Plain,
        Unused,
        Branches,
        Tied,
        Frozen,
        Checkpointed,
        CheckpointedReentrant,
        Strided,
        SeveralForwards,
        OwnGradient,
    )
}


def build(name, seed=3):
    """Return the model in float64, the same for the same seed."""
    torch.manual_seed(seed)
    return MODELS[name]().double()


def loss_of(model, name, x, y):
    """Return the mean loss over the samples of `x`."""
    if name == "SeveralForwards" and len(x) > 1:
        half = len(x) // 2
        out = torch.cat([model(x[:half]), model(x[half:])])
    else:
        out = model(x)
    return (out - y).square().mean()


def max_difference(left, right):
    """Return the largest difference of any element of two lists of tensors; NaN if there is a NaN."""
    gaps = [(a - b).abs().max().double() for a, b in zip(left, right, strict=True) if a.numel()]
    return torch.stack(gaps).max().item() if gaps else 0.0
