"""Whole-matrix optimizers with parameter groups, schedules, closures, and groups that are added later."""

from __future__ import annotations

import pytest
import torch

import paceline
from matrix_cases import ADAMW, batches, step_on_ranks
from matrix_models import build_matrices
from matrix_optimizers import Lars, Soap
from model_zoo import loss_of, max_difference
from paceline.errors import UsageError

TOLERANCE = 1e-11
STRATEGIES = ["bucketed", "sharded", "full-shard"]
SHARES = [5, 3]
SPLIT = {"*qkv.weight": 3}


def grouped(matrices):
    """Return a group for the first matrix and one for the others, with another rate."""
    params = [param for _, param in matrices]
    return [{"params": params[:1]}, {"params": params[1:], "lr": 0.003}]


def one_process_steps(net, optims, data, after_step=lambda: None):
    for micro_steps in data:
        x, y = (torch.cat(parts) for parts in zip(*micro_steps[0], strict=True))
        loss_of(net, "", x, y).backward()
        for optim in optims:
            optim.step()
        net.zero_grad()
        after_step()
    return list(net.parameters())


def groups_and_schedule(rank, size, sync):
    """Two groups whose rates a scheduler halves in every step."""
    data = batches(range(4), SHARES)
    model, net = paceline.DataParallel(build_matrices("Unequal"), sync=sync), build_matrices("Unequal")
    matrices, rest = paceline.matrix_parameters(model)
    muon = paceline.ShardedOptimizer(model, torch.optim.Muon, grouped(matrices), lr=0.05)
    adamw = paceline.ShardedOptimizer(model, torch.optim.AdamW, rest, **ADAMW)
    schedule = torch.optim.lr_scheduler.ExponentialLR(muon, 0.5)
    for micro_steps in data:
        step_on_ranks(model, [muon, adamw], micro_steps, rank)
        schedule.step()
    theirs, others = paceline.matrix_parameters(net)
    plain = torch.optim.Muon(grouped(theirs), lr=0.05)
    other_schedule = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
    expected = one_process_steps(net, [plain, torch.optim.AdamW(others, **ADAMW)], data, other_schedule.step)
    rates = [group["lr"] for group in muon.param_groups] == [group["lr"] for group in plain.param_groups]
    return max_difference(model.whole_parameters(), expected), rates


@pytest.mark.parametrize("sync", STRATEGIES)
def test_groups_and_schedules_work(pool, sync):
    for gap, same_rates in pool(2).run(groups_and_schedule, sync):
        assert gap <= TOLERANCE
        assert same_rates


def added(rank, size, sync, kind, after):
    """Begin with one matrix and add the others after so many steps."""
    data = batches(range(4), SHARES)
    model, net = paceline.DataParallel(build_matrices("Unequal"), sync=sync), build_matrices("Unequal")
    gaps = []
    matrices, _ = paceline.matrix_parameters(model)
    theirs, _ = paceline.matrix_parameters(net)
    optim = paceline.ShardedOptimizer(model, kind, matrices[:1], lr=0.05)
    plain = kind(theirs[:1], lr=0.05)
    for number, micro_steps in enumerate(data):
        if number == after:
            optim.add_param_group({"params": matrices[1:], "lr": 0.01})
            plain.add_param_group({"params": theirs[1:], "lr": 0.01})
        step_on_ranks(model, [optim], micro_steps, rank)
        model.zero_grad()
        expected = one_process_steps(net, [plain], [micro_steps])
        gaps.append(max_difference(model.whole_parameters(), expected))
    return max(gaps)


@pytest.mark.parametrize(("sync", "after"), [("bucketed", 2), ("full-shard", 2), ("sharded", 0)])
@pytest.mark.parametrize("kind", [torch.optim.Muon, Soap])
def test_a_group_is_added_later(pool, sync, after, kind):
    assert max(pool(2).run(added, sync, kind, after)) <= TOLERANCE


def added_too_late(rank, size):
    """Once buckets cut through a matrix, no optimizer can own it."""
    model = paceline.DataParallel(build_matrices("Unequal"), sync="sharded")
    matrices, _ = paceline.matrix_parameters(model)
    optim = paceline.ShardedOptimizer(model, torch.optim.Muon, matrices[:1], lr=0.05)
    model.backward(loss_of(model, "", *batches([0], SHARES)[0][0][rank]))
    with pytest.raises(UsageError, match=r"(?s)Muon needs whole parameters.*before its first backward"):
        optim.add_param_group({"params": matrices[1:]})
    assert len(optim.param_groups) == 1
    optim.step()


def test_a_group_that_is_added_too_late_is_refused(pool):
    pool(2).run(added_too_late)


class LarsWithClosure(Lars):
    """Evaluates the closure, as torch's optimizers do."""

    def step(self, closure=None):
        loss = None if closure is None else closure()
        super().step()
        return loss


def with_closure(rank, size, sync):
    model = paceline.DataParallel(build_matrices("Fused"), sync=sync)
    matrices, _ = paceline.matrix_parameters(model)
    optim = paceline.ShardedOptimizer(model, LarsWithClosure, matrices, split=SPLIT)
    x, y = batches([0], SHARES)[0][0][rank]

    def closure():
        model.zero_grad()
        loss = loss_of(model, "", x, y)
        model.backward(loss, samples=len(x))
        return loss

    return [optim.step(closure).item() for _ in range(6)]


@pytest.mark.parametrize("sync", STRATEGIES)
def test_a_closure_is_evaluated(pool, sync):
    for losses in pool(2).run(with_closure, sync):
        assert losses[-1] < losses[0]


def twice_without_zero_grad(rank, size):
    """Where gradients are sharded, ``step()`` consumes those of its own parameters only."""
    data = batches(range(3), SHARES)
    made = []
    for zeroes in (True, False):
        model = paceline.DataParallel(build_matrices("Fused"), sync="sharded")
        matrices, rest = paceline.matrix_parameters(model)
        optims = [
            paceline.ShardedOptimizer(model, torch.optim.Muon, matrices, lr=0.02, split=SPLIT),
            paceline.ShardedOptimizer(model, torch.optim.AdamW, rest, **ADAMW),
        ]
        for micro_steps in data:
            x, y = micro_steps[0][rank]
            model.backward(loss_of(model, "", x, y), samples=len(x))
            for optim in optims:
                optim.step()
            for optim in optims if zeroes else ():
                optim.zero_grad()
        made.append(model.whole_parameters())
    return max_difference(*made)


def test_steps_consume_the_gradients_of_their_parameters(pool):
    assert pool(2).run(twice_without_zero_grad) == [0.0, 0.0]
