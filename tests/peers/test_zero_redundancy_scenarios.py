"""What torch's tests require of `ZeroRedundancyOptimizer`, required of `paceline.ShardedOptimizer`.

torch's tests are in test/distributed/optim/test_zero_redundancy_optimizer.py. These are programs of our own for the
same scenarios, on CPUs, those too that torch runs on GPUs only. `ShardedOptimizer` takes the wrapped model, whose
backward synchronises, where torch's takes parameters whose gradients the test reduces.

| torch's test | here |
|---|---|
| test_state_dict | test_state_dict |
| test_lr_scheduler (both) | test_lr_scheduler |
| test_step_with_kwargs | test_step_with_kwargs |
| test_step_with_extra_inner_key | test_step_with_extra_inner_key |
| test_step_without_closure | test_step_without_closure |
| test_zero_grad | test_zero_grad |
| test_constructor | test_constructor |
| test_same_dense_param_type | test_sparse_parameters_are_refused, test_two_dtypes [1] |
| test_step | test_step |
| test_step_with_closure | test_step_with_closure |
| test_sharding | test_sharding [2] |
| test_add_param_group | test_add_param_group |
| test_multiple_param_groups | test_multiple_param_groups |
| test_collect_shards | test_collect_shards |
| test_nondefault_process_group | test_nondefault_process_group |
| test_local_optimizer_parity | test_local_optimizer_parity |
| test_zero_join_cpu | test_uneven_inputs [3] |
| test_ddp_zero_overlap | test_overlap [4] |
| test_zero_join_gpu, test_zero_model_parallel | need several GPUs |

1. torch refuses dense parameters of two dtypes. They train exactly here.
2. Shards cut through parameters, so they are equal for parameters of any sizes.
3. There is no `Join`: a rank without data calls `model.backward(None, samples=0)`.
4. There is no hook to register: reduction, update and gathering always overlap.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import paceline

WORLDS = [1, 2]


class Number(nn.Module):
    """A single weight, which is its output."""

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.tensor([1.0]))

    def forward(self):
        return self.x.sum()


def number(optimizer, **options):
    model = paceline.DataParallel(Number(), sync="sharded")
    return model, paceline.ShardedOptimizer(model, optimizer, **options)


def layers(*widths):
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


def from_rank_0(value, rank, group=None):
    box = [value if rank == 0 else None]
    dist.broadcast_object_list(box, group=group)
    return box[0]


def assert_same(left, right, **tolerance):
    for one, other in zip(left.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(one, other, **tolerance)


# ------------------------------------------------------------------ the interface


def state_dict(rank, size):
    model, optim = number(torch.optim.SGD, lr=0.1, momentum=0.9)
    model().backward()
    optim.step()
    torch.testing.assert_close(model.module.x.detach(), torch.tensor([0.9]))
    optim.zero_grad()
    optim.consolidate_state_dict(to=0)
    state = from_rank_0(optim.state_dict(), rank)
    torch.testing.assert_close(state["state"][0]["momentum_buffer"], torch.tensor([1.0]))
    (group,) = state["param_groups"]
    expected = {"lr": 0.1, "momentum": 0.9, "nesterov": False, "weight_decay": 0.0, "dampening": 0.0}
    assert expected.items() <= group.items()
    assert all(optim.param_groups[0][key] == value for key, value in group.items() if key != "params")

    again = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=0.01)
    again.load_state_dict(state)
    assert again.param_groups[0]["lr"] == 0.1
    model().backward()
    again.step()
    torch.testing.assert_close(model.module.x.detach(), torch.tensor([0.71]))
    again.consolidate_state_dict(to=0)
    if rank == 0:
        held = again.state_dict()["state"][0]["momentum_buffer"]
        torch.testing.assert_close(held, torch.tensor([1.9]))


@pytest.mark.parametrize("ranks", WORLDS)
def test_state_dict(pool, ranks):
    pool(ranks).run(state_dict)


def lr_scheduler(rank, size):
    model, optim = number(torch.optim.SGD, lr=0.01)
    plain = Number()
    other = torch.optim.SGD(plain.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optim, 1)
    other_schedule = torch.optim.lr_scheduler.StepLR(other, 1)
    for _ in range(5):
        for each, net, its in ((optim, model, schedule), (other, plain, other_schedule)):
            each.zero_grad()
            net().backward()
            each.step()
            its.step()
        assert_same(model, plain)


@pytest.mark.parametrize("ranks", WORLDS)
def test_lr_scheduler(pool, ranks):
    pool(ranks).run(lr_scheduler)


class WithArgument(torch.optim.SGD):
    def step(self, closure=None, kwarg=None):
        super().step()
        kwarg.append(5)


class WithNewKey(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        self.param_groups[0]["new_key"] = 0.1


class WithoutClosure(torch.optim.SGD):
    def step(self):
        return super().step()


def step_of(rank, size, kind, arguments):
    """Return the weight after a step, and what the step has changed beside it."""
    model, optim = number(kind, lr=0.1)
    model().backward()
    optim.step(**arguments)
    return model.module.x.item(), arguments, optim.param_groups[0].get("new_key")


@pytest.mark.parametrize("ranks", WORLDS)
def test_step_with_kwargs(pool, ranks):
    for x, arguments, _ in pool(ranks).run(step_of, WithArgument, {"kwarg": []}):
        assert x == pytest.approx(0.9)
        assert arguments == {"kwarg": [5]}


@pytest.mark.parametrize("ranks", WORLDS)
def test_step_with_extra_inner_key(pool, ranks):
    for x, _, new_key in pool(ranks).run(step_of, WithNewKey, {}):
        assert x == pytest.approx(0.9)
        assert new_key == 0.1


@pytest.mark.parametrize("ranks", WORLDS)
def test_step_without_closure(pool, ranks):
    for x, _, _ in pool(ranks).run(step_of, WithoutClosure, {}):
        assert x == pytest.approx(0.9)


def zero_grad(rank, size):
    model = paceline.DataParallel(nn.Linear(1, 1), sync="sharded")
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    before = copy.deepcopy(model.module)
    model(torch.ones(1)).sum().backward()
    assert model.clip_grad_norm_(float("inf")) > 0
    optim.zero_grad()
    assert model.module.weight.grad is None
    assert model.module.bias.grad is None
    optim.step()
    assert_same(model.module, before, rtol=0, atol=0)


@pytest.mark.parametrize("ranks", WORLDS)
def test_zero_grad(pool, ranks):
    pool(ranks).run(zero_grad)


def constructor(rank, size):
    net = layers(5, 10, 10, 10)
    model = paceline.DataParallel(net, sync="sharded")
    for params, error in [
        ([], ValueError),
        (torch.randn(1), TypeError),
        (1.2, TypeError),
        ([*net.parameters(), 42], TypeError),
    ]:
        with pytest.raises(error):
            paceline.ShardedOptimizer(model, torch.optim.SGD, params, lr=0.01)
    for params, groups in [
        ([{"params": [layer.weight for layer in net]}, {"params": [layer.bias for layer in net]}], 2),
        (net.parameters(), 1),
        (list(net.parameters()), 1),
        (None, 1),
    ]:
        optim = paceline.ShardedOptimizer(model, torch.optim.SGD, params, lr=0.01)
        assert len(optim.param_groups) == groups
    decays = [
        {"params": [layer.weight for layer in net], "weight_decay": 0.0},
        {"params": [layer.bias for layer in net], "weight_decay": 0.01},
    ]
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, decays, lr=0.01, betas=(0.9, 0.99), eps=1e-8)
    assert [group["weight_decay"] for group in optim.param_groups] == [0.0, 0.01]
    assert all(group["betas"] == (0.9, 0.99) for group in optim.param_groups)


@pytest.mark.parametrize("ranks", WORLDS)
def test_constructor(pool, ranks):
    pool(ranks).run(constructor)


class OneSparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Parameter(torch.ones(1))
        self.sparse = nn.Parameter(torch.sparse_coo_tensor(size=(2, 3)))


def sparse(rank, size):
    with pytest.raises(ValueError, match="'sparse' is stored sparse"):
        paceline.DataParallel(OneSparse(), sync="sharded")
    model, _ = number(torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="not one of the model's"):
        paceline.ShardedOptimizer(model, torch.optim.SGD, [torch.sparse_coo_tensor(size=(2, 3))], lr=0.1)


@pytest.mark.parametrize("ranks", WORLDS)
def test_sparse_parameters_are_refused(pool, ranks):
    pool(ranks).run(sparse)


class TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3).double()

    def forward(self, x):
        return self.second(self.first(x).double())


def two_dtypes(rank, size):
    model, plain = paceline.DataParallel(TwoDtypes(), sync="sharded"), TwoDtypes()
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
    other = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(3):
        batches = torch.randn(size, 5, 4, generator=torch.Generator().manual_seed(step))
        model(batches[rank]).square().mean().backward()
        plain(batches.flatten(0, 1)).square().mean().backward()
        for each in (optim, other):
            each.step()
            each.zero_grad()
    assert_same(model, plain, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("ranks", WORLDS)
def test_two_dtypes(pool, ranks):
    pool(ranks).run(two_dtypes)


# ------------------------------------------------------------------ several ranks


def step(rank, size):
    net = nn.Linear(1, 1)
    nn.init.constant_(net.weight, 1.0)
    nn.init.constant_(net.bias, 2.0)
    model = paceline.DataParallel(copy.deepcopy(net), sync="sharded")
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=0.01)
    plain = torch.optim.SGD(net.parameters(), lr=0.01)
    x = torch.tensor([float(rank + 1)])
    model(x).backward(x)
    net(x).backward(x)
    for param in net.parameters():
        dist.all_reduce(param.grad)
        param.grad /= size
    optim.step()
    plain.step()
    assert_same(model, net)


def test_step(pool):
    pool(2).run(step)


def step_with_closure(rank, size):
    net = nn.Linear(1, 1)
    nn.init.constant_(net.weight, 1.0)
    nn.init.constant_(net.bias, 2.0)
    model = paceline.DataParallel(net, sync="sharded")
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    x = torch.tensor([rank + 1.0])
    target = x * 1.0 + 2.0 + 1.0

    def closure():
        optim.zero_grad()
        loss = nn.functional.l1_loss(model(x), target)
        loss.backward()
        return loss

    model(x).backward(x)  # dropped by the closure
    assert optim.step(closure=closure).item() == 1.0
    mean = (size + 1) / 2
    torch.testing.assert_close(net.weight.detach(), torch.tensor([[1.0 + 0.1 * mean]]))
    torch.testing.assert_close(net.bias.detach(), torch.tensor([2.1]))


def test_step_with_closure(pool):
    pool(2).run(step_with_closure)


class Columns(nn.Module):
    """Parameters of given lengths."""

    def __init__(self, lengths):
        super().__init__()
        self.columns = nn.ParameterList(torch.full((length, 1), 0.5) for length in lengths)

    def forward(self):
        return sum(column.square().sum() for column in self.columns)


def held_numel(optim):
    shards = optim.state_dict()["shards"].values()
    return sum(part["state"]["momentum_buffer"].numel() for parts in shards for part in parts)


def sharding(rank, size):
    model = paceline.DataParallel(Columns([900, 700, 500, 300] * size), sync="sharded")
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=0.01, momentum=0.9)
    model().backward()
    optim.step()
    return held_numel(optim)


def test_sharding(pool):
    held = pool(4).run(sharding)
    assert sum(held) == 4 * 2400
    assert max(held) <= 2400 + 64  # shards are whole cache lines


def add_param_group(rank, size, frozen):
    net = Columns([1000, 300, 500, 200, 600, 400])
    net.columns[0].requires_grad_(not frozen)
    model = paceline.DataParallel(net, sync="sharded")
    plain_net = copy.deepcopy(net)
    start, later = list(net.columns)[:-1], {"params": [net.columns[-1]], "lr": 0.02}
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, start, lr=0.01, momentum=0.9)
    plain = torch.optim.SGD(list(plain_net.columns)[:-1], lr=0.01, momentum=0.9)
    for number_of_steps, (each, group) in enumerate(
        [(optim, later), (plain, {"params": [plain_net.columns[-1]], "lr": 0.02})]
    ):
        assert len(each.param_groups) == 1
        each.add_param_group(group)
        assert len(each.param_groups) == 2
        for _ in range(2):
            (model if number_of_steps == 0 else plain_net)().backward()
            each.step()
            each.zero_grad()
    assert_same(model, plain_net)
    return held_numel(optim)


@pytest.mark.parametrize("frozen", [False, True], ids=["all trainable", "first frozen"])
def test_add_param_group(pool, frozen):
    held = pool(2).run(add_param_group, frozen)
    total = 3000 - (1000 if frozen else 0)
    assert sum(held) == total
    assert max(held) <= total / 2 + 64


def multiple_param_groups(rank, size):
    torch.manual_seed(0)
    net = layers(5, 10, 10, 5)

    def decays(layers_of):
        return [
            {"params": [layer.weight for layer in layers_of], "weight_decay": 0.0},
            {"params": [layer.bias for layer in layers_of], "weight_decay": 0.01},
        ]

    upfront = paceline.DataParallel(copy.deepcopy(net), sync="sharded")
    optim1 = paceline.ShardedOptimizer(upfront, torch.optim.AdamW, decays(upfront.module), lr=0.01)
    added = paceline.DataParallel(copy.deepcopy(net), sync="sharded")
    first, second = decays(added.module)
    optim2 = paceline.ShardedOptimizer(added, torch.optim.AdamW, [first], lr=0.01)
    optim2.add_param_group(second)
    optim3 = torch.optim.AdamW(decays(net), lr=0.01)
    for _ in range(3):
        x = torch.randn(8, 5)
        for each, optim in ((upfront, optim1), (added, optim2), (net, optim3)):
            optim.zero_grad()
            each(x).sum().backward()
            optim.step()
        assert_same(upfront, added)
        assert_same(upfront, net)


def test_multiple_param_groups(pool):
    pool(2).run(multiple_param_groups)


def collect_shards(rank, size):
    torch.manual_seed(rank)
    model = paceline.DataParallel(layers(20, 10, 5), sync="sharded")
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=1e-3, momentum=0.99)
    x, target = torch.rand(3, 20), torch.rand(3, 5)

    def closure():
        optim.zero_grad()
        loss = nn.functional.l1_loss(model(x), target)
        loss.backward()
        return loss

    optim.step(closure=closure)
    optim.consolidate_state_dict(to=0)
    state = from_rank_0(optim.state_dict(), rank)
    assert len(state["state"]) == len(list(model.parameters()))
    optim.load_state_dict(state)
    assert torch.isfinite(optim.step(closure=closure))


def test_collect_shards(pool):
    pool(2).run(collect_shards)


def nondefault_process_group(rank, size):
    group = dist.new_group([0, 2])
    if rank % 2:
        return
    torch.manual_seed(rank)
    model = paceline.DataParallel(layers(20, 10, 5), sync="sharded", group=group)
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=1e-3, momentum=0.99)
    for _ in range(5):
        x, target = torch.rand(3, 20), torch.rand(3, 5)

        def closure(x=x, target=target):
            optim.zero_grad()
            loss = nn.functional.l1_loss(model(x), target)
            loss.backward()
            loss = loss.detach()
            dist.all_reduce(loss, group=group)
            return loss

        optim.step(closure=closure)
        for param in model.parameters():
            rows = [torch.empty_like(param) for _ in range(2)]
            dist.all_gather(rows, param.detach(), group=group)
            assert torch.equal(*rows)


def test_nondefault_process_group(pool):
    pool(4).run(nondefault_process_group)


def local_optimizer_parity(rank, size, name, maximize):
    kind, options = getattr(torch.optim, name), {"lr": 1e-3, **({"maximize": True} if maximize else {})}
    torch.manual_seed(rank)
    net = layers(2, 3, 3, 3)
    net.register_buffer("counter", torch.ones(1) * rank)
    model = paceline.DataParallel(net, sync="sharded")
    optim = paceline.ShardedOptimizer(model, kind, **options)
    ddp = DistributedDataParallel(copy.deepcopy(net), find_unused_parameters=True)
    plain = kind(ddp.parameters(), **options)
    assert_same(model, ddp)
    assert model.module.counter == ddp.module.counter == 0

    def check_step():
        x, losses = torch.rand(64, 2), []
        for each, its in ((ddp, plain), (model, optim)):

            def closure(each=each, its=its):
                its.zero_grad()
                loss = each(x).abs().sum()
                loss.backward()
                return loss

            losses.append(its.step(closure=closure))
        torch.testing.assert_close(*losses)
        assert_same(model, ddp, rtol=1e-5, atol=1e-6)

    for batch in range(20):
        check_step()
        if batch > 10:  # freeze and thaw
            next(ddp.parameters()).requires_grad = bool(batch % 2)
            next(model.parameters()).requires_grad = bool(batch % 2)

    plain_state = copy.deepcopy(plain.state_dict())
    optim.consolidate_state_dict(to=0)
    sharded_state = from_rank_0(optim.state_dict(), rank)
    plain.load_state_dict(copy.deepcopy(sharded_state))  # or it would change in the next step
    optim.load_state_dict(plain_state)
    check_step()
    plain.load_state_dict(copy.deepcopy(plain_state))
    optim.load_state_dict(sharded_state)
    check_step()


@pytest.mark.parametrize("maximize", [False, True], ids=["", "maximize"])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_local_optimizer_parity(pool, name, maximize):
    pool(2).run(local_optimizer_parity, name, maximize)


def uneven_inputs(rank, size):
    """Rank r has r inputs more than rank 0; beside one process that takes the mean over what there is."""
    torch.manual_seed(0)
    net = layers(2, 3, 3, 3)
    model = paceline.DataParallel(copy.deepcopy(net), sync="sharded")
    optim = paceline.ShardedOptimizer(model, torch.optim.Adam, lr=0.01)
    plain = torch.optim.Adam(net.parameters(), lr=0.01)
    inputs, labels = torch.randn(3 + size - 1, size, 20, 2), torch.randn(20, 3)
    for _ in range(2):
        for batch in range(3 + size - 1):
            have = [other for other in range(size) if batch < 3 + other]
            if rank in have:
                loss = nn.functional.mse_loss(model(inputs[batch, rank]), labels)
                model.backward(loss, samples=20)
            else:
                model.backward(None, samples=0)
            (sum(nn.functional.mse_loss(net(inputs[batch, r]), labels) for r in have) / len(have)).backward()
            for each in (optim, plain):
                each.step()
                each.zero_grad()
            assert_same(model, net, rtol=1e-5, atol=1e-6)


def test_uneven_inputs(pool):
    pool(3).run(uneven_inputs)


def overlap(rank, size):
    torch.manual_seed(0)
    net = layers(1000, 2000, 500)
    options = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.001}
    model = paceline.DataParallel(copy.deepcopy(net), sync="sharded")
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, **options)
    ddp = DistributedDataParallel(copy.deepcopy(net))
    plain = torch.optim.SGD(ddp.parameters(), **options)
    for batch in range(5):
        x = torch.randn(1, 1000, generator=torch.Generator().manual_seed(batch * size + rank))
        for each, its in ((model, optim), (ddp, plain)):
            its.zero_grad()
            each(x).sum().backward()
            its.step()
    assert_same(model, ddp)
    assert not torch.equal(model.module[0].weight, net[0].weight)


def test_overlap(pool):
    pool(2).run(overlap)


# ------------------------------------------------------------------ between torch's class and ours


def state_of_torchs_zero(rank, size):
    """Three steps with torch's class and DDP, three with ours from its state; beside six with torch's."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(layers(4, 9, 3))
    theirs = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01)

    def advance(each, its, batches):
        for batch in batches:
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(batch * size + rank))
            its.zero_grad()
            each(x).square().mean().backward()
            its.step()

    advance(ddp, theirs, range(3))
    theirs.consolidate_state_dict(to=0)
    state = from_rank_0(copy.deepcopy(theirs.state_dict()) if rank == 0 else None, rank)
    model = paceline.DataParallel(copy.deepcopy(ddp.module), sync="sharded")
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=0.5)
    optim.load_state_dict(state)
    advance(ddp, theirs, range(3, 6))
    advance(model, optim, range(3, 6))
    assert_same(model, ddp, rtol=1e-6, atol=1e-7)


def test_the_state_of_torchs_class_loads(pool):
    pool(2).run(state_of_torchs_zero)
