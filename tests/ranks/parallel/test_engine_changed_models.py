"""Parameters added, replaced, frozen, thawed or converted after wrapping: synchronised, or named on all ranks."""

from __future__ import annotations

import pytest
import torch

import model_zoo
import paceline
from engine_cases import ALL, REPLICATED, loss_on, same_on_all_ranks, wrapped
from model_zoo import max_difference
from paceline.errors import MismatchError, UnsyncedGradients, UsageError

ALL_AND_AUTO = [*ALL, "auto"]


def trained(sync, rank, steps, name="Plain"):
    """Return a wrapped model after some steps, and its optimizer."""
    model, optim = wrapped(sync, name)
    for step in range(steps):
        loss_on(model, rank, step, name).backward()
        optim.step()
        optim.zero_grad()
    return model, optim


# ------------------------------------------------------------------ added and replaced on all ranks


def new_head(net):
    net.layers[4] = torch.nn.Linear(7, 1).double()
    return "'layers.4.weight' was replaced.*'layers.4.bias' was replaced"


def adapter(net):
    net.layers.append(torch.nn.Linear(1, 1).double())
    return "'layers.5.weight' was added.*'layers.5.bias' was added"


def assigned_state(net):
    net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)
    return "'scale' was replaced.*'layers.0.weight' was replaced"


def overwritten_on_conversion(net):
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        net.float().double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    return "'scale' was replaced"


def changed_on_all_ranks(rank, size, sync, change, steps):
    model, _ = trained(sync, rank, steps)
    torch.manual_seed(rank)
    message = change(model.module)
    with pytest.raises(UnsyncedGradients, match=message):
        loss_on(model, rank).backward()
    return [param.grad is None for param in model.engine.named_parameters()[0][1:]]


@pytest.mark.sweep
@pytest.mark.parametrize("steps", [2, 0])
@pytest.mark.parametrize("sync", ALL_AND_AUTO)
@pytest.mark.parametrize(
    "change",
    [new_head, adapter, assigned_state, overwritten_on_conversion],
    ids=lambda change: change.__name__,
)
def test_added_and_replaced_parameters_are_named(pool, change, sync, steps):
    assert pool(2).run(changed_on_all_ranks, sync, change, steps) == [[True], [True]]


def wrapped_again(rank, size, sync, change):
    model, _ = trained(sync, rank, 2)
    torch.manual_seed(rank)
    change(model.module)
    model = paceline.DataParallel(model.module, sync=sync)
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    reference = model_zoo.build("Plain")
    change(reference)
    reference.load_state_dict(model.module.state_dict())
    other = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        loss_on(model, rank, step).backward()
        optim.step()
        optim.zero_grad()
        (sum(loss_on(reference, r, step) for r in range(size)) / size).backward()
        other.step()
        other.zero_grad()
    same = same_on_all_ranks(model.whole_parameters())
    return max_difference(model.whole_parameters(), reference.parameters()), same


@pytest.mark.sweep
@pytest.mark.parametrize("sync", [*REPLICATED, "sharded", "auto"])
@pytest.mark.parametrize("change", [new_head, adapter, assigned_state], ids=lambda change: change.__name__)
def test_a_changed_model_that_is_wrapped_again_trains_as_in_one_process(pool, change, sync):
    for gap, same in pool(2).run(wrapped_again, sync, change):
        assert gap < 1e-12
        assert same


# ------------------------------------------------------------------ no reason to stop


def harmless(rank, size, sync, change):
    model, optim = trained(sync, rank, 2)
    reference = model_zoo.build("Plain")
    other = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in [0, 1, 2, 3, 4, 5]:
        for net in [model.module, reference] if step >= 2 else []:
            change(net, step)
        if step >= 2:
            loss_on(model, rank, step).backward()
            optim.step()
            optim.zero_grad()
        (sum(loss_on(reference, r, step) for r in range(size)) / size).backward()
        other.step()
        other.zero_grad()
    same = same_on_all_ranks(model.whole_parameters())
    return max_difference(model.whole_parameters(), list(reference.parameters())), same


