"""On the paceline backend a training run gives the same bits, however the gradients are cut and exchanged."""

from __future__ import annotations

import math

import pytest
import torch

import paceline
from paceline.tools.models.gpt import GPT, token_loss
from paceline.tools.models.gpt_sizes import GptSize

SMALL = GptSize("bits", d_model=96, d_ff=384, layers=2, heads=4, vocabulary=256, context=32)
PLANS = {
    "0.1 MiB": paceline.Sync(0.1),
    "1 MiB": paceline.Sync(1),
    "25 MiB": paceline.Sync(25),
    "flat": paceline.Sync(math.inf, overlap=False),
    "naive": paceline.Sync(0, overlap=False),
    "sharded, 0.1 MiB": paceline.Sync(0.1, shard="optimizer"),
    "sharded, 1 MiB": paceline.Sync(1, shard="optimizer"),
}


def train(rank, size, plans, dtype, weighted):
    """Return the parameters (as bytes) after six steps with each plan."""
    results = []
    for plan in plans:
        torch.manual_seed(5)
        model = paceline.DataParallel(GPT(SMALL).to(dtype), sync=plan)
        optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-2)
        drawn = torch.Generator().manual_seed(rank)
        for _ in range(6):
            windows = 2 + rank if weighted else 2
            tokens = torch.randint(256, (windows, 33), generator=drawn)
            value = token_loss(model(tokens[:, :-1]), tokens[:, 1:])
            if weighted:
                model.backward(value, samples=windows)
            else:
                value.backward()
            optim.step()
            optim.zero_grad()
        whole = torch.cat([param.reshape(-1) for param in model.whole_parameters()])
        results.append(whole.view(torch.uint8).numpy().tobytes())
    return results


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("weighted", [False, True], ids=["equal", "samples"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits_with_every_plan(pool, ranks, weighted, dtype):
    first, *others = pool(ranks, "paceline").run(train, list(PLANS.values()), dtype, weighted, timeout=200)
    assert all(other == first for other in others), "ranks differ"
    differing = [name for name, bits in zip(PLANS, first, strict=True) if bits != first[0]]
    assert not differing


def test_the_same_bits_in_every_run(pool):
    once, again = (pool(2, "paceline").run(train, [paceline.Sync(1)], torch.float32, True) for _ in range(2))
    assert once == again
