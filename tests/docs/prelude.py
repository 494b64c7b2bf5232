"""Names that the manual's examples assume: a net, data, a loss; small, and in a world of one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import paceline

WIDTH = 6


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """The mean over this rank's samples."""
    x, y = batch
    return (model(x).squeeze(-1) - y).square().mean()


def accuracy_of(model: nn.Module, batch: Any) -> float:
    """Return the share of samples with the right sign."""
    x, y = batch
    return ((model(x).squeeze(-1) > 0) == (y > 0)).float().mean().item()


def names() -> dict[str, Any]:
    """Return the names that a block starts with."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(96, WIDTH)
    dataset = torch.utils.data.TensorDataset(x, x.sum(1))
    world = paceline.World()
    model = paceline.DataParallel(net)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = paceline.Loader(dataset, batch_size=32)
    return {
        "torch": torch, "nn": nn, "paceline": paceline, "world": world, "net": net, "dataset": dataset,
        "held_out": loader,
        "model": model, "optim": optim, "optimizer": optim, "loader": loader, "batch": next(iter(loader)),
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optim), "tensor": torch.ones(64),
        "loss_of": loss_of, "accuracy_of": accuracy_of, "train_some_steps": lambda: None,
    }  # fmt: skip
