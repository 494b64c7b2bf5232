"""Local SGD after the model or optimizer was changed: it follows the change, or refuses it on all ranks by name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel

import paceline
from local_sgd_cases import BATCH, WIDTH, adamw, batch_of, flat, network, same, sgd, take_step
from paceline.errors import SyncError, UsageError

# ---------------------------------------------------------------------- followed


def train(rank, size, change, steps=9):
    """Return parameters and running statistics of a rank, after `change(model)` before step 4."""
    model = nn.Sequential(*network(torch.float32), nn.BatchNorm1d(2))
    optim = adamw(model)
    with paceline.DiLoCo(model, optim, every=4, compression=None):
        for step in range(1, steps + 1):
            if step == 4:
                change(model)
            take_step(model, optim, rank, step, dtype=torch.float32)
    return flat(model), model[-1].running_mean.clone(), model[-1].running_var.clone()


def nothing(model):
    pass


def double_and_back(model):
    """New storages, and new buffers."""
    model.double().float()


def through_a_vector(model):
    """Parameters become views of one vector."""
    vector_to_parameters(parameters_to_vector(model.parameters()).detach().clone(), model.parameters())


def ema_swap_and_back(model):
    average = AveragedModel(model)
    for _ in range(2):
        for param, of_average in zip(model.parameters(), average.module.parameters(), strict=True):
            param.data, of_average.data = of_average.data, param.data


def loaded_in_place(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()))


@pytest.mark.parametrize("change", [double_and_back, through_a_vector, ema_swap_and_back, loaded_in_place])
def test_parameters_with_new_storages_are_synchronised(pool, change):
    changed, plain = pool(2).run(train, change), pool(2).run(train, nothing)
    for each in range(3):
        assert torch.equal(same([result[each] for result in changed]), plain[0][each])


def swapped_for_good(rank, size):
    """An average of weights takes the place of rank 1's weights."""
    model = network()
    optim, average = sgd(model), AveragedModel(model)
    options = {"compression": None, "outer_lr": 1.0, "outer_momentum": 0.0}
    with paceline.DiLoCo(model, optim, every=4, **options) as loop:
        for step in range(1, 5):
            take_step(model, optim, rank, step)
            if step == 3 and rank == 1:
                for param, of_average in zip(model.parameters(), average.module.parameters(), strict=True):
                    param.data = of_average.data
        return flat(model), torch.cat([each.reshape(-1) for each in loop.shared().values()])


def test_what_a_rank_swaps_in_is_what_it_contributes(pool):
    mine = same([torch.cat(result) for result in pool(2).run(swapped_for_good)])
    workers = [network(), network()]
    for rank, steps in enumerate([range(1, 5), [4]]):
        optim = sgd(workers[rank])
        for step in steps:
            take_step(workers[rank], optim, rank, step)
    expected = (flat(workers[0]) + flat(workers[1])) / 2
    assert torch.allclose(mine, expected.repeat(2), rtol=0, atol=1e-12)


def extended(rank, size):
    """A layer joins the optimizer in the block, as when layers are unfrozen one by one in the optimizer."""
    model = network()
    optim = torch.optim.SGD(model[2].parameters(), lr=0.1)
    options = {"compression": None, "outer_lr": 1.0, "outer_momentum": 0.0}
    with paceline.DiLoCo(model, optim, every=3, **options):
        for step in range(1, 7):
            if step == 2:
                optim.add_param_group({"params": model[0].parameters(), "lr": 0.05})
            take_step(model, optim, rank, step)
    return flat(model), flat(model[0])


def test_parameters_of_a_group_that_is_added_are_synchronised(pool):
    results = pool(2).run(extended)
    same([params for params, _ in results])
    assert not torch.equal(results[0][1], flat(network()[0]))


# ---------------------------------------------------------------------- refused


def changed_on_rank_1(rank, size, change, when, options):
    """Return the errors of a rank."""
    model = network(torch.float32)
    optim = sgd(model)
    errors = []
    loop = paceline.DiLoCo(model, optim, every=4, compression=None, **options)
    try:
        if when == "before the block" and rank == 1:
            change(model, optim)
        with loop:
            for step in range(1, 10):
                if when == "in the block" and rank == 1 and step == 2:
                    change(model, optim)
                take_step(model, optim, rank, step, dtype=next(model.parameters()).dtype)
    except (SyncError, UsageError) as error:
        errors.append(str(error))
    return errors


def assigned(model, optim):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def another_head(model, optim):
    model[5] = nn.Linear(8, 2)


def another_layer(model, optim):
    model.append(nn.Linear(2, 2))


def other_shape(model, optim):
    model[0].weight.data = torch.zeros(8, WIDTH + 1)
    model[0].forward = lambda inputs: inputs.new_zeros(len(inputs), 8)


def doubled(model, optim):
    model.double()


def foreign(model, optim):
    optim.add_param_group({"params": [nn.Parameter(torch.zeros(3, 5))]})


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (assigned, "parameter '0.weight' is no longer one of the model"),
        (another_head, "parameter '5.weight' is no longer one of the model"),
        (another_layer, "parameter '6.weight' is not synchronised"),
        (other_shape, "parameter '0.weight' has shape [8, 7] instead of [8, 6]"),
        (doubled, "parameter '0.weight' is float64, but is averaged in float32"),
        (foreign, "the optimizer holds a parameter of shape [3, 5] that is none of the model's"),
    ],
)
@pytest.mark.parametrize("when", ["before the block", "in the block"])
@pytest.mark.parametrize("options", [{}, {"fragments": 2, "delay": 1}])
def test_a_change_that_cannot_be_followed_is_refused_on_all_ranks(pool, change, message, when, options):
    first, second = pool(2).run(changed_on_rank_1, change, when, options)
    assert len(first) == len(second) == 1
    assert message in second[0]
    assert "[rank 1" in first[0]
    assert "[rank 1" in second[0]
    assert "create this one for them" in first[0]


