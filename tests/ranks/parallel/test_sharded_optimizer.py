"""The sharded optimizer: each rank holds 1/N of the state, and updates equal those of the whole optimizer."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import model_zoo
import paceline
from model_zoo import max_difference
from paceline.errors import UsageError
from paceline.parallel.gradient_collectives import Comm

ADAMW = {"lr": 0.02, "weight_decay": 0.05}


def train(model, optim, rank, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step)
        x = torch.randn(12, model_zoo.WIDTH, generator=generator, dtype=torch.float64)
        y = torch.randn(12, 1, generator=generator, dtype=torch.float64)
        size = model.comm.size
        x, y = x.chunk(size)[rank], y.chunk(size)[rank]
        model.backward(model_zoo.loss_of(model, "Plain", x, y), samples=len(x))
        optim.step()
        optim.zero_grad()


def build(kind, group=None, sync="sharded", **options):
    model = paceline.DataParallel(model_zoo.build("Plain"), sync=sync, group=group)
    return model, paceline.ShardedOptimizer(model, kind, **options)


def state_numel(rank, size):
    model, optim = build(torch.optim.AdamW, **ADAMW)
    train(model, optim, rank, range(2))
    held = sum(
        value.numel()
        for parts in optim.state_dict()["shards"].values()
        for part in parts
        for key, value in part["state"].items()
        if key == "exp_avg"
    )
    return held, sum(param.numel() for param in model.parameters())


def test_every_rank_holds_its_part_of_the_state(pool):
    held, total = zip(*pool(3).run(state_numel), strict=True)
    assert sum(held) == total[0]
    assert max(held) <= total[0] / 3 + 64  # shards are padded to whole cache lines


def regroup(rank, size, first, second):
    """Train 3 steps on `first` ranks, carry the state to `second` ranks, train 3 more; compare with one run."""
    groups = {n: dist.new_group(list(range(n))) for n in (first, second)}
    states, weights = None, None
    if rank < first:
        model, optim = build(torch.optim.AdamW, group=groups[first], **ADAMW)
        train(model, optim, rank, range(3))
        states, weights = optim.state_dict(), [param.detach().clone() for param in model.parameters()]
    box = [None] * size
    dist.all_gather_object(box, (states, weights))
    if rank >= second:
        return 0.0
    model, optim = build(torch.optim.AdamW, group=groups[second], **ADAMW)
    with torch.no_grad():
        for param, value in zip(model.parameters(), box[0][1], strict=True):
            param.copy_(value)
    merged = {"param_groups": box[0][0]["param_groups"], "shards": {}}
    for state, _ in box[:first]:
        for name, parts in state["shards"].items():
            merged["shards"].setdefault(name, []).extend(parts)
    optim.load_state_dict(merged)
    train(model, optim, rank, range(3, 6))
    reference = paceline.DataParallel(model_zoo.build("Plain"), group=groups[second], sync="naive")
    other = torch.optim.AdamW(reference.parameters(), **ADAMW)
    train(reference, other, rank, range(6))
    return max_difference(model.parameters(), reference.parameters())


@pytest.mark.parametrize(("first", "second"), [(2, 2), (2, 3), (3, 2)])
def test_state_is_resharded_to_any_number_of_ranks(pool, first, second):
    assert all(gap < 1e-12 for gap in pool(3).run(regroup, first, second))


def part_of_the_state(rank, size):
    model, optim = build(torch.optim.AdamW, **ADAMW)
    train(model, optim, rank, range(1))
    state = optim.state_dict()
    fewer = {name: parts for name, parts in state["shards"].items()}
    fresh, other = build(torch.optim.AdamW, **ADAMW)
    if rank == 0:
        name = next(name for name, parts in fewer.items() if parts[0]["stop"] - parts[0]["start"] > 1)
        fewer[name] = [{**fewer[name][0], "stop": fewer[name][0]["start"] + 1}]
    other.load_state_dict({**state, "shards": fewer})
    return fresh, other


def incomplete_state(rank, size):
    model, other = part_of_the_state(rank, size)
    x, y = torch.ones(2, model_zoo.WIDTH, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
    model.backward(model_zoo.loss_of(model, "Plain", x, y), samples=2)
    if rank == 0:
        with pytest.raises(UsageError, match="covers 1 of"):
            other.step()


def test_a_missing_part_of_the_state_is_named(pool):
    pool(2).run(incomplete_state)


def options_are_restored(rank, size, sync):
    _, optim = build(torch.optim.SGD, sync=sync, lr=0.1)
    optim.param_groups[0]["lr"] = 0.025
    _, other = build(torch.optim.SGD, sync=sync, lr=0.1)
    other.load_state_dict(optim.state_dict())
    return other.param_groups[0]["lr"]


@pytest.mark.parametrize("sync", ["sharded", "bucketed"])
def test_options_are_restored_with_the_state(pool, sync):
    assert pool(2).run(options_are_restored, sync) == [0.025, 0.025]


def another_layout(rank, size, name, first, second):
    """Train on as one optimizer and as another one that loaded its state; return whether they agree to the bit."""

    def made(sync):
        model = paceline.DataParallel(model_zoo.build(name).to(torch.float64), sync=sync)
        groups = [{"params": [param]} for param in model.parameters() if param.requires_grad]
        return model, paceline.ShardedOptimizer(model, torch.optim.AdamW, groups, **ADAMW)

    def step(model, optim, number):
        generator = torch.Generator().manual_seed(100 * number + rank)
        x = torch.randn(4, model_zoo.WIDTH, generator=generator, dtype=torch.float64)
        y = torch.randn(4, 1, generator=generator, dtype=torch.float64)
        model.backward(model_zoo.loss_of(model, name, x, y), samples=4)
        optim.step()
        optim.zero_grad()

    model, optim = made(first)
    for number in range(3):
        step(model, optim, number)
    optim.param_groups[0]["lr"] = 0.005
    other, loaded = made(second)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    loaded.load_state_dict(copy.deepcopy(optim.state_dict()))
    for number in range(3, 6):
        step(model, optim, number)
        step(other, loaded, number)
    assert loaded.param_groups[0]["lr"] == 0.005
    return [torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)]


@pytest.mark.parametrize(("first", "second"), [("sharded", "bucketed"), ("bucketed", "sharded")])
@pytest.mark.parametrize("name", ["Plain", "Strided", "Unused"])
def test_a_state_is_taken_up_in_another_layout(pool, name, first, second):
    for equal in pool(2, "paceline").run(another_layout, name, first, second):
        assert all(equal)


def shards_that_leave_some_out(rank, size):
    model, sharded = build(torch.optim.AdamW, **ADAMW)
    train(model, sharded, rank, range(1))
    state = sharded.state_dict()
    for name in state["shards"]:
        state["shards"][name] = [{"start": 0, "stop": 1, "state": {"exp_avg": torch.zeros(1)}}]
    _, whole = build(torch.optim.AdamW, sync="bucketed", **ADAMW)
    with pytest.raises(UsageError, match="covers 1 of"):
        whole.load_state_dict(state)
    with pytest.raises(UsageError, match="parameter groups"):
        whole.load_state_dict({**state, "param_groups": []})


def test_shards_that_are_missing_on_all_ranks_are_named(pool):
    pool(2).run(shards_that_leave_some_out)


class FailingSGD(torch.optim.SGD):
    fails = False

    def step(self, closure=None):
        if self.fails:
            raise ArithmeticError("an update that fails")
        return super().step(closure)


def after_a_step_given_up(rank, size):
    model, optim = build(FailingSGD, lr=0.1)
    train(model, optim, rank, range(1))
    FailingSGD.fails = True
    x, y = torch.ones(2, model_zoo.WIDTH, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
    model.backward(model_zoo.loss_of(model, "Plain", x, y), samples=2)
    if rank == 0:
        with pytest.raises(ArithmeticError):
            optim.step()  # its receives are posted, and rank 1 never sends
    FailingSGD.fails = False
    again, other = build(torch.optim.AdamW, **ADAMW)
    train(again, other, rank, range(3))
    reference, plain = build(torch.optim.AdamW, sync="naive", **ADAMW)
    train(reference, plain, rank, range(3))
    return max_difference(again.parameters(), reference.parameters())


def test_messages_of_a_step_given_up_do_not_reach_the_next_model(pool):
    assert all(gap < 1e-12 for gap in pool(2).run(after_a_step_given_up))


def groups_and_schedule(rank, size, sync):
    def optimizer(model, make):
        named = list(model.named_parameters())
        groups = [
            {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.3},
            {"params": [p for n, p in named if not n.endswith("weight")], "lr": 0.001, "weight_decay": 0.0},
        ]
        return make(groups)

    model = paceline.DataParallel(model_zoo.build("Plain"), sync=sync)
    optim = optimizer(
        model, lambda groups: paceline.ShardedOptimizer(model, torch.optim.AdamW, groups, lr=0.02)
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optim, 0.5)
    reference = paceline.DataParallel(model_zoo.build("Plain"), sync="naive")
    other = optimizer(reference, lambda groups: torch.optim.AdamW(groups, lr=0.02))
    theirs = torch.optim.lr_scheduler.ExponentialLR(other, 0.5)
    for step in range(4):
        train(model, optim, rank, [step])
        train(reference, other, rank, [step])
        schedule.step(), theirs.step()
    same_rate = optim.param_groups[0]["lr"] == other.param_groups[0]["lr"]
    return max_difference(model.whole_parameters(), reference.parameters()), same_rate


@pytest.mark.parametrize("sync", ["sharded", "bucketed", "full-shard"])
def test_parameter_groups_and_schedulers_work(pool, sync):
    for gap, same in pool(2).run(groups_and_schedule, sync):
        assert gap < 1e-12
        assert same


def every_elementwise(rank, size):
    gaps = {}
    for name in (
        "SGD",
        "Adam",
        "AdamW",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Adagrad",
        "Adadelta",
        "Adamax",
        "ASGD",
        "Rprop",
    ):
        kind = getattr(torch.optim, name)
        model, optim = build(kind, lr=0.01)
        train(model, optim, rank, range(3))
        reference = paceline.DataParallel(model_zoo.build("Plain"), sync="naive")
        train(reference, kind(reference.parameters(), lr=0.01), rank, range(3))
        gaps[name] = max_difference(model.parameters(), reference.parameters())
    return gaps


def test_any_elementwise_optimizer(pool):
    for gaps in pool(2).run(every_elementwise):
        assert {name: gap for name, gap in gaps.items() if not gap < 1e-9} == {}
        assert len(gaps) == 11


def refused(rank, size):
    for name in ("Adafactor", "LBFGS", "Muon"):
        kind = getattr(torch.optim, name, None)
        if kind is not None:
            with pytest.raises(UsageError, match="not elementwise"):
                build(kind, lr=0.01)
    with pytest.raises(UsageError, match="rejects its options"):
        build(torch.optim.AdamW, learning_rate=0.1)
    with pytest.raises(UsageError, match="wrap the model"):
        paceline.ShardedOptimizer(model_zoo.build("Plain"), torch.optim.AdamW)
    model = paceline.DataParallel(model_zoo.build("Plain"), sync="sharded")
    with pytest.raises(
        UsageError, match=r"ShardedOptimizer\(model, SGD, ...\): that is not an optimizer class"
    ):
        paceline.ShardedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="not one of the model's"):
        paceline.ShardedOptimizer(model, torch.optim.AdamW, [torch.nn.Parameter(torch.zeros(3))])


def test_unshardable_optimizers_are_refused(pool):
    pool(2).run(refused)


def with_closure(rank, size, sync):
    model, optim = build(torch.optim.SGD, sync=sync, lr=0.1)
    x, y = torch.ones(2, model_zoo.WIDTH, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)

    def closure():
        optim.zero_grad()
        loss = model_zoo.loss_of(model, "Plain", x, y)
        model.backward(loss, samples=2)
        return loss

    first = optim.step(closure).item()
    return first, optim.step(closure).item()


@pytest.mark.parametrize("sync", ["sharded", "bucketed"])
def test_a_closure_is_evaluated_and_its_loss_returned(pool, sync):
    for first, second in pool(2).run(with_closure, sync):
        assert second < first


def by_collectives(rank, size):
    """Train with gloo's own reduce-scatter and all-gather, as it must where gradients are on a GPU."""
    reference, other = build(torch.optim.AdamW, **ADAMW)
    train(reference, other, rank, range(3))
    with mock.patch.object(Comm, "_by_backend", return_value=True):
        model, optim = build(torch.optim.AdamW, **ADAMW)
        train(model, optim, rank, range(3))
    return max_difference(model.parameters(), reference.parameters())


def test_gloos_own_collectives_do_for_shards(pool):
    assert max(pool(3).run(by_collectives)) <= 1e-12
