"""Replicas that differ are found by every training: in rounds 1, 2, 4, 8 … and every 512th."""

from __future__ import annotations

import pytest
import torch

import paceline
from engine_cases import REPLICATED, loss_on, wrapped
from paceline.errors import ReplicasDiverged


def train(rank, sync, steps, spoil):
    """Return the step in which a divergence was found; `spoil` acts between backward and step 5."""
    model, _ = wrapped(sync)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    if sync == "sharded":
        optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    for step in range(steps):
        try:
            loss_on(model, rank, step).backward()
        except ReplicasDiverged as error:
            return step, str(error), [param.grad for param in model.parameters() if param.grad is not None]
        if step == 5 and rank == 1:
            spoil(model.module)
        optim.step()
        optim.zero_grad()
    return None


def clip(net):
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)


def zeroed(net):
    for param in net.parameters():
        param.grad.zero_()


def one_bit(net):
    net.layers[0].weight.data.view(torch.int64)[0, 0] ^= 1


def nothing(net):
    pass


def differing(rank, size, sync, spoil):
    return train(rank, sync, 10, globals()[spoil])


@pytest.mark.sweep
@pytest.mark.parametrize("sync", REPLICATED)
@pytest.mark.parametrize("spoil", ["clip", "zeroed", "one_bit"])
def test_gradients_changed_on_one_rank_are_named_on_all(pool, spoil, sync):
    results = pool(3).run(differing, sync, spoil)
    if spoil == "one_bit":
        assert all(
            "rank 1 holds another parameter 'layers.0.weight' than the majority" in each[1]
            for each in results
        )
    for step, message, left in results:
        assert step == 8
        assert "rank 1 holds another parameter" in message
        assert "PACELINE_REPLICA_CHECK=0" in message
        assert left == []


@pytest.mark.parametrize("sync", [*REPLICATED, "sharded", "full-shard", "auto"])
def test_equal_replicas_train_on(pool, sync):
    assert pool(2).run(differing, sync, "nothing") == [None, None]


@pytest.mark.parametrize(("every", "found"), [("0", None), ("3", 6)])
def test_the_interval_is_set_by_the_environment(pool, every, found):
    env = [{"PACELINE_REPLICA_CHECK": every}] * 2
    for result in pool(2).run(differing, "bucketed", "clip", env=env):
        assert (result and result[0]) == found
