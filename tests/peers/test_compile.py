"""`torch.compile` before and after wrapping: the same gradients, as few graphs as without us, nothing compiled twice.

The backend only traces (``aot_eager``), so that no compiler is needed, and computes what eager computes to the bit.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import paceline
from model_zoo import max_difference

STEPS = 4
STRATEGIES = ["naive", "flat", "overlap", "bucketed", "sharded", "full-shard"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(16, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def inside(net, sync, units):
    return (model := paceline.DataParallel(torch.compile(net, backend="aot_eager"), sync, units=units)), model


def outside(net, sync, units):
    return (model := paceline.DataParallel(net, sync, units=units)), torch.compile(model, backend="aot_eager")


def by_blocks(net, sync, units):
    for block in net.blocks:
        block.compile(backend="aot_eager")
    return (model := paceline.DataParallel(net, sync, units=units)), model


WAYS = {"inside": inside, "outside": outside, "by blocks": by_blocks}


def train(rank, sync, way, clip):
    """Return the parameters, and the number of graphs after each step."""
    torch.manual_seed(3)
    net = Net().double()
    units = list(net.blocks) if sync == "full-shard" else None
    model, run = WAYS[way](net, sync, units) if way else [paceline.DataParallel(net, sync, units=units)] * 2
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
    graphs = []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(10 * step + rank)
        x, y = (torch.randn(6, width, generator=draw, dtype=torch.float64) for width in (4, 1))
        model.backward((run(x) - y).square().mean(), samples=6)
        if clip:
            model.clip_grad_norm_(1.0)
        optim.step()
        optim.zero_grad()
        graphs.append(counters["stats"]["unique_graphs"])
    return model.whole_parameters(), graphs


def compiled(rank, size, sync, clip):
    """Return for every way how far it is from eager, the graphs after each step, and the breaks."""
    expected, _ = train(rank, sync, None, clip)
    found = {}
    for way in WAYS:
        torch._dynamo.reset()
        counters.clear()
        params, graphs = train(rank, sync, way, clip)
        found[way] = max_difference(params, expected), graphs, sum(counters["graph_break"].values())
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("sync", STRATEGIES)
def test_compiled_is_eager_to_the_bit(pool, sync, clip):
    """The norm over shards may differ: buckets follow the order of gradients, which changes how the sum is rounded."""
    most = 1e-15 if clip and sync == "sharded" else 0.0
    for found in pool(2).run(compiled, sync, clip):
        for gap, graphs, _ in found.values():
            assert gap <= most
            assert graphs == [1] * STEPS, "blocks are alike, so one graph serves them; no later step compiles"
        assert found["inside"][2] == found["by blocks"][2] == 0
        assert found["outside"][2] == (3 if sync == "full-shard" else 2), (
            "before and after the module, and FSDP2's"
        )
