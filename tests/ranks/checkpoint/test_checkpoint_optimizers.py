"""Optimizer state in checkpoints: of all of torch's optimizers, for parameters of any memory layout."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import paceline
import paceline.errors


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


# ------------------------------------------------------------------ optimizers that keep state in their groups


class CountingSGD(torch.optim.SGD):
    """Divides its step by a count, which it keeps in its groups."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / group["count"])


ELSEWHERE = ["AdaBelief", "Adan", "RAdam", "AdEMAMix", "ScheduleFreeAdamW", "Lion"]
"""Optimizers of pytorch_optimizer, most with a step count in their groups."""


def optimizer_class(name):
    return CountingSGD if name == "CountingSGD" else getattr(pytest.importorskip("pytorch_optimizer"), name)


def made(sync, name):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5), nn.PReLU())
    model = paceline.DataParallel(net, sync=sync)
    # The PReLU's only element lies on one rank.
    groups = [{"params": list(net[:3].parameters())}, {"params": list(net[3].parameters()), "lr": 0.005}]
    return model, paceline.ShardedOptimizer(model, optimizer_class(name), groups, lr=0.01)


def advance(model, optimizer, rank, size, steps):
    for step in steps:
        x = torch.randn(12, 7, generator=torch.Generator().manual_seed(step)).chunk(size)[rank]
        model.backward(model(x).square().mean(), samples=len(x))
        optimizer.step()
        optimizer.zero_grad()


def ten_steps(rank, size, name, sync):
    """Ten steps without a break."""
    paceline.init()
    model, optimizer = made(sync, name)
    advance(model, optimizer, rank, size, range(10))
    return [param.detach().clone() for param in model.parameters()]


def save_after_five(rank, size, name, sync, folder):
    paceline.init()
    model, optimizer = made(sync, name)
    advance(model, optimizer, rank, size, range(5))
    with paceline.Checkpoint(folder, model, optimizer) as checkpoint:
        checkpoint.save(wait=True)


def resume_after_five(rank, size, name, sync, folder):
    paceline.init()
    model, optimizer = made(sync, name)
    with paceline.Checkpoint(folder, model, optimizer) as checkpoint:
        checkpoint.load()
    advance(model, optimizer, rank, size, range(5, 10))
    return model.whole_parameters()


def by_state_dict(rank, size, name, first, second):
    """Five steps, then five of a new model and optimizer that loaded the state."""
    model, optimizer = made(first, name)
    advance(model, optimizer, rank, size, range(5))
    again, other = made(second, name)
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    advance(again, other, rank, size, range(5, 10))
    return [param.detach().clone() for param in again.parameters()]


def assert_close(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-7)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["CountingSGD", *ELSEWHERE])
def test_a_count_in_a_group_is_resumed(pool, tmp_path, name):
    optimizer_class(name)  # skips without the package
    expected = pool(2).run(ten_steps, name, "naive")[0]
    assert_close(pool(2).run(ten_steps, name, "sharded")[0], expected)
    assert_close(pool(2).run(by_state_dict, name, "sharded", "sharded")[0], expected)
    assert_close(pool(2).run(by_state_dict, name, "bucketed", "sharded")[0], expected)
    pool(2).run(save_after_five, name, "sharded", tmp_path)
    for ranks, sync in [(2, "sharded"), (3, "sharded"), (2, "bucketed"), (1, "bucketed")]:
        assert_close(pool(ranks).run(resume_after_five, name, sync, tmp_path)[0], expected)


def refused_elsewhere(rank, size, name):
    with pytest.raises(
        paceline.errors.UsageError, match=f"{name} can't update parameters on different ranks: it is not"
    ):
        made("sharded", name)
    model, optimizer = made("bucketed", name)
    advance(model, optimizer, rank, size, range(1))


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["AdamP", "SGDP", "StableAdamW", "Lamb"])
def test_optimizers_of_whole_parameters_are_resumed(pool, tmp_path, name):
    optimizer_class(name)
    expected = pool(2).run(ten_steps, name, "naive")[0]
    assert_close(pool(2).run(ten_steps, name, "sharded")[0], expected)
    assert_close(pool(2).run(by_state_dict, name, "sharded", "bucketed")[0], expected)
    pool(2).run(save_after_five, name, "sharded", tmp_path)
    for ranks, sync in [(3, "sharded"), (2, "full-shard"), (1, "bucketed")]:
        assert_close(pool(ranks).run(resume_after_five, name, sync, tmp_path)[0], expected)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["Prodigy", "Adai"])
def test_optimizers_whose_updates_depend_on_other_parameters_are_refused_where_sharded(pool, name):
    optimizer_class(name)
    pool(2).run(refused_elsewhere, name)
