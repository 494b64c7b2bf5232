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
from paceline.errors import SyncError, UsageError
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.sharding import sharded_layout
from paceline.parallel.strategy import STRATEGIES

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


def trims(rank, size):
    with mock.patch("paceline.parallel.engine.reducer.return_freed_memory") as trim:
        model, optim = build(torch.optim.AdamW, lr=0.02)
        counts = []
        for step in range(3):
            train(model, optim, rank, [step])
            counts.append(trim.call_count)
    return counts


def test_what_the_first_step_has_freed_is_returned_once_at_the_next_forward(pool):
    assert pool(2).run(trims) == [[0, 1, 1]] * 2


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


def merged(states):
    """Return the shards of all ranks in one state."""
    shards = {}
    for state in states:
        for name, parts in state["shards"].items():
            shards.setdefault(name, []).extend(parts)
    return {"param_groups": states[0]["param_groups"], "shards": shards}


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
    optim.load_state_dict(merged([state for state, _ in box[:first]]))
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
    with pytest.raises(UsageError, match="covers 1 of") as raised:
        other.step()
    assert raised.value.rank == 0  # whose state is incomplete


def test_a_missing_part_of_the_state_is_named_on_all_ranks(pool):
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
    for name, reason in [("LBFGS", "closure")]:
        kind = getattr(torch.optim, name, None)
        if kind is not None:
            with pytest.raises(UsageError, match=f"can't update parameters on different ranks: .*{reason}"):
                build(kind, lr=0.01)
    with pytest.raises(UsageError, match="AssertionError: If capturable=True"):
        build(torch.optim.AdamW, lr=0.01, capturable=True)
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


# ------------------------------------------------------------------ state that an optimizer keeps in its groups


class CountingSGD(torch.optim.SGD):
    """Divides its step by a count, which it keeps in each group: as a number, a tensor and the length of a list."""

    @torch.no_grad()
    def step(self, closure=None, *, calls=None):
        if calls is not None:
            calls.append(len(self.param_groups))
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group.setdefault("tensor_count", torch.zeros(())).add_(1)
            group.setdefault("list_count", []).append(None)
            count = (group["count"] + float(group["tensor_count"]) + len(group["list_count"])) / 3
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / count)


EACH_PARAMETER = paceline.Sync(bucket_mib=0, shard="optimizer")


def grouped(kind, sync, group=None, **options):
    """Return a model and an optimizer with two groups; one has a single element, so that some ranks hold none of it."""
    model = paceline.DataParallel(model_zoo.build("Plain"), sync=sync, group=group)
    layers = [param for name, param in model.named_parameters() if "scale" not in name]
    groups = [{"params": layers}, {"params": [model.module.scale], "lr": 0.01}]
    return model, paceline.ShardedOptimizer(model, kind, groups, **options)


def counts(optim):
    return [
        (group["count"], float(group["tensor_count"]), len(group["list_count"]))
        for group in optim.param_groups
    ]


def one_inner_optimizer_each(nbytes, **_):
    return [[index] for index in range(len(nbytes))]


def count_in_groups(rank, size, several):
    with mock.patch.object(
        sharded_layout, "update_parts", one_inner_optimizer_each if several else sharded_layout.update_parts
    ):
        model, optim = grouped(CountingSGD, EACH_PARAMETER if several else "sharded", lr=0.1)
        reference, plain = grouped(CountingSGD, "naive", lr=0.1)
        rate = torch.optim.lr_scheduler.ExponentialLR(optim, 0.9)
        other_rate = torch.optim.lr_scheduler.ExponentialLR(plain, 0.9)
        for step in range(5):
            train(model, optim, rank, [step])
            train(reference, plain, rank, [step])
            rate.step(), other_rate.step()
    return max_difference(model.parameters(), reference.parameters()), counts(optim)


@pytest.mark.parametrize("several", [False, True], ids=["one inner optimizer", "one per parameter"])
def test_state_in_param_groups_survives_every_step(pool, several):
    for gap, held in pool(3).run(count_in_groups, several):
        assert gap < 1e-12
        assert held == [(5, 5.0, 5)] * 2