def frozen_for_a_while(net, step):
    for param in net.layers[0].parameters():
        param.requires_grad_(step == 4)


def other_modules_built(net, step):
    torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))


def frozen_module_added(net, step):
    net.extra = torch.nn.Linear(2, 2).double().requires_grad_(False)


@pytest.mark.sweep
@pytest.mark.parametrize("sync", ALL_AND_AUTO)
@pytest.mark.parametrize("change", [frozen_for_a_while, other_modules_built], ids=lambda c: c.__name__)
def test_changes_that_matter_to_no_gradient_are_allowed(pool, change, sync):
    for gap, same in pool(2).run(harmless, sync, change):
        assert gap < 1e-12
        assert same


def layer_removed(rank, size, sync):
    model, optim = trained(sync, rank, 2, "Unused")
    del model.module.never
    for step in range(2):
        loss_on(model, rank, step, "Unused").backward()
        optim.step()
        optim.zero_grad()
    return same_on_all_ranks(model.whole_parameters())


@pytest.mark.sweep
@pytest.mark.parametrize("sync", ALL_AND_AUTO)
def test_a_layer_may_be_removed(pool, sync):
    assert pool(2).run(layer_removed, sync) == [True, True]


def frozen_module_thawed(rank, size):
    model, _ = trained("bucketed", rank, 2)
    model.module.extra = torch.nn.Linear(1, 1).double().requires_grad_(False)
    loss_on(model, rank).backward()
    model.module.extra.requires_grad_(True)
    with pytest.raises(UnsyncedGradients, match=r"'extra.weight' was thawed"):
        (loss_on(model, rank) + model.module.extra(torch.ones(1, 1).double()).sum()).backward()


def test_a_frozen_module_that_was_added_and_thawed_is_named(pool):
    pool(2).run(frozen_module_thawed)


# ------------------------------------------------------------------ on some ranks only


def changed_on_rank_1(rank, size, sync, change, weighted):
    model, _ = trained(sync, rank, 2, "Frozen" if change is thaw else "Plain")
    if rank == 1:
        change(model.module)
    name = "Frozen" if change is thaw else "Plain"
    loss = loss_on(model, rank, 0, name)
    with pytest.raises(MismatchError, match=NAMED[change]):
        model.backward(loss, samples=6) if weighted else loss.backward()
    return [name for name, param in model.engine.named_parameters() if param.grad is not None]


def freeze(net):
    net.scale.requires_grad_(False)


def freeze_a_layer(net):
    net.layers[2].requires_grad_(False)


def thaw(net):
    net.scale.requires_grad_(True)


NAMED = {
    freeze: "rank 0 has parameter 'scale' unchanged; rank 1 has parameter 'scale' frozen",
    freeze_a_layer: "rank 1 has parameter 'layers.2.bias' frozen",
    thaw: "rank 1 has parameter 'scale' thawed",
    new_head: "rank 1 has parameter 'layers.4.bias' replaced",
    adapter: "rank 1 has parameter 'layers.5.bias' added",
}


@pytest.mark.sweep
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sync", ALL_AND_AUTO)
@pytest.mark.parametrize("change", NAMED, ids=lambda change: change.__name__)
def test_a_change_on_one_rank_is_named_on_all(pool, change, sync, weighted):
    if (change, sync) == (freeze_a_layer, "full-shard"):
        change = freeze  # FSDP2 itself fails: its ranks reduce different numbers of elements
    left = pool(3).run(changed_on_rank_1, sync, change, weighted)
    assert all(set(names) <= {"scale"} for names in left)


def frozen_where_unused(rank, size, frozen):
    """Rank 1 has no samples for the third branch; it may be frozen there or not."""
    model = paceline.DataParallel(model_zoo.build("Branches"))
    x = torch.zeros(4, model_zoo.WIDTH, dtype=torch.float64)
    x[:, 0] = 2.0 if rank == 0 else 0.0
    if frozen and rank == 1:
        model.module.branches[2].requires_grad_(False)
    loss = model(x).square().mean()
    if not frozen:
        loss.backward()
        return model.module.branches[2].weight.grad.abs().sum().item()
    with pytest.raises(MismatchError, match=r"rank 1 has parameter 'branches.2.bias' frozen"):
        loss.backward()
    return None


