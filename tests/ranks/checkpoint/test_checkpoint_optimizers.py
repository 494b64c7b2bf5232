"""Optimizer state in checkpoints: of all of torch's optimizers, for parameters of any memory layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline


def step(net, optimizer, x):
    def closure():
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    return optimizer.step(closure)


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS])
def test_state_of_other_shapes_is_restored(tmp_path, kind):
    """Adafactor keeps a number per row and per column, LBFGS vectors with the size of all parameters."""

    def made():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        return net, kind(net.parameters(), lr=0.1)

    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    net, optimizer = made()
    with paceline.Checkpoint(tmp_path, net, optimizer) as checkpoint:
        step(net, optimizer, x)
        checkpoint.save(wait=True)
    step(net, optimizer, x)
    again, other = made()
    with paceline.Checkpoint(tmp_path, again, other) as checkpoint:
        assert checkpoint.load().step == 1
    step(again, other, x)
    for ours, theirs in zip(again.parameters(), net.parameters(), strict=True):
        assert torch.equal(ours, theirs)


class Waves(nn.Module):
    """A weight with a non-contiguous layout, and a complex one."""

    def __init__(self):
        super().__init__()
        self.image = nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last)
        self.wave = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128))

    def forward(self, x):
        return self.image(x).square().mean() + self.wave.abs().square().mean()


def one_step_more(rank, size, folder, sync, saves):
    """Take a step, the first with a save after it, or resume from there; return the weights."""
    paceline.init()
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    model = paceline.DataParallel(Waves(), sync=sync)
    optimizer = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-2)
    checkpoint = paceline.Checkpoint(folder, model, optimizer)
    checkpoint.load()
    for _ in range(1 + saves):
        model.backward(model(x))
        optimizer.step()
        optimizer.zero_grad()
        if saves and checkpoint.step == 1:
            checkpoint.save(wait=True)
    checkpoint.close()
    return [param.detach().clone() for param in model.module.parameters()]


@pytest.mark.parametrize(
    ("before", "after", "ranks"),
    [("sharded", "bucketed", 2), ("bucketed", "sharded", 2), ("sharded", "sharded", 1)],
)
def test_parameters_of_any_layout_resume_with_another_strategy(pool, tmp_path, before, after, ranks):
    expected = pool(2).run(one_step_more, tmp_path, before, True)[0]
    found = pool(ranks).run(one_step_more, tmp_path, after, False)[0]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