def counts_carried_over(rank, size, first, second):
    """Train 3 steps with `first`, carry the state to `second`, train 3 more; compare with an unbroken run."""
    model, optim = grouped(CountingSGD, first, lr=0.1)
    train(model, optim, rank, range(3))
    other, loaded = grouped(CountingSGD, second, lr=0.1)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    state = copy.deepcopy(optim.state_dict())
    loaded.load_state_dict(state)
    train(other, loaded, rank, range(3, 6))
    reference, plain = grouped(CountingSGD, "naive", lr=0.1)
    train(reference, plain, rank, range(6))
    assert (
        state["param_groups"][0]["list_count"] == [None] * 3
    )  # the program's own copy stays as it was saved
    return max_difference(other.parameters(), reference.parameters()), counts(loaded)


@pytest.mark.parametrize(
    ("first", "second"), [("sharded", "sharded"), ("sharded", "bucketed"), ("bucketed", "sharded")]
)
def test_state_in_param_groups_is_saved_and_loaded(pool, first, second):
    for gap, held in pool(2).run(counts_carried_over, first, second):
        assert gap < 1e-12
        assert held == [(6, 6.0, 6)] * 2


def counts_on_more_ranks(rank, size):
    few = dist.new_group([0, 1])
    states = None
    if rank < 2:
        model, optim = grouped(CountingSGD, "sharded", few, lr=0.1)
        train(model, optim, rank, range(3))
        states = model.state_dict(), optim.state_dict()
    box = [None] * size
    dist.all_gather_object(box, states)
    other, loaded = grouped(CountingSGD, "sharded", lr=0.1)
    other.load_state_dict(box[0][0])
    loaded.load_state_dict(merged([state for _, state in box[:2]]))
    train(other, loaded, rank, range(3, 6))
    reference, plain = grouped(CountingSGD, "naive", lr=0.1)
    train(reference, plain, rank, range(6))
    return max_difference(other.parameters(), reference.parameters()), counts(loaded)


def test_state_in_param_groups_is_the_same_on_another_number_of_ranks(pool):
    for gap, held in pool(3).run(counts_on_more_ranks):
        assert gap < 1e-12
        assert held == [(6, 6.0, 6)] * 2


def counts_with_changing_plans(rank, size):
    """Change the plan between steps, as the tuner does."""
    model, optim = grouped(CountingSGD, "bucketed", lr=0.1)
    for number, name in enumerate(["bucketed", "sharded", "bucketed", "sharded"]):
        if number:
            model.zero_grad()
            state = optim.gather_state()
            model.engine.change_plan(STRATEGIES[name])
            optim.resume_state(state)
        train(model, optim, rank, range(2 * number, 2 * number + 2))
    reference, plain = grouped(CountingSGD, "naive", lr=0.1)
    train(reference, plain, rank, range(8))
    return max_difference(model.parameters(), reference.parameters()), counts(optim)


def test_state_in_param_groups_moves_between_plans(pool):
    for gap, held in pool(2).run(counts_with_changing_plans):
        assert gap < 1e-12
        assert held == [(8, 8.0, 8)] * 2


def rate_in_a_tensor(rank, size):
    model, optim = build(torch.optim.SGD, lr=(rate := torch.tensor(0.1)), foreach=False)
    reference, plain = build(torch.optim.SGD, sync="naive", lr=0.1)
    for step in range(4):
        train(model, optim, rank, [step])
        train(reference, plain, rank, [step])
        rate.mul_(0.5)
        plain.param_groups[0]["lr"] *= 0.5
    return max_difference(model.parameters(), reference.parameters())


def test_a_learning_rate_tensor_is_read_in_every_step(pool):
    assert all(gap < 1e-7 for gap in pool(2).run(rate_in_a_tensor))


# ------------------------------------------------------------------ groups added later


def add_later(rank, size, sync, after):
    """Start with the weights, add the biases and the scale after some steps; as a plain optimizer with DDP."""

    def start(model, make):
        named = list(model.named_parameters())
        optim = make([param for name, param in named if name.endswith("weight")])
        later = [param for name, param in named if not name.endswith("weight")]
        return optim, {"params": later, "lr": 0.005, "weight_decay": 0.3}

    model = paceline.DataParallel(model_zoo.build("Plain"), sync=sync)
    optim, later = start(
        model, lambda params: paceline.ShardedOptimizer(model, torch.optim.AdamW, params, lr=0.02)
    )
    ddp = torch.nn.parallel.DistributedDataParallel(model_zoo.build("Plain"))
    plain, other_later = start(ddp, lambda params: torch.optim.AdamW(params, lr=0.02))
    for step in range(4):
        if step == after:
            optim.add_param_group(later)
            plain.add_param_group(other_later)
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(6, model_zoo.WIDTH, generator=generator, dtype=torch.float64)
        y = torch.randn(6, 1, generator=generator, dtype=torch.float64)
        for net, each in ((model, optim), (ddp, plain)):
            model_zoo.loss_of(net, "Plain", x, y).backward()
            each.step()
            net.zero_grad()
    assert [len(group["params"]) for group in optim.param_groups] == [3, 4]
    return max_difference(model.whole_parameters(), ddp.parameters())


