"""Models whose hidden weights are matrices of many kinds, small enough to compare in float64.

All take ``[samples, WIDTH]`` and return ``[samples, 1]``, as those of `model_zoo` do.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from model_zoo import WIDTH

__all__ = ["MATRIX_MODELS", "SPLITS", "build_matrices"]


class Unequal(nn.Module):
    """Matrices of 18 to 1920 numbers."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(WIDTH, 12)
        self.up = nn.Linear(12, 40, bias=False)
        self.wide = nn.Linear(40, 48, bias=False)
        self.down = nn.Linear(48, 3)
        self.tiny = nn.Linear(3, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        x = self.down(torch.tanh(self.wide(torch.tanh(self.up(torch.tanh(self.enter(x)))))))
        return self.head(self.norm(torch.tanh(self.tiny(x))))


class Single(nn.Module):
    """One hidden matrix, so that most ranks own none."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(WIDTH, 7)
        self.head = nn.Linear(7, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.enter(x)))


class Fused(nn.Module):
    """Attention over three positions, whose query, key and value are one matrix."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(WIDTH, 3 * 8)
        self.qkv = nn.Linear(8, 3 * 8, bias=False)
        self.out = nn.Linear(8, 8, bias=False)
        self.norm = nn.RMSNorm(8)
        self.head = nn.Linear(3 * 8, 1)

    def project(self, x):
        return self.qkv(x).chunk(3, dim=-1)

    def forward(self, x):
        x = torch.tanh(self.enter(x)).view(len(x), 3, 8)
        x = self.norm(x + self.out(F.scaled_dot_product_attention(*self.project(x))))
        return self.head(x.flatten(1))


class Separate(Fused):
    """The same with three matrices."""

    def __init__(self):
        super().__init__()
        blocks = self.qkv.weight.detach().chunk(3)
        del self.qkv
        self.each = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in blocks)
        for layer, block in zip(self.each, blocks, strict=True):
            layer.weight = nn.Parameter(block.clone())

    def project(self, x):
        return [layer(x) for layer in self.each]


class Experts(nn.Module):
    """Four experts in a tensor with three dimensions; each sample uses one, so ranks may use different ones."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(WIDTH, 8)
        self.experts = nn.Parameter(torch.randn(4, 8, 5) / 3)
        self.back = nn.Parameter(torch.randn(5, 8) / 2)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        chosen = torch.bucketize(x[:, 0].contiguous(), x.new_tensor([-0.5, 0.3, 1.5]))
        x = torch.tanh(self.enter(x))
        hidden = torch.tanh(torch.bmm(x[:, None], self.experts[chosen])[:, 0])
        return self.head(x + hidden @ self.back)


class Sometimes(nn.Module):
    """A matrix that only some samples use: on some ranks only, in some steps not at all; another one is never used."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(WIDTH, 8)
        self.branch = nn.Linear(8, 8)
        self.never = nn.Linear(8, 4)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        hidden, chosen = torch.tanh(self.enter(x)), x[:, 0] > 1.5
        if chosen.any():
            hidden = hidden.masked_scatter(chosen[:, None], torch.tanh(self.branch(hidden[chosen])))
        return self.head(hidden)


class Transposed(nn.Module):
    """Matrices whose columns are contiguous."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Parameter(torch.randn(9, WIDTH).t() / 3)
        self.middle = nn.Parameter(torch.randn(5, 9).t() / 3)
        self.head = nn.Linear(5, 1)

    def forward(self, x):
        return self.head(torch.tanh(torch.tanh(x @ self.enter) @ self.middle))


MATRIX_MODELS = {
    kind.__name__: kind for kind in (Unequal, Single, Fused, Separate, Experts, Sometimes, Transposed)
}
SPLITS = {"Fused": {"*qkv.weight": 3}, "Experts": {"*experts": 4}}
"""Options `split` that make sense for a model; Muon needs that of Experts."""


def build_matrices(name, seed=3):
    """Return the model in float64, the same for the same seed."""
    torch.manual_seed(seed)
    return MATRIX_MODELS[name]().double()
