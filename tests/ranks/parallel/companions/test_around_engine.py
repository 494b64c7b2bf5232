"""Programs that synchronise, average or update by themselves, beside the engine: what comes of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import model_zoo
import paceline
from engine_cases import ALL, REPLICATED, loss_on, same_on_all_ranks
from model_zoo import max_difference
from paceline.errors import UsageError
from rank_pool import RankError
from single_process import SGD, pair, same

WHOLE = [*REPLICATED, "sharded", "auto"]


def average_gradients(model):
    """Average as minGPT-style programs do."""
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def replace_by_average(model):
    for param in model.parameters():
        if param.grad is not None:
            mean = param.grad.clone()
            dist.all_reduce(mean)
            param.grad = mean / dist.get_world_size()


def average_parameters(model):
    for param in model.parameters():
        dist.all_reduce(param.data)
        param.data /= dist.get_world_size()


def broadcast_parameters(model):
    for param in model.parameters():
        dist.broadcast(param.data, src=0)


BETWEEN = {each.__name__: each for each in (average_gradients, replace_by_average)}
AFTER = {each.__name__: each for each in (average_parameters, broadcast_parameters)}


def by_hand(rank, size, sync, name, samples, local):
    """Return the gap to one process; `local`: the program turns the engine's synchronisation off for its own."""
    model, optim, reference, other = pair(sync, model_zoo.Plain)
    for step in range(3):
        model.require_backward_grad_sync = not local
        loss = loss_on(model, rank, step)
        if samples:
            model.backward(loss, samples=6)
        else:
            loss.backward()
        if name in BETWEEN:
            BETWEEN[name](model)
        optim.step()
        if name in AFTER:
            AFTER[name](model)
        optim.zero_grad()
        (sum(loss_on(reference, r, step) for r in range(size)) / size).backward()
        other.step()
        other.zero_grad()
    return max_difference(model.whole_parameters(), reference.parameters())


@pytest.mark.sweep
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("name", [*BETWEEN, *AFTER])
@pytest.mark.parametrize("sync", WHOLE)
def test_averaging_once_more_changes_nothing_or_is_refused_for_shards(pool, sync, name, samples, local):
    if sync == "sharded" and name in BETWEEN and not local:
        with pytest.raises(RankError) as caught:
            pool(2).run(by_hand, sync, name, samples, local)
        assert isinstance(caught.value.cause, UsageError)
        assert "of which every rank holds a shard" in str(caught.value.cause)
        return
    same(pool(2).run(by_hand, sync, name, samples, local))


def updated_by_hand(rank, size, sync):
    """Update parameters without any optimizer, as tutorials do."""
    model, _, reference, _ = pair(sync, model_zoo.Plain)
    for step in range(3):
        loss_on(model, rank, step).backward()
        (sum(loss_on(reference, r, step) for r in range(size)) / size).backward()
        for each in (model, reference):
            with torch.no_grad():
                for param in each.parameters():
                    param -= 0.1 * param.grad
            each.zero_grad()
    return max_difference(model.parameters(), reference.parameters())


@pytest.mark.parametrize("sync", REPLICATED)
def test_an_update_by_hand_sees_the_gradient_of_all_ranks(pool, sync):
    same(pool(2).run(updated_by_hand, sync))


def unsynchronised_by_hand(rank, size):
    """An update by hand of gradients of one rank goes past the step guard: replicas differ, for a ReplicaCheck."""
    model, _, _, _ = pair("bucketed", model_zoo.Plain)
    with model.no_sync():
        loss_on(model, rank).backward()
    with torch.no_grad():
        for param in model.parameters():
            param -= 0.1 * param.grad
    return same_on_all_ranks(list(model.parameters()))


def test_an_update_by_hand_of_local_gradients_is_seen_by_no_guard(pool):
    assert pool(2).run(unsynchronised_by_hand) == [False, False]


def built_before(rank, size, sync):
    net, reference = model_zoo.build("Plain"), model_zoo.build("Plain")
    optim = torch.optim.SGD(net.parameters(), **SGD)
    model = paceline.DataParallel(net, sync=sync)
    other = torch.optim.SGD(reference.parameters(), **SGD)
    for step in range(3):
        loss_on(model, rank, step).backward()
        if sync in ("sharded", "full-shard"):
            match = "ShardedOptimizer" if sync == "sharded" else "from before the model was wrapped"
            with pytest.raises(UsageError, match=match):
                optim.step()
            return 0.0
        optim.step()
        optim.zero_grad()
        (sum(loss_on(reference, r, step) for r in range(size)) / size).backward()
        other.step()
        other.zero_grad()
    return max_difference(model.parameters(), reference.parameters())


@pytest.mark.parametrize("sync", [*ALL, "auto"])
def test_an_optimizer_from_before_wrapping_works_or_is_refused(pool, sync):
    same(pool(2).run(built_before, sync))


class Unhooked:
    """An optimizer that is none of torch's, so no hook runs before its step."""

    def __init__(self, params, lr):
        self.params, self.lr = list(params), lr

    @torch.no_grad()
    def step(self):
        """Take a step of gradient descent."""
        for param in self.params:
            param -= self.lr * param.grad


def foreign_optimizer(rank, size, sync):
    """Return the gap to one process, and check that shards are refused."""
    model, _, reference, _ = pair(sync, model_zoo.Plain)
    loss_on(model, rank).backward()
    optim = Unhooked(model.parameters(), 0.1)
    if sync == "sharded":
        with pytest.raises(UsageError, match="of which every rank holds a shard"):
            optim.step()
        return 0.0
    optim.step()
    (sum(loss_on(reference, r) for r in range(size)) / size).backward()
    Unhooked(reference.parameters(), 0.1).step()
    return max_difference(model.parameters(), reference.parameters())


@pytest.mark.parametrize("sync", WHOLE)
def test_an_optimizer_that_torch_does_not_know(pool, sync):
    same(pool(2).run(foreign_optimizer, sync))


def in_ddp(rank, size, sync):
    model, optim, reference, other = pair(sync, model_zoo.Plain)
    ddp = DistributedDataParallel(model)
    for step in range(3):
        loss_on(ddp, rank, step).backward()
        optim.step()
        optim.zero_grad()
        (sum(loss_on(reference, r, step) for r in range(size)) / size).backward()
        other.step()
        other.zero_grad()
    return max_difference(model.whole_parameters(), reference.parameters())


@pytest.mark.parametrize("sync", [*REPLICATED, paceline.Sync(2**-11), "sharded", "auto"], ids=str)
def test_in_torchs_ddp_everything_is_sent_twice_and_right(pool, sync):
    same(pool(2).run(in_ddp, sync))