@pytest.mark.sweep
@pytest.mark.parametrize("after", [0, 2], ids=["before the first step", "after two steps"])
@pytest.mark.parametrize("sync", ["sharded", "bucketed", "full-shard"])
def test_a_group_is_added_at_any_time(pool, sync, after):
    assert all(gap < 1e-13 for gap in pool(2).run(add_later, sync, after))


def foreign_parameters(rank, size, sync):
    model, optim = build(torch.optim.AdamW, sync=sync, **ADAMW)
    for steps in (range(1), range(1, 2)):
        with pytest.raises(
            UsageError, match=r"(?s)shape \[3, 5\] is not one of the model's.*wrapped"
        ) as raised:
            optim.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3, 5))]})
        assert raised.value.rank == rank
        assert len(optim.param_groups) == 1
        train(model, optim, rank, steps)
    reference, plain = build(torch.optim.AdamW, sync="naive", **ADAMW)
    train(reference, plain, rank, range(2))
    return max_difference(model.parameters(), reference.parameters())


@pytest.mark.parametrize("sync", ["sharded", "bucketed"])
def test_a_parameter_of_another_model_is_refused_at_any_time(pool, sync):
    assert all(gap < 1e-12 for gap in pool(2).run(foreign_parameters, sync))


# ------------------------------------------------------------------ torch's own interface


class KwargSGD(torch.optim.SGD):
    """Needs an argument in step()."""

    def step(self, closure=None, scale=1.0, seen=None):
        seen.append(scale)
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.mul_(scale)
        return super().step(closure)


def step_arguments(rank, size, sync):
    model, optim = build(KwargSGD, sync=sync, lr=0.1)
    x, y = torch.ones(2, model_zoo.WIDTH, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
    before = [param.detach().clone() for param in model.parameters()]

    def closure():
        optim.zero_grad()
        loss = model_zoo.loss_of(model, "Plain", x, y)
        model.backward(loss, samples=2)
        return loss

    seen = []
    closure()
    optim.step(scale=0.0, seen=seen)
    assert max_difference(model.parameters(), before) == 0.0
    assert optim.step(closure, scale=1.0, seen=seen).item() > 0
    assert max_difference(model.parameters(), before) > 0
    return seen


class ClippedKwargSGD(KwargSGD):
    """Is not elementwise, which a trial without arguments can't show."""

    def step(self, closure=None, seen=None):
        for group in self.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 0.1)
        return super().step(closure, seen=seen)


