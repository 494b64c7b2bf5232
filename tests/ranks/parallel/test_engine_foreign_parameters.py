"""Optimizers that hold parameters of no wrapped model beside those of one: named, unless they are marked."""

from __future__ import annotations

import logging

import pytest
import torch

import model_zoo
import paceline
from engine_cases import loss_on
from paceline.errors import UnsyncedGradients


def learned_temperature(rank, size, how):
    model = paceline.DataParallel(model_zoo.build("Plain"))
    temperature = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    other = torch.nn.Linear(1, 1).double()
    optim = torch.optim.SGD([*model.parameters(), temperature, *other.parameters()], lr=0.1)
    if how == "marked":
        temperature.unsynchronised = True
    if how == "frozen":
        temperature.requires_grad_(False)
    for step in range(2):
        (loss_on(model, rank, step) * temperature).backward()
        if how == "trained":
            with pytest.raises(
                UnsyncedGradients, match=r"SGD holds 1 parameter of no wrapped model \(shapes \[\]\)"
            ):
                optim.step()
            return True
        optim.step()
        optim.zero_grad()
    return True


@pytest.mark.parametrize("how", ["trained", "marked", "frozen"])
def test_a_trained_parameter_outside_of_the_model_is_named(pool, how):
    assert pool(2).run(learned_temperature, how) == [True, True]


def head_outside_of_torchs_class(rank, size):
    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    log = logging.getLogger("paceline.parallel")
    log.addHandler(handler)
    model = paceline.DistributedDataParallel(model_zoo.build("Plain"))
    head = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
    optim = torch.optim.SGD([*model.parameters(), head], lr=0.1)
    for step in range(3):
        (loss_on(model, rank, step) * head).backward()
        optim.step()
        optim.zero_grad()
    log.removeHandler(handler)
    return records


def test_with_torchs_class_a_parameter_outside_of_the_model_is_a_warning(pool):
    for records in pool(2).run(head_outside_of_torchs_class):
        assert len(records) == 1
        assert "SGD holds 1 parameter of no wrapped model (shapes [])" in records[0]


def two_models(rank, size):
    """As in a GAN, with one optimizer, and one that was made before wrapping."""
    nets = [model_zoo.build("Plain"), model_zoo.build("Plain")]
    early = torch.optim.SGD([param for net in nets for param in net.parameters()], lr=0.1)
    models = [paceline.DataParallel(net) for net in nets]
    late = torch.optim.SGD([param for model in models for param in model.parameters()], lr=0.1)
    for optim in (early, late):
        sum(loss_on(model, rank) for model in models).backward()
        optim.step()
        optim.zero_grad()
    return True


def test_an_optimizer_may_hold_several_wrapped_models(pool):
    assert pool(2).run(two_models) == [True, True]


def no_model_of_ours(rank, size):
    paceline.DataParallel(model_zoo.build("Plain"))
    net = torch.nn.Linear(1, 1)
    optim = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.ones(1, 1)).sum().backward()
    optim.step()
    return True


def test_an_optimizer_without_parameters_of_a_wrapped_model_is_free(pool):
    assert pool(2).run(no_model_of_ours) == [True, True]
