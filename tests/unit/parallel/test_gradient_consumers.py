"""Which optimizer updates which parameters of a model, and whose gradients are still to be used."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from paceline.parallel.engine.gradient_consumers import GradientConsumers


@pytest.fixture
def params():
    return [nn.Parameter(torch.ones(2)) for _ in range(4)]


@pytest.fixture
def slots(params):
    return [
        SimpleNamespace(param=param, index=index, used=False, consumer=0, update_cost=None)
        for index, param in enumerate(params)
    ]


def optimizer(params):
    return torch.optim.SGD(params, lr=0.1)


def costs(params, cost=None):
    return {id(param): cost for param in params}


def test_parameters_belong_to_the_group_of_their_first_one(params, slots):
    consumers = GradientConsumers(slots)
    first, second = optimizer(params[2:]), optimizer(params[:2])
    consumers.assign(first, costs(params[2:], 8.0), built=False)
    consumers.assign(second, costs(params[:2]), built=False)
    assert [slot.consumer for slot in slots] == [0, 0, 2, 2]
    assert [slot.update_cost for slot in slots] == [None, None, 8.0, 8.0]
    assert consumers.slots_of(first) == slots[2:]
    assert consumers.slots_of(optimizer(params)) == []


def test_buckets_that_exist_stay_as_they_are(params, slots):
    consumers = GradientConsumers(slots)
    late = optimizer(params)
    consumers.assign(late, costs(params, 8.0), built=True)
    assert [slot.update_cost for slot in slots] == [None] * 4
    assert consumers.slots_of(late) == slots
    assert consumers.fits_buckets(costs(params))
    assert not consumers.fits_buckets(costs(params, 8.0))
    assert consumers.fits_buckets({**costs(params[:1]), id(nn.Parameter(torch.ones(1))): 8.0})


def test_gradients_wait_for_every_optimizer_that_uses_them(params, slots):
    consumers = GradientConsumers(slots)
    first, second = optimizer(params[:2]), optimizer(params[2:])
    consumers.assign(first, costs(params[:2]), built=False)
    consumers.assign(second, costs(params[2:]), built=False)
    for slot in slots:
        slot.used = True
    assert consumers.others_wait(first)
    for slot in consumers.slots_of(second):
        slot.used = False
    assert not consumers.others_wait(first)
    assert consumers.others_wait(second)


def test_parameters_of_two_optimizers_are_noticed(params, slots):
    consumers = GradientConsumers(slots)
    first, second = optimizer(params[:2]), optimizer(params[2:])
    consumers.assign(first, costs(params[:2]), built=False)
    consumers.assign(second, costs(params[2:]), built=False)
    assert consumers.disjoint
    third = optimizer(params[1:3])
    consumers.assign(third, costs(params[1:3]), built=False)
    assert not consumers.disjoint
    del third
    gc.collect()
    assert consumers.disjoint  # an optimizer that is gone updates nothing
