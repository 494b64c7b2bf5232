"""Programs that replace the memory of parameters or gradients between steps: they train as in one process, or raise."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import model_zoo
import paceline
from engine_cases import REPLICATED, loss_on, same_on_all_ranks, wrapped
from model_zoo import max_difference

# ------------------------------------------------------------------ param.data


def to_double_and_back(module, memory):
    module.float().double()


def through_a_vector(module, memory):
    vector_to_parameters(parameters_to_vector(module.parameters()) * 0.9, module.parameters())


def averaged_one_way(module, memory):
    """Exchange the memory of parameters and of their average, and train on with the average."""
    params = list(module.parameters())
    if not memory:
        memory += [param.detach().clone() for param in params]
    for param, average in zip(params, memory, strict=True):
        average.mul_(0.9).add_(param.detach(), alpha=0.1)
        param.data, average.data = average.data, param.data


def averaged_two_ways(module, memory):
    """Exchange them, as for an evaluation, and exchange them back."""
    averaged_one_way(module, memory)
    module(torch.ones(2, model_zoo.WIDTH, dtype=torch.float64))
    for param, average in zip(module.parameters(), memory, strict=True):
        param.data, average.data = average.data, param.data


def cloned(module, memory):
    for param in module.parameters():
        param.data = param.data.clone()


def one_of_them(module, memory):
    module.scale.data = module.scale.data * 0.9


CHANGES = [
    (change, when)
    for change in (through_a_vector, averaged_one_way, averaged_two_ways, cloned, one_of_them)
    for when in ("after step", "before step")
]


def changed_between_steps(rank, size, sync, change, when):
    """Compare with one process that makes the same changes, and the memory that they exchange, too."""
    model = paceline.DataParallel(model_zoo.build("Plain"), sync=sync)
    optim = paceline.ShardedOptimizer(model, torch.optim.Adam, lr=0.05)
    reference = model_zoo.build("Plain")
    other = torch.optim.Adam(reference.parameters(), lr=0.05)
    memory, expected = [], []
    for step in range(6):
        loss = loss_on(model, rank, step)
        loss.backward()
        losses = [loss_on(reference, r, step) for r in range(size)]
        (sum(losses) / size).backward()
        if when == "before step" and step in (0, 2, 3):
            change(model.module, memory), change(reference, expected)
        optim.step(), other.step()
        optim.zero_grad(), other.zero_grad()
        if when == "after step" and step in (0, 2, 3):
            change(model.module, memory), change(reference, expected)
    gap = max_difference([*model.whole_parameters(), *memory], [*reference.parameters(), *expected])
    return gap, same_on_all_ranks(model.whole_parameters())


@pytest.mark.sweep
@pytest.mark.parametrize("sync", ["sharded", "auto", *REPLICATED])
@pytest.mark.parametrize(("change", "when"), [(to_double_and_back, "after step"), *CHANGES])
def test_parameters_in_other_memory_train_as_in_one_process(pool, change, sync, when):
    tolerance = 1e-6 if change is to_double_and_back else 1e-12
    for gap, same in pool(2).run(changed_between_steps, sync, change, when):
        assert gap < tolerance
        assert same


@pytest.mark.parametrize(
    ("change", "when"), [(to_double_and_back, "after step"), (one_of_them, "before step")]
)
def test_parameters_in_other_memory_train_with_fsdp2(pool, change, when):
    assert all(
        gap < 1e-6 and same for gap, same in pool(2).run(changed_between_steps, "full-shard", change, when)
    )


# ------------------------------------------------------------------ param.grad.data


def gradients_cloned(module):
    for param in module.parameters():
        if type(param.grad) is torch.Tensor:  # and no shards
            param.grad.data = param.grad.data.clone()


def converted_with_gradients(module):
    module.float().double()


def gradients_moved(rank, size, sync, change, when, set_to_none):
    model, optim = wrapped(sync)
    reference = model_zoo.build("Plain")
    other = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        batches = [step]
        if when == "while accumulating":
            batches.append(step + 50)
            with model.accumulate():
                loss_on(model, rank, step + 50).backward()
            change(model.module)
        with model.accumulate() if when == "before a step that synchronises" else contextlib.nullcontext():
            loss_on(model, rank, step).backward()
        change(model.module)
        optim.step()
        sum(loss_on(reference, r, batch) / size for r in range(size) for batch in batches).backward()
        other.step()
        if when != "kept" or step == 2:
            optim.zero_grad(set_to_none), other.zero_grad(set_to_none)
    same = same_on_all_ranks(model.whole_parameters())
    return max_difference(model.whole_parameters(), reference.parameters()), same


@pytest.mark.sweep
@pytest.mark.parametrize("set_to_none", [True, False], ids=["set to None", "zeroed"])
@pytest.mark.parametrize(
    "when", ["after backward", "while accumulating", "before a step that synchronises", "kept"]
)
@pytest.mark.parametrize("sync", [*REPLICATED, "sharded"])
@pytest.mark.parametrize("change", [gradients_cloned, converted_with_gradients], ids=lambda c: c.__name__)
def test_gradients_in_other_memory_are_synchronised(pool, change, sync, when, set_to_none):
    if sync == "sharded" and when == "kept":
        when = "after backward"  # step() has consumed them
    for gap, same in pool(2).run(gradients_moved, sync, change, when, set_to_none):
        assert gap < (1e-5 if change is converted_with_gradients else 1e-12)
        assert same