def thawed(rank, size):
    model = network()
    model[0].requires_grad_(False)
    optim = adamw(model)
    with paceline.LocalSGD(model, optim, every=2, compression=None):
        model[0].requires_grad_(True)
        take_step(model, optim, rank, 1)
        take_step(model, optim, rank, 2)


def test_parameters_that_were_unfrozen_later_are_named():
    with pytest.raises(
        SyncError, match=r"parameter '0\.weight' is not synchronised: it was added or unfrozen"
    ):
        thawed(0, 1)


def another_optimizer(rank, size):
    model = network()
    optim = adamw(model)
    try:
        with paceline.LocalSGD(model, optim, every=2, compression=None):
            optim = adamw(model)
            for step in range(1, 4):
                take_step(model, optim, rank, step)
    except SyncError as error:
        return str(error)
    return ""


def test_a_block_whose_optimizer_makes_no_step_does_not_discard_what_was_learnt(pool):
    for text in pool(2).run(another_optimizer):
        assert "the optimizer made no step" in text


def test_an_optimizer_with_parameters_of_another_model_is_refused():
    model = network()
    optim = torch.optim.SGD([*model.parameters(), *nn.Linear(4, 1).parameters()], lr=0.1)
    with pytest.raises(UsageError, match=r"shape \[1, 4\] that is none of the model's"):
        paceline.LocalSGD(model, optim, every=2)


# ---------------------------------------------------------------------- gradient scaling


def scaled(rank, size, fused, iterations, options):
    """Train with a GradScaler; rank 1's gradients overflow in iteration 3. Return its parameters and steps."""
    model = network(torch.float32)
    optim = torch.optim.AdamW(model.parameters(), lr=0.02, fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    with paceline.LocalSGD(model, optim, every=4, compression=None, **options) as loop:
        for iteration in range(1, iterations + 1):
            scale_and_step(model, optim, scaler, rank, iteration)
        inside = flat(model)
    return inside, flat(model), loop.steps


def scale_and_step(model, optim, scaler, rank, iteration):
    inputs, targets = batch_of(rank, iteration, torch.float32)
    scaler.scale(functional.mse_loss(model(inputs), targets)).backward()
    if rank == 1 and iteration == 3:
        model[0].bias.grad[0] = float("inf")
    scaler.step(optim)
    scaler.update()
    optim.zero_grad()


def scaled_alone(rank, fused, iterations):
    model = network(torch.float32)
    optim = torch.optim.AdamW(model.parameters(), lr=0.02, fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    for iteration in range(1, iterations + 1):
        scale_and_step(model, optim, scaler, rank, iteration)
    return flat(model)


def test_a_step_that_a_grad_scaler_skips_is_no_local_step(pool):
    """Rank 1 makes its fourth step one iteration later, and one step less."""
    results = pool(2).run(scaled, False, 5, {})
    same([after for _, after, _ in results])
    assert [steps for *_, steps in results] == [5, 4]
    mean = (scaled_alone(0, False, 4) + scaled_alone(1, False, 5)) / 2
    assert torch.allclose(results[1][0], mean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"fragments": 2, "delay": 1}])
def test_samples_of_a_step_that_a_fused_optimizer_skips_itself_do_not_count(pool, options):
    results = pool(2).run(scaled, True, 4, options)
    same([after for _, after, _ in results])
    if not options:
        mean = (4 * scaled_alone(0, True, 4) + 3 * scaled_alone(1, True, 4)) / 7
        assert torch.allclose(results[0][1], mean, rtol=0, atol=1e-6)


def scaled_in_step_afterwards(rank, size, fused, rescaled):
    """Local steps of which rank 1 skips one, then synchronous ones. Return the parameters, or the error."""
    model = paceline.DataParallel(network(torch.float32), sync="bucketed")
    optim = torch.optim.AdamW(model.parameters(), lr=0.02, fused=fused)
    scaler = torch.amp.GradScaler("cpu")

    def iterate(iterations):
        for iteration in iterations:
            inputs, targets = batch_of(rank, iteration, torch.float32)
            model.backward(scaler.scale(functional.mse_loss(model(inputs), targets)), samples=BATCH)
            if rank == 1 and iteration == 3:
                next(model.parameters()).grad[0, 0] = float("inf")
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()

    with paceline.LocalSGD(model, optim, every=4, compression=None):
        iterate(range(1, 7))
    if rescaled:
        scaler.update(new_scale=2.0**16)
    try:
        iterate(range(7, 10))
    except SyncError as error:
        return str(error)
    return flat(model)


@pytest.mark.parametrize("fused", [False, True])
def test_different_scales_after_local_training_are_refused(pool, fused):
    for text in pool(2).run(scaled_in_step_afterwards, fused, False):
        assert "[rank 1]" in text
        assert "a GradScaler has another scale" in text
    same(pool(2).run(scaled_in_step_afterwards, fused, True))
