"""Copies of bfloat16 parameters in float32: updated in their place, divided, saved, moved and rounded."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.errors import UsageError

ADAMW = {"lr": 2e-3, "weight_decay": 0.05}
WIDTH = 24
STRATEGIES = ["bucketed", "sharded", "full-shard"]


def net():
    torch.manual_seed(11)
    return nn.Sequential(
        nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, WIDTH), nn.LayerNorm(WIDTH)
    ).bfloat16()


def batch(step, rank=0):
    generator = torch.Generator().manual_seed(31 * step + rank)
    return torch.randn(6, WIDTH, generator=generator).bfloat16()


def backward(model, step, rank=0):
    model(batch(step, rank)).float().square().mean().backward()


def built(sync, kind=torch.optim.AdamW, *, group=None, reduce_dtype=None, module=None, **options):
    model = paceline.DataParallel(module or net(), sync=sync, group=group, reduce_dtype=reduce_dtype)
    options = {**(ADAMW if kind is torch.optim.AdamW else {"lr": 0.02}), **options}
    return model, paceline.ShardedOptimizer(model, kind, **{"master_dtype": torch.float32, **options})


def train(model, optim, steps, rank=0):
    for step in steps:
        backward(model, step, rank)
        optim.step()
        model.zero_grad()


def equal(one, two):
    return [torch.equal(a, b) for a, b in zip(one, two, strict=True)]


class ByHand:
    """Float32 weights beside a model of the same ranks, which reduces gradients and updates nothing.

    With `unrounded` it takes gradients as they were reduced, which `param.grad` rounds to the parameter's dtype.
    """

    def __init__(self, reduce_dtype=None, *, unrounded=False):
        self.model = paceline.DataParallel(net(), sync="bucketed", reduce_dtype=reduce_dtype)
        self.weights = [nn.Parameter(param.detach().float()) for param in self.model.parameters()]
        self.optim = torch.optim.AdamW(self.weights, **ADAMW)
        slots = self.model.engine.slots if unrounded else []
        self.summed = {id(slot.param): lambda slot=slot: slot.view for slot in slots}

    def step(self, step, rank):
        backward(self.model, step, rank)
        for weight, param in zip(self.weights, self.model.parameters(), strict=True):
            grad = self.summed[id(param)]() if self.summed else param.grad
            weight.grad = grad.float()
        self.optim.step()
        self.model.zero_grad()
        self.round()

    def round(self):
        with torch.no_grad():
            for weight, param in zip(self.weights, self.model.parameters(), strict=True):
                param.copy_(weight)

    def follow(self):
        with torch.no_grad():
            for weight, param in zip(self.weights, self.model.parameters(), strict=True):
                weight.copy_(param)


def as_by_hand(rank, size, sync, reduce_dtype, offload):
    model, optim = built(sync, reduce_dtype=reduce_dtype, offload=offload)
    hand = ByHand(reduce_dtype, unrounded=sync == "sharded" and reduce_dtype is not None)
    found = []
    for step in range(5):
        train(model, optim, [step], rank)
        hand.step(step, rank)
        found += equal(model.whole_parameters(), hand.model.parameters())
    plain = paceline.DataParallel(net(), sync="bucketed")
    other = torch.optim.AdamW(plain.parameters(), **ADAMW)
    train(plain, other, range(5), rank)
    assert not all(equal(plain.parameters(), hand.model.parameters())), "the test can't tell them apart"
    return found


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("size", "sync", "reduce_dtype", "offload"),
    [
        (3, "sharded", None, False),
        (1, "sharded", None, False),
        (1, "bucketed", None, True),
        (2, "bucketed", None, False),
        (2, "bucketed", torch.float32, False),
        (2, "sharded", None, True),
        (3, "sharded", torch.float32, False),
        (2, "sharded", torch.float32, False),
    ],
)
def test_the_update_is_that_of_float32_weights_kept_by_hand(pool, size, sync, reduce_dtype, offload):
    for found in pool(size, "paceline").run(as_by_hand, sync, reduce_dtype, offload):
        assert all(found)


def near_by_hand(rank, size):
    """FSDP2 sums in another order."""
    model, optim = built("full-shard")
    hand = ByHand()
    for step in range(5):
        train(model, optim, [step], rank)
        hand.step(step, rank)
    ours, theirs = (
        torch.cat([p.reshape(-1) for p in model.whole_parameters()]),
        torch.cat([p.detach().reshape(-1) for p in hand.model.parameters()]),
    )
    return (ours.float() - theirs.float()).abs().max().item()


def test_full_shard_updates_float32_weights_too(pool):
    assert all(gap < 5e-3 for gap in pool(2).run(near_by_hand))


def small_updates(rank, size, sync):
    """Updates that bfloat16 alone would lose add up."""
    module = nn.Linear(WIDTH, 8, bias=False).bfloat16()
    nn.init.constant_(module.weight, 1.0)
    model, optim = built(sync, torch.optim.SGD, module=module, lr=1e-3)
    for _ in range(20):
        model(torch.ones(1, WIDTH).bfloat16()).sum().backward()
        optim.step()
        optim.zero_grad()
    return [weight.item() for weight in torch.stack(model.whole_parameters()).unique()]


@pytest.mark.parametrize("sync", STRATEGIES)
def test_small_updates_add_up(pool, sync):
    for found in pool(2).run(small_updates, sync):
        assert found == [torch.tensor(0.98).bfloat16().item()]  # 20 updates of 0.001; one alone rounds to 1


def held(rank, size):
    model, optim = built("sharded")
    train(model, optim, range(2), rank)
    shards = optim.state_dict()["shards"]
    parts = [part["state"] for of_param in shards.values() for part in of_param]
    assert all(part["master"].dtype == part["exp_avg"].dtype == torch.float32 for part in parts)
    return sum(part["master"].numel() for part in parts), sum(param.numel() for param in model.parameters())


def test_every_rank_holds_its_part_of_the_copies(pool):
    counts, total = zip(*pool(3).run(held), strict=True)
    assert sum(counts) == total[0]
    assert max(counts) <= total[0] / 3 + 64


# ---------------------------------------------------------------- saved and resumed


def carried(rank, size, first, second, way, folder):
    """Train 3 steps, continue from a saved state elsewhere; return whether all bits are those of 6 steps.

    Every rank has the same batch, so that the mean over one rank and over two is the same number.
    """
    groups = {2: dist.new_group([0, 1]), 1: dist.new_group([0])}
    (sync, ranks), (other_sync, other_ranks) = first, second
    whole, state, model, optim = None, None, None, None
    if rank < ranks:
        model, optim = built(sync, group=groups[ranks])
        train(model, optim, range(3))
        whole = model.whole_parameters()
        if way == "consolidated":
            optim.consolidate_state_dict()
            state = optim.state_dict()
        elif way == "shards":
            state = optim.state_dict()
        else:
            paceline.Checkpoint(folder, model, optim, group=groups[ranks]).save(wait=True)
    box = [None, None]
    dist.all_gather_object(box, (whole, copy.deepcopy(state)))
    result = [True]
    if rank < other_ranks:
        module = net()
        with torch.no_grad():
            for param, value in zip(module.parameters(), box[0][0], strict=True):
                param.copy_(value)
        other, resumed = built(other_sync, group=groups[other_ranks], module=module)
        if way == "consolidated":
            resumed.load_state_dict(copy.deepcopy(box[0][1]))
        elif way == "shards":
            resumed.load_state_dict(merged([state for _, state in box[:ranks]]))
        else:
            assert paceline.Checkpoint(folder, other, resumed, group=groups[other_ranks]).load()
        train(other, resumed, range(3, 6))
        reference, whole_run = built(other_sync, group=groups[other_ranks])
        train(reference, whole_run, range(6))
        result = equal(other.whole_parameters(), reference.whole_parameters())
    dist.barrier()
    return result


def merged(states):
    if "shards" not in states[0]:
        return states[0]
    shards = {}
    for state in states:
        for name, parts in state["shards"].items():
            shards.setdefault(name, []).extend(parts)
    return {"param_groups": states[0]["param_groups"], "shards": shards}


ROUTES = [
    (("sharded", 2), ("sharded", 1), "checkpoint"),
    (("sharded", 1), ("sharded", 2), "shards"),
    (("sharded", 2), ("bucketed", 2), "checkpoint"),
    (("sharded", 2), ("bucketed", 1), "consolidated"),
    (("bucketed", 2), ("sharded", 2), "consolidated"),
    (("bucketed", 1), ("sharded", 2), "checkpoint"),
    (("sharded", 2), ("full-shard", 2), "checkpoint"),
    (("full-shard", 2), ("sharded", 2), "checkpoint"),
    (("full-shard", 2), ("bucketed", 1), "checkpoint"),
    (("bucketed", 2), ("full-shard", 2), "shards"),
    (("sharded", 2), ("bucketed", 2), "shards"),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("first", "second", "way"), ROUTES)
def test_a_run_continues_to_the_bit_elsewhere(pool, tmp_path, first, second, way):
    for found in pool(2, "paceline").run(carried, first, second, way, str(tmp_path)):
        assert all(found)


# ---------------------------------------------------------------- changed by the program


def changed(rank, size, sync):
    model, optim = built(sync)
    hand = ByHand()
    found = []
    for step in range(6):
        train(model, optim, [step], rank)
        hand.step(step, rank)
        if step == 1:  # one parameter, and a part of another one
            for params in (list(model.module.parameters()), list(hand.model.parameters())):
                with torch.no_grad():
                    params[0][3:5].fill_(0.25)
                    params[1].mul_(0.5)
            masters = [hand.weights[0].detach().clone(), hand.weights[1].detach().clone()]
            hand.weights[0].data[3:5] = 0.25
            hand.weights[1].data.copy_(list(hand.model.parameters())[1].detach())
            assert torch.equal(masters[0][5:], hand.weights[0][5:].detach())
        if step == 3:
            state = {name: torch.full_like(value, 0.4375) for name, value in model.state_dict().items()}
            model.load_state_dict(state)
            hand.model.load_state_dict(state)
            hand.follow()
        found += equal(model.parameters(), hand.model.parameters())
    return found


@pytest.mark.parametrize("sync", ["sharded", "bucketed"])
def test_what_the_program_changes_is_followed(pool, sync):
    for found in pool(2, "paceline").run(changed, sync):
        assert all(found)


def groups_and_schedule(rank, size, sync):
    """Groups with options of their own, one of them added later, and a scheduler."""
    model, hand = paceline.DataParallel(net(), sync=sync), ByHand()
    mine, theirs = list(model.parameters()), hand.weights

    def optimizer(params, make):
        optim = make([{"params": params[:3], "weight_decay": 0.2}, {"params": params[3:4]}])
        return optim, torch.optim.lr_scheduler.ExponentialLR(optim, 0.5)

    optim, schedule = optimizer(
        mine,
        lambda given: paceline.ShardedOptimizer(
            model, torch.optim.AdamW, given, master_dtype=torch.float32, **ADAMW
        ),
    )
    hand.optim, other = optimizer(theirs, lambda given: torch.optim.AdamW(given, **ADAMW))
    found = []
    for step in range(4):
        if step == 2:
            for each, params in ((optim, mine), (hand.optim, theirs)):
                each.add_param_group({"params": params[4:], "lr": 0.01})
        train(model, optim, [step], rank)
        hand.step(step, rank)
        schedule.step(), other.step()
        found += equal(model.parameters(), hand.model.parameters())
    return found


@pytest.mark.parametrize("sync", ["sharded", "bucketed"])
def test_groups_schedulers_and_later_groups_work(pool, sync):
    for found in pool(2, "paceline").run(groups_and_schedule, sync):
        assert all(found)


def refused(rank, size):
    model = paceline.DataParallel(net(), sync="sharded")
    for options, match in [
        ({"master_dtype": "float32"}, "floating-point dtype"),
        ({"master_dtype": torch.int32}, "floating-point dtype"),
        ({"stochastic_rounding": True}, "pass master_dtype=torch.float32"),
        ({"stochastic_rounding": True, "master_dtype": torch.float64}, "pass master_dtype=torch.float32"),
    ]:
        with pytest.raises(UsageError, match=match):
            paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=0.1, **options)


def test_wrong_options_are_named(pool):
    pool(1).run(refused)


# ---------------------------------------------------------------- stochastic rounding


def rounded(rank, size, sync, kind):
    """Return the parameters of two equal runs, the second one resumed half-way."""
    options = {"stochastic_rounding": True}
    if kind is torch.optim.Muon:
        module = nn.Sequential(nn.Linear(WIDTH, 40, bias=False), nn.Linear(40, WIDTH, bias=False)).bfloat16()
    else:
        module = net()
    start = copy.deepcopy(module)
    model, optim = built(sync, kind, module=module, **options)
    train(model, optim, range(3))
    state, weights = copy.deepcopy(optim.state_dict()), copy.deepcopy(model.state_dict())
    train(model, optim, range(3, 6))
    again, resumed = built(sync, kind, module=start, **options)
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    train(again, resumed, range(3, 6))
    return (
        [param.float().numpy() for param in map(torch.Tensor.detach, model.parameters())],
        all(equal(model.parameters(), again.parameters())),
    )


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Muon])
def test_stochastic_rounding_is_the_same_on_all_ranks_and_resumed(pool, kind):
    runs = {
        (sync, size): pool(size, "paceline").run(rounded, sync, kind)
        for sync, size in [("bucketed", 1), ("bucketed", 2), ("sharded", 2)]
    }
    for found in runs.values():
        assert all(resumed for _, resumed in found)
        for params, _ in found[1:]:
            assert all((a == b).all() for a, b in zip(params, found[0][0], strict=True))
    whole = [("bucketed", 1), ("bucketed", 2), *([("sharded", 2)] if kind is torch.optim.Muon else [])]
    for place in whole[1:]:
        for ours, theirs in zip(runs[place][0][0], runs[whole[0]][0][0], strict=True):
            assert (ours == theirs).all()
