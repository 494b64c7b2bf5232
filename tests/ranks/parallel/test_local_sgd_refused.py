"""Invalid options of outer steps are refused on all ranks, before anything begins."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline
from local_sgd_cases import WIDTH, adamw, flat, network, same, take_step, transcript
from paceline.errors import MismatchError, UsageError


def refused(rank, size, kind, options):
    options = options(rank) if callable(options) else options
    model = paceline.DataParallel(network(torch.float32), sync=options.pop("sync", "bucketed"))
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=0.02)
    try:
        getattr(paceline, kind)(model, optim, **options)
    except (UsageError, MismatchError) as error:
        return type(error).__name__, str(error)
    return "", ""


def other_on_rank_1(rank):
    return {"every": 4 if rank == 0 else 5}


def kept_on_rank_0(rank):
    return {"every": 4, "delay": 1, "keep_local_steps": rank == 0}


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("DiLoCo", {"every": 0}, "every=0"),
        ("LocalSGD", {"every": 2.5}, "every=2.5"),
        ("DiLoCo", {"every": 9, "fragments": 5}, "fragments=5, but the model has 4 layers"),
        ("DiLoCo", {"every": 3, "fragments": 4}, "at most one fragment per step"),
        ("DiLoCo", {"every": 3, "delay": 3}, "delay=3 with every=3"),
        ("DiLoCo", {"every": 3, "delay": -1}, "delay=-1"),
        ("DiLoCo", {"every": 3, "mix": 1.01}, "mix=1.01"),
        ("DiLoCo", {"every": 3, "mix": float("nan")}, "mix=nan"),
        ("LocalSGD", {"every": 3, "mix": True}, "a number from 0 to 1"),
        ("DiLoCo", {"every": 3, "outer_lr": 0.0}, "outer_lr=0.0"),
        ("DiLoCo", {"every": 3, "outer_momentum": 1.0}, "outer_momentum=1.0"),
        ("SlowMo", {"every": 3, "slow_momentum": -0.1}, "slow_momentum=-0.1"),
        ("DiLoCo", {"every": 3, "warmup": -1}, "warmup=-1"),
        ("DiLoCo", {"every": 3, "piece_mib": 0}, "piece_mib=0"),
        ("LocalSGD", {"every": 3, "compression": "int5"}, "unknown compression 'int5'"),
        ("LocalSGD", {"every": 3, "compression": "powersgd"}, "powersgd"),
        ("LocalSGD", {"every": 3, "sync": "sharded"}, "sync='sharded' leaves each rank a part"),
        ("DiLoCo", other_on_rank_1, "[rank 1] DiLoCo differs between ranks"),
        ("DiLoCo", kept_on_rank_0, "[rank 1] DiLoCo differs between ranks"),
    ],
)
def test_bad_input_is_refused_on_all_ranks_before_anything_begins(pool, kind, options, message):
    for name, text in pool(2).run(refused, kind, options):
        assert name == ("MismatchError" if callable(options) else "UsageError")
        assert message in text


def test_numbers_that_compression_is_unfit_for_are_named():
    model = network(torch.float64)
    model[0] = nn.Linear(WIDTH, 256).double()
    with pytest.raises(UsageError, match=r"int4 can't compress parameter '0\.weight' of float64"):
        paceline.DiLoCo(model, adamw(model), every=4)
    wrapped = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="holds no parameter of this model"):
        paceline.LocalSGD(wrapped, adamw(network()), every=4)


def test_a_world_of_one_takes_outer_steps_alone():
    model = network()
    optim = adamw(model)
    with paceline.DiLoCo(model, optim, every=5, compression=None):
        for step in range(1, 11):
            take_step(model, optim, 0, step)
    assert torch.allclose(flat(model), transcript(1, 10, 5, 0.7, 0.9, adamw), rtol=0, atol=1e-10)


def other_rates(rank, size):
    """SlowMo divides by the inner learning rate: where ranks have other ones, all take the same mean of them."""
    model = network()
    optim = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank))
    with paceline.SlowMo(model, optim, every=2, compression=None):
        for step in range(1, 9):
            take_step(model, optim, rank, step)
    return flat(model)


def test_ranks_with_other_learning_rates_take_the_same_slow_step(pool):
    assert bool(same(pool(3).run(other_rates)).isfinite().all())


@pytest.mark.parametrize(
    ("damage", "message"), [("complex", "is complex64"), ("frozen", "no trainable parameter")]
)
def test_models_whose_parameters_cannot_be_averaged_are_refused(damage, message):
    model = nn.Linear(3, 3)
    if damage == "complex":
        model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    else:
        model.requires_grad_(False)
    with pytest.raises(UsageError) as refused:
        paceline.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2)
    assert message in str(refused.value)
