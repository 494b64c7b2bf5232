"""``gather_dtype``: full-shard computes in a lower precision, and shards keep theirs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import UsageError


def network():
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(320, 320) for _ in range(3))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    return Net()


def gradients(rank, size, gather_dtype):
    """Return the whole gradient of one step on this rank's rows, and the types that were seen."""
    model = paceline.DataParallel(network(), sync="full-shard", gather_dtype=gather_dtype)
    seen = []
    model.module.layers[1].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    rows = torch.randn(4 * size, 320, generator=torch.Generator().manual_seed(1))[4 * rank : 4 * rank + 4]
    loss = model(rows).float().square().mean()
    model.backward(loss, samples=4)
    params = list(model.module.parameters())
    return [param.grad.full_tensor() for param in params], seen, {param.dtype for param in params}


def test_gradients_are_those_of_float32_up_to_rounding(pool):
    exact, _, _ = pool(2).run(gradients, None)[0]
    low, seen, kept = pool(2).run(gradients, torch.bfloat16)[0]
    assert (set(seen), kept) == ({torch.bfloat16}, {torch.float32})
    assert all(grad.dtype == torch.float32 for grad in low)
    assert any(not torch.equal(one, two) for one, two in zip(exact, low, strict=True))
    for one, two in zip(exact, low, strict=True):
        assert (one - two).norm() < 0.03 * one.norm()


@pytest.mark.parametrize("sync", ["bucketed", "sharded"])
def test_it_is_refused_where_nothing_is_gathered(sync):
    with pytest.raises(UsageError, match="gathers no parameters"):
        paceline.DataParallel(nn.Linear(2, 2), sync=sync, gather_dtype=torch.bfloat16)