def test_frozen_and_merely_unused_are_told_apart(pool):
    used = pool(2).run(frozen_where_unused, False)
    assert used[0] == used[1] > 0
    pool(2).run(frozen_where_unused, True)


# ------------------------------------------------------------------ converted


def converted(rank, size, sync, steps, ranks):
    model, _ = trained(sync, rank, steps)
    x, y = torch.randn(6, model_zoo.WIDTH, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64)
    if rank in ranks:
        model.module.float()
        x, y = x.float(), y.float()
    if sync == "full-shard":
        if rank in ranks:
            with pytest.raises(UsageError, match=r"'layers.0.weight' was converted to torch.float32"):
                model(x)
        return
    error, match = UnsyncedGradients, "'scale' was converted to float32"
    if len(ranks) < size:
        error, match = MismatchError, "rank 1 has parameter 'layers.0.bias' converted to float32"
    with pytest.raises(error, match=match):
        model_zoo.loss_of(model, "Plain", x, y).backward()


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [[0, 1], [1]], ids=["all", "rank 1"])
@pytest.mark.parametrize("sync", ALL_AND_AUTO)
def test_converting_a_model_after_its_first_step_is_refused(pool, sync, ranks):
    pool(2).run(converted, sync, 2, ranks)


# ------------------------------------------------------------------ wrapped again


def twice(rank, size, syncs):
    """The first wrapper trains, then the second one; the first is still there, with its optimizer."""
    net = model_zoo.build("Plain")
    reference = model_zoo.build("Plain")
    models = []
    for sync in syncs:
        model = paceline.DataParallel(net, sync=sync)
        optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        other = torch.optim.SGD(reference.parameters(), lr=0.1)
        models.append((model, optim))
        for step in range(3):
            loss_on(model, rank, step).backward()
            optim.step()
            optim.zero_grad()
            (sum(loss_on(reference, r, step) for r in range(size)) / size).backward()
            other.step()
            other.zero_grad()
    gap = max_difference(models[-1][0].whole_parameters(), reference.parameters())
    first, optim = models[0]
    with pytest.raises(UsageError, match="the model was wrapped"):
        loss_on(first, rank).backward()
    if syncs[0] == "sharded":
        with pytest.raises(UsageError, match="the model was wrapped"):
            optim.step()
    return gap, same_on_all_ranks(models[-1][0].whole_parameters())


@pytest.mark.sweep
@pytest.mark.parametrize("second", [*REPLICATED, "sharded", "auto", "full-shard"])
@pytest.mark.parametrize("first", ["sharded", "bucketed", "auto"])
def test_the_latest_wrapper_of_a_module_trains_it(pool, first, second):
    for gap, same in pool(2).run(twice, [first, second]):
        assert gap < 1e-12
        assert same


def sharing_a_layer(rank, size):
    shared = torch.nn.Linear(2, 2)
    first = paceline.DataParallel(torch.nn.Sequential(shared, torch.nn.Linear(2, 1)))
    with pytest.raises(
        UsageError, match=r"'0.weight' belongs to another DataParallel, too.*such as '1.weight'"
    ):
        paceline.DataParallel(torch.nn.Sequential(shared, torch.nn.Linear(2, 3)))
    first(torch.ones(1, 2) * rank).sum().backward()
    return shared.bias.grad.tolist()


def test_wrapped_models_must_not_share_a_layer(pool):
    left, right = pool(2).run(sharing_a_layer)
    assert left == right


def sharded_again(rank, size, sync):
    model, _ = wrapped("full-shard")
    with pytest.raises(UsageError, match="the module is sharded by FSDP2 already"):
        paceline.DataParallel(model.module, sync=sync)


@pytest.mark.parametrize("sync", ["full-shard", "bucketed"])
def test_a_module_of_fsdp2_is_not_wrapped_again(pool, sync):
    pool(2).run(sharded_again, sync)