def refused_in_step(rank, size):
    model, optim = build(ClippedKwargSGD, lr=0.1)
    x, y = torch.ones(2, model_zoo.WIDTH, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
    before = [param.detach().clone() for param in model.parameters()]
    for arguments in ({}, {"seen": []}):
        model.backward(model_zoo.loss_of(model, "Plain", x, y), samples=2)
        with pytest.raises(UsageError, match="ClippedKwargSGD can't update parameters on different ranks"):
            optim.step(**arguments)
        optim.zero_grad()
    return max_difference(model.parameters(), before)


def test_an_optimizer_that_needs_arguments_is_tried_in_its_first_step(pool):
    assert pool(2).run(refused_in_step) == [0.0, 0.0]


@pytest.mark.parametrize("sync", ["sharded", "bucketed"])
def test_arguments_of_step_reach_the_optimizer(pool, sync):
    assert pool(2).run(step_arguments, sync) == [[0.0, 1.0]] * 2


def wrong_params(rank, size, sync):
    model = paceline.DataParallel(model_zoo.build("Plain"), sync=sync)
    own = list(model.parameters())
    for params, error in [
        (own[1], TypeError),
        (1.2, TypeError),
        ([], ValueError),
        ([*own, 42], TypeError),
        ([{"params": own[:2]}, {"params": own[1:]}], ValueError),
    ]:
        with pytest.raises(error):
            paceline.ShardedOptimizer(model, torch.optim.SGD, params, lr=0.1)
    named = paceline.ShardedOptimizer(model, torch.optim.SGD, model.named_parameters(), lr=0.1)
    train(model, named, rank, range(2))
    assert len(named.state_dict()["param_groups"][0]["param_names"]) == len(own)


@pytest.mark.parametrize("sync", ["sharded", "bucketed"])
def test_params_are_checked_as_by_torch(pool, sync):
    pool(2).run(wrong_params, sync)


class TwoDtypes(torch.nn.Module):
    """A float32 layer and a bfloat16 one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.wide, self.narrow = torch.nn.Linear(6, 9), torch.nn.Linear(9, 5).bfloat16()

    def forward(self, x):
        return self.narrow(torch.tanh(self.wide(x)).bfloat16()).float()


def two_dtypes(rank, size, name):
    found = {}
    for sync in ("sharded", "bucketed"):
        model = paceline.DataParallel(TwoDtypes(), sync=sync)
        optim = paceline.ShardedOptimizer(model, getattr(torch.optim, name), lr=0.01)
        for step in range(4):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step * 10 + rank))
            model(x).square().mean().backward()
            optim.step()
            optim.zero_grad()
        found[sync] = [param.detach().clone() for param in model.parameters()]
    return all(torch.equal(a, b) for a, b in zip(*found.values(), strict=True))


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_parameters_of_two_dtypes_train_as_unsharded(pool, name):
    assert pool(2, "paceline").run(two_dtypes, name) == [True, True]


class SparseWeight(torch.nn.Module):
    """A parameter stored as a sparse tensor."""

    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Parameter(torch.ones(3))
        self.thin = torch.nn.Parameter(torch.eye(3).to_sparse())


def sparse_weight(rank, size):
    for sync in ("sharded", "bucketed"):
        with pytest.raises(UsageError, match=r"parameter 'thin' is stored sparse"):
            paceline.DataParallel(SparseWeight(), sync=sync)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sparse_parameter_is_refused(pool, ranks):
    pool(ranks).run(sparse_weight)


# ------------------------------------------------------------------ torch's format of the state


def to_torch_and_back(rank, size, name, kind_name, between):
    """Train 3 steps sharded, 3 with torch's DDP and plain optimizer, 3 sharded on `between` ranks more or fewer."""
    kind = getattr(torch.optim, kind_name)
    few = dist.new_group([0, 1])

    def step(net, optim, number, ranks):
        for index in ranks if isinstance(ranks, range) else [rank]:
            generator = torch.Generator().manual_seed(100 * number + index)
            x = torch.randn(4, model_zoo.WIDTH, generator=generator, dtype=torch.float64)
            y = torch.randn(4, 1, generator=generator, dtype=torch.float64)
            (model_zoo.loss_of(net, name, x, y) / (len(ranks) if isinstance(ranks, range) else 1)).backward()
        optim.step()
        optim.zero_grad()

    def sharded(group=None):
        model = paceline.DataParallel(model_zoo.build(name).to(torch.float64), sync="sharded", group=group)
        groups = [{"params": [param]} for param in model.parameters() if param.requires_grad]
        return model, paceline.ShardedOptimizer(model, kind, groups, lr=0.01)

    # sharded, all ranks
    model, optim = sharded()
    for number in range(3):
        step(model, optim, number, None)
    optim.consolidate_state_dict(to=size - 1)
    assert ("state" in optim.state_dict()) == (rank == size - 1)
    box = [copy.deepcopy([model.state_dict(), optim.state_dict()]) if rank == size - 1 else None]
    dist.broadcast_object_list(box, src=size - 1)

    # plain, one process for all
    net = model_zoo.build(name).to(torch.float64)
    plain = kind([{"params": [param]} for param in net.parameters() if param.requires_grad], lr=0.01)
    net.load_state_dict({key.removeprefix("module."): value for key, value in box[0][0].items()})
    plain.load_state_dict(box[0][1])
    for number in range(3, 6):
        step(net, plain, number, range(size))

    # sharded again, on other ranks
    reference_net = model_zoo.build(name).to(torch.float64)
    reference = kind(
        [{"params": [param]} for param in reference_net.parameters() if param.requires_grad], lr=0.01
    )
    for number in range(9):
        step(reference_net, reference, number, range(size) if number < 6 else range(between))
    if rank >= between:
        return 0.0
    again, last = sharded(few if between == 2 else None)
    again.load_state_dict({f"module.{key}": value for key, value in net.state_dict().items()})
    last.load_state_dict(plain.state_dict())
    for number in range(6, 9):
        step(again, last, number, None)
    return max_difference(again.parameters(), reference_net.parameters())


@pytest.mark.sweep
@pytest.mark.parametrize("between", [2, 3])
@pytest.mark.parametrize("kind", ["AdamW", "NAdam", "SGD"])
@pytest.mark.parametrize("name", ["Plain", "Strided", "Unused"])
def test_the_state_goes_to_torchs_optimizer_and_back(pool, name, kind, between):
    # On loading, torch rounds NAdam's product of momenta to the parameters' dtype.
    assert max(pool(3).run(to_torch_and_back, name, kind, between)) < (1e-10 if kind == "NAdam" else 1e-12)


def consolidate_at_any_time(rank, size, sync):
    """Before the first step, after one, after a load, and not any more after a step."""
    model, optim = build(torch.optim.AdamW, sync=sync, **ADAMW)
    plain = torch.optim.AdamW(model_zoo.build("Plain").parameters(), **ADAMW)
    optim.consolidate_state_dict()
    if rank == 0:
        assert optim.state_dict()["state"] == {}
        plain.load_state_dict(optim.state_dict())
    train(model, optim, rank, range(2))
    optim.consolidate_state_dict()
    box = [copy.deepcopy(optim.state_dict()) if rank == 0 else None]
    dist.broadcast_object_list(box)
    plain.load_state_dict(box[0])
    assert len(plain.state) == len(list(model.parameters()))
    train(model, optim, rank, range(2, 3))
    assert ("shards" in optim.state_dict()) == (sync == "sharded")

    fresh, other = build(torch.optim.AdamW, sync=sync, **ADAMW)
    other.load_state_dict(box[0])
    other.consolidate_state_dict()
    if rank == 0:
        for one, two in zip(other.state_dict()["state"].values(), box[0]["state"].values(), strict=True):
            assert all(torch.equal(one[key], two[key]) for key in two)
    return type(fresh.engine).__name__


@pytest.mark.parametrize("sync", ["sharded", "bucketed"])
def test_the_state_is_consolidated_at_any_time(pool, sync):
    pool(2).run(consolidate_at_any_time, sync)


def states_that_do_not_fit(rank, size):
    model, optim = build(torch.optim.AdamW, **ADAMW)
    plain = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3, 5))], **ADAMW)
    with pytest.raises(UsageError, match="group 0 has 1 parameters in the state, 7 in this optimizer"):
        optim.load_state_dict(plain.state_dict())
    other = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3, 5)) for _ in range(7)], **ADAMW)
    for param in other.param_groups[0]["params"]:
        param.grad = torch.ones(3, 5)
    other.step()
    with pytest.raises(UsageError, match=r"'exp_avg' has shape \[3, 5\], its parameter \[\]"):
        optim.load_state_dict(other.state_dict())
    train(model, optim, rank, range(2))
    reference, whole = build(torch.optim.AdamW, sync="naive", **ADAMW)
    train(reference, whole, rank, range(2))
    return max_difference(model.parameters(), reference.parameters())


