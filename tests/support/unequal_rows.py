"""A small float64 problem with unequal batches, accumulation, clipping and a scheduler, trained by Paceline alone."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

import paceline

ROWS = 23


class Numbers(torch.utils.data.Dataset):
    """Rows of inputs and a target, in float64."""

    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        self.rows = torch.randn(ROWS, 5, generator=generator, dtype=torch.float64)

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return self.rows[index, :4], self.rows[index, 4:]


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def loss_of(model, batch):
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


def groups(net):
    return [{"params": [net[0].weight], "weight_decay": 0.1}, {"params": [*net[2].parameters(), net[0].bias]}]


def plain(sync, *, epochs=2, batch_size=3, accumulate=3):
    model = paceline.DataParallel(build(), sync=sync)
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, groups(model.module), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 2, gamma=0.5)
    loader = paceline.Loader(Numbers(), batch_size)
    for _ in range(epochs):
        for step, batch in enumerate(loader, 1):
            last = step % accumulate == 0 or step == len(loader)
            with contextlib.nullcontext() if last else model.accumulate():
                model.backward(loss_of(model, batch), samples=batch.samples)
            if last:
                model.clip_grad_norm_(0.5)
                optim.step()
                scheduler.step()
                optim.zero_grad()
    return model


def largest_gap(model, other):
    pairs = zip(model.whole_parameters(), other.whole_parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)
