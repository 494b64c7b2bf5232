"""The copy of the right neighbour's shard equals that shard to the bit, and changes nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline
from paceline._core.summation_tree import leaves_of
from paceline.world.value_collectives import gather_values

STEPS = 6
SYNCS = {
    "one bucket": paceline.Sync.of("sharded"),
    "small buckets": paceline.Sync(0.02, shard="optimizer"),
    "no overlap": paceline.Sync(0.02, overlap=False, shard="optimizer"),
}


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 301), nn.Tanh(), nn.Linear(301, 70), nn.Tanh(), nn.Linear(70, 3))


def optimizers_of(model, kind):
    if kind == "sgd":
        return [paceline.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)]
    if kind == "adamw":
        return [paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-2, fused=True)]
    matrices, rest = paceline.matrix_parameters(model)
    return [
        paceline.ShardedOptimizer(model, torch.optim.Muon, matrices, lr=1e-2),
        paceline.ShardedOptimizer(model, torch.optim.AdamW, rest, lr=1e-2),
    ]


def train(rank, size, sync, kind, copies, virtual, clip):
    """Return the parameters, this rank's shards of state, and the copy of its neighbour's."""
    model = paceline.DataParallel(network(), sync=sync, virtual_ranks=virtual)
    optimizers = optimizers_of(model, kind)
    for step in range(STEPS):
        if step == copies:
            for each in optimizers:
                each.keep_copy()
        for leaf in leaves_of(rank, size, virtual) if virtual else [rank]:
            torch.manual_seed(100 * step + leaf)
            count = (7 * step + 3 * leaf) % 5 + 2
            loss = (model(torch.randn(count, 12)) - torch.randn(count, 3)).square().mean()
            model.backward(loss, samples=count)
        clip(model)
        for each in optimizers:
            each.step()
        for each in optimizers:
            each.zero_grad()
    model.wait_for_parameters()
    flat = torch.cat([param.detach().flatten() for param in model.parameters()])
    return flat, [each.shards() for each in optimizers], [each.copied_shards() for each in optimizers]


def own_clip(model):
    model.clip_grad_norm_(0.3)


def torch_clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    for param in model.parameters():
        param.grad.mul_(0.5)


def no_clip(model):
    pass


def compare(rank, size, sync, kind, virtual, clip, begin=0):
    """Train without copies and with copies from a step on; return what differs."""
    plain, own, none = train(rank, size, sync, kind, None, virtual, clip)
    found, shards, copy = train(rank, size, sync, kind, begin, virtual, clip)
    assert not any(none)
    problems = [] if torch.equal(plain, found) else ["parameters"]
    problems += [] if same(own, shards) else ["own state"]
    every = gather_values(shards)
    problems += [] if same(every[(rank + 1) % size], copy) else ["copied state"]
    assert any(copy), "there is a copy"
    return problems


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(each, other[key]) for key, each in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["paceline", "gloo"])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("virtual", [None, 8])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("sync", SYNCS)
def test_copy_is_the_neighbours_shard(pool, backend, size, virtual, kind, sync):
    assert pool(size, backend).run(compare, SYNCS[sync], kind, virtual, own_clip) == [[]] * size


@pytest.mark.parametrize("backend", ["paceline", "gloo"])
@pytest.mark.parametrize("clip", [torch_clip, no_clip])
def test_copy_follows_what_changes_gradients(pool, backend, clip):
    assert pool(3, backend).run(compare, SYNCS["small buckets"], "sgd", None, clip) == [[]] * 3


@pytest.mark.parametrize("backend", ["paceline", "gloo"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_copies_from_a_later_step_on(pool, backend, kind):
    assert pool(3, backend).run(compare, SYNCS["small buckets"], kind, 8, own_clip, 3) == [[]] * 3