def test_a_state_of_another_model_is_refused_and_changes_nothing(pool):
    assert max(pool(2).run(states_that_do_not_fit)) < 1e-12


def momentum_in_the_group(rank, size):
    """Save and resume where only the group's options make the optimizer keep a state."""
    states = []
    for resumed in (False, True):
        model = paceline.DataParallel(model_zoo.build("Plain"), sync="sharded")
        groups = [{"params": list(model.parameters()), "momentum": 0.9}]
        optim = paceline.ShardedOptimizer(model, torch.optim.SGD, groups, lr=0.05)
        if resumed:
            model.load_state_dict(states[0])
            optim.load_state_dict(states[1])
            train(model, optim, rank, range(3, 6))
            return max_difference(model.parameters(), states[2])
        train(model, optim, rank, range(3))
        optim.consolidate_state_dict()
        box = [copy.deepcopy(optim.state_dict()) if rank == 0 else None]
        dist.broadcast_object_list(box)
        states += [copy.deepcopy(model.state_dict()), box[0]]
        train(model, optim, rank, range(3, 6))
        states.append([param.detach().clone() for param in model.parameters()])
    return None


def test_a_state_due_to_options_of_a_group_is_gathered_and_cut(pool):
    assert max(pool(2).run(momentum_in_the_group)) < 1e-12


# ------------------------------------------------------------------ optimizers that treat parameters by size


