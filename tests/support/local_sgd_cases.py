"""Models and steps for tests of local SGD."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional

import paceline

__all__ = [
    "BATCH",
    "WIDTH",
    "adamw",
    "batch_of",
    "flat",
    "network",
    "run",
    "same",
    "sgd",
    "take_step",
    "transcript",
]

BATCH, WIDTH = 4, 6


def network(dtype=torch.float64, seed=1):
    """Return a model of five layers, the same everywhere."""
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2)]
    return nn.Sequential(*layers).to(dtype)


def batch_of(rank, step, dtype=torch.float64, size=BATCH):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(size, WIDTH, dtype=dtype, generator=generator) + 0.3 * rank
    return inputs, torch.randn(size, 2, dtype=dtype, generator=generator)


def take_step(model, optim, rank, step, size=BATCH, dtype=torch.float64):
    inputs, targets = batch_of(rank, step, dtype, size)
    loss = functional.mse_loss(model(inputs), targets)
    if isinstance(model, paceline.DataParallel):
        model.backward(loss, samples=size)
    else:
        loss.backward()
    optim.step()
    optim.zero_grad()


def flat(model):
    return torch.cat([param.detach().reshape(-1).double() for param in model.parameters()])


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def transcript(ranks, steps, every, outer_lr, momentum, optimizer, sizes=None, dtype=torch.float64):
    """DiLoCo, Algorithm 1 of arXiv 2311.08105, as it is written there: one process, one copy for each worker."""
    sizes = sizes or [BATCH] * ranks
    theta = network(dtype)
    workers = [copy.deepcopy(theta) for _ in range(ranks)]
    optims = [optimizer(worker) for worker in workers]
    outer = torch.optim.SGD(theta.parameters(), lr=outer_lr, momentum=momentum, nesterov=momentum > 0)
    for step in range(1, steps + 1):
        for rank, (worker, optim) in enumerate(zip(workers, optims, strict=True)):
            take_step(worker, optim, rank, step, sizes[rank], dtype)
        if step % every == 0:
            for shared, *mine in zip(theta.parameters(), *(w.parameters() for w in workers), strict=True):
                given = [
                    size * (shared.detach() - own.detach()) for size, own in zip(sizes, mine, strict=True)
                ]
                shared.grad = sum(given) / sum(sizes)
            outer.step()
            for worker in workers:
                worker.load_state_dict(theta.state_dict())
    return flat(theta)


def run(rank, size, kind, steps, options, optimizer=adamw, sizes=None, wrap=True, dtype=torch.float64):
    """Return the parameters of this rank after `steps` local steps."""
    model = network(dtype, seed=1 if wrap else rank)
    model = paceline.DataParallel(model, sync="bucketed") if wrap else model
    optim = optimizer(model)
    with getattr(paceline, kind)(model, optim, **options):
        for step in range(1, steps + 1):
            take_step(model, optim, rank, step, sizes[rank] if sizes else BATCH, dtype)
    return flat(model)


def same(results):
    """Check that all ranks have bitwise equal results, and return one."""
    assert all(torch.equal(results[0], other) for other in results[1:])
    return results[0]
