"""Data-parallel training on simulated accelerators: the bits of the CPU, in whatever order streams run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline
from simulated_accelerator import simulated_world

STEPS, SEEDS = 3, 2


def train(rank, sync, device):
    """Return the parameters after a few steps, on the CPU."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 3)).to(device)
    model = paceline.DataParallel(net, sync=sync)
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        x = torch.randn(8, 6, generator=generator).to(device)
        y = torch.randint(0, 3, (8,), generator=generator).to(device)
        nn.functional.cross_entropy(model(x), y).backward()
        optim.step()
        optim.zero_grad()
    return [parameter.detach().cpu().clone() for parameter in model.whole_parameters()]


def differing(rank, size, path, sync):
    """Return the seeds with which training on simulated devices gives other parameters than on the CPU."""
    found = []
    for seed in range(SEEDS):
        with simulated_world(rank, size, f"{path}-{seed}", "cpu:gloo,sim:simccl", seed=seed):
            expected = train(rank, sync, "cpu")
            if not all(map(torch.equal, train(rank, sync, "sim"), expected)):
                found.append(seed)
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("sync", ["bucketed", "naive", "full-shard", "sharded"])
def test_training_gives_the_bits_of_the_cpu(simulated_pool, tmp_path, sync):
    assert simulated_pool(2).run(differing, str(tmp_path / "store"), sync, world=False) == [[], []]