class LargeInBlocks(torch.optim.SGD):
    """Keeps one number per 64 elements in the state of what is large, as 8-bit optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.numel() >= 5000:
                    self.state[param]["absmax"] = torch.zeros(-(-param.numel() // 64))
        return super().step(closure)


def large_in_blocks(rank, size):
    """The shard of rank 0 lies in a large parameter, the shard of rank 1 in small ones."""
    torch.manual_seed(0)
    small = [torch.nn.Linear(40, 40, bias=False) for _ in range(5)]
    model = paceline.DataParallel(
        torch.nn.Sequential(*small, torch.nn.Linear(40, 200, bias=False)), sync="sharded"
    )
    optim = paceline.ShardedOptimizer(model, LargeInBlocks, lr=0.1)
    model(torch.ones(1, 40)).sum().backward()
    with pytest.raises(
        UsageError, match=r"'5.weight': for 8000 elements, 'absmax' has shape \[125\]"
    ) as raised:
        optim.step()
    return raised.value.rank


def test_a_state_unlike_the_trials_is_refused_on_all_ranks(pool):
    assert pool(2).run(large_in_blocks) == [0, 0]


class SparseGradients(torch.nn.Module):
    """An embedding whose gradient is sparse from a given step on."""

    def __init__(self, begin):
        super().__init__()
        self.table = torch.nn.Parameter(torch.ones(5, 3))
        self.begin, self.calls = begin, -1

    def forward(self, index):
        self.calls += 1
        return torch.nn.functional.embedding(index, self.table, sparse=self.calls >= self.begin)


def sparse_gradient(rank, size, sync):
    model = paceline.DataParallel(SparseGradients(begin=0), sync=sync)
    loss = model(torch.tensor([rank, 2])).sum()
    with pytest.raises(SyncError, match="parameter 'table' has a sparse gradient"):
        model.backward(loss)


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("sync", ["sharded", "bucketed"])
def test_a_sparse_gradient_is_refused(pool, sync, ranks):
    pool(ranks).run(sparse_gradient, sync)


def sparse_later(rank, size, sync):
    tables = []
    for begin in (2, 99):
        model = paceline.DataParallel(SparseGradients(begin), sync=sync)
        optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        for _ in range(4):
            model.backward(model(torch.tensor([rank, 2])).sum())
            optim.step()
            optim.zero_grad()
        tables.append(model.module.table.detach())
    return torch.equal(*tables)


@pytest.mark.parametrize("sync", ["sharded", "bucketed"])
def test_a_sparse_gradient_in_a_bucket_counts_as_a_dense_one(pool, sync):
    assert pool(2).run(sparse_later, sync) == [True, True]


def between_kinds_of_sharding(rank, size, first, second, consolidate):
    """Resume after three of six steps with another strategy, from the state in torch's format or in shards."""
    model, optim = build(torch.optim.AdamW, sync=first, **ADAMW)
    train(model, optim, rank, range(3))
    if consolidate:
        optim.consolidate_state_dict()
        box = [copy.deepcopy(optim.state_dict()) if rank == 0 else None]
        dist.broadcast_object_list(box)
        (state,) = box
        plain = torch.optim.AdamW(model_zoo.build("Plain").parameters(), lr=0.5)
        plain.load_state_dict(copy.deepcopy(state))
        assert all(held["exp_avg"].shape == param.shape for param, held in plain.state.items())
    else:
        state = copy.deepcopy(optim.state_dict())
    net = model_zoo.build("Plain")
    with torch.no_grad():
        for param, value in zip(net.parameters(), model.whole_parameters(), strict=True):
            param.copy_(value)
    other = paceline.DataParallel(net, sync=second)
    loaded = paceline.ShardedOptimizer(other, torch.optim.AdamW, lr=0.5)
    loaded.load_state_dict(state)
    train(other, loaded, rank, range(3, 6))
    reference, whole = build(torch.optim.AdamW, sync="naive", **ADAMW)
    train(reference, whole, rank, range(6))
    return max_difference(other.whole_parameters(), reference.parameters())


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("first", "second", "consolidate"),
    [
        ("full-shard", "sharded", True),
        ("sharded", "full-shard", True),
        ("full-shard", "full-shard", True),
        ("sharded", "full-shard", False),
    ],
)
def test_the_state_moves_between_sharded_optimizer_and_sharded_parameters(pool, first, second, consolidate):
    assert max(pool(2).run(between_kinds_of_sharding, first, second, consolidate)) < 1e-12
