"""A resumed run with outer steps is bitwise equal."""

from __future__ import annotations

import pytest
import torch

import paceline
from local_sgd_cases import adamw, flat, network, same, take_step


def trained(rank, size, folder, total, options, broken_at):
    """Train to step `total`, or up to `broken_at`; resume from the folder's checkpoint if there is one."""
    model = paceline.DataParallel(network(torch.float32), sync="bucketed")
    optim = adamw(model)
    loop = paceline.DiLoCo(model, optim, **options)
    checkpoint = paceline.Checkpoint(folder, model, optim, loop)
    checkpoint.load()
    with loop:
        while checkpoint.step < (broken_at or total):
            take_step(model, optim, rank, checkpoint.step + 1, dtype=torch.float32)
        if broken_at:
            checkpoint.save(wait=True)
            saved = {name: each.clone() for name, each in loop.shared().items()}
            checkpoint.close()
            return saved
    checkpoint.close()
    return flat(model)


@pytest.mark.sweep
@pytest.mark.parametrize("options", [{"every": 4}, {"every": 6, "fragments": 3, "delay": 2}])
@pytest.mark.parametrize(
    "compression", [None, "int4", paceline.Compression("int8", rounding="stochastic")], ids=str
)
def test_a_run_that_is_resumed_between_synchronisations_is_the_same_to_the_bit(
    pool, tmp_path, options, compression
):
    options = {**options, "compression": compression}
    whole = same(pool(3).run(trained, str(tmp_path / "whole"), 20, options, None))
    shared = pool(3).run(trained, str(tmp_path / "cut"), 20, options, 9)
    assert all(torch.equal(shared[0][name], each[name]) for each in shared for name in each)
    assert torch.equal(same(pool(3).run(trained, str(tmp_path / "cut"), 20, options, None)), whole)


def test_another_number_of_ranks_begins_from_the_shared_parameters(pool, tmp_path):
    options = {"every": 4, "fragments": 2, "delay": 1}
    shared = pool(3).run(trained, str(tmp_path), 20, options, 9)[0]
    results = pool(2).run(resumed, str(tmp_path), options)
    for start, steps, end in results:
        assert all(torch.equal(start[name], shared[name]) for name in shared)
        assert steps == 9
        assert torch.equal(end, results[0][2])
    grown = pool(4).run(resumed, str(tmp_path), options)
    same([end for *_, end in grown])


def resumed(rank, size, folder, options):
    model = paceline.DataParallel(network(torch.float32), sync="bucketed")
    optim = adamw(model)
    loop = paceline.DiLoCo(model, optim, **options)
    checkpoint = paceline.Checkpoint(folder, model, optim, loop)
    found = checkpoint.load()
    start = {name: param.detach().clone() for name, param in model.module.named_parameters()}
    with loop:
        for step in range(10, 16):
            take_step(model, optim, rank, step, dtype=torch.float32)
    checkpoint.close()
    return start, found.step, flat(model)
