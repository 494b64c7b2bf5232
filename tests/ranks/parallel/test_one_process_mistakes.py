"""Parameters equal those of one process after failed backwards, forgotten synchronisation and failed steps."""

from __future__ import annotations

import pytest
import torch
from test_sharded_optimizer import FailingSGD

import model_zoo
import paceline
from engine_cases import ALL, REPLICATED, loss_on
from model_zoo import max_difference
from paceline.errors import BackwardFailed, UnsyncedGradients
from single_process import linear, one_process, over_paceline, pair, same

pool = pytest.fixture(over_paceline)


def failure_is_skipped(rank, size, sync, bad):
    """Drop the gradients after an exception and continue without a step, as many programs do."""
    model, optim, reference, other = pair(sync, model_zoo.Exploding)
    for step in range(4):
        model.module.broken = broken = step == 2 and rank in bad
        loss = loss_on(model, rank, step)
        if step == 2:
            with pytest.raises(FloatingPointError if broken else BackwardFailed):
                loss.backward()
            optim.zero_grad()
            continue
        loss.backward()
        optim.step()
        optim.zero_grad()
        one_process(reference, other, [loss_on(reference, r, step) for r in range(size)])
    return max_difference(model.whole_parameters(), reference.parameters())


@pytest.mark.parametrize("bad", [[0], [1], [0, 1, 2]])
@pytest.mark.parametrize("sync", ["naive", "bucketed", "sharded"])
def test_a_failed_backward_may_be_skipped_without_a_step(pool, sync, bad):
    same(pool(3).run(failure_is_skipped, sync, bad))


def failure_in_accumulation(rank, size, sync):
    model, optim, reference, other = pair(sync, model_zoo.Exploding)
    for step in range(3):
        fails = step == 1 and rank == 1
        model.module.broken = fails
        with model.accumulate():
            loss = loss_on(model, rank, step)
            if fails:
                with pytest.raises(FloatingPointError):
                    model.backward(loss, samples=6)
            else:
                model.backward(loss, samples=6)
        model.module.broken = False
        model.backward(loss_on(model, rank, step + 50), samples=6)
        optim.step()
        optim.zero_grad()
        counted = [(r, s) for r in range(size) for s in (step, step + 50) if (r, s) != (1, 1)]
        one_process(reference, other, [loss_on(reference, r, s) for r, s in counted])
    return max_difference(model.whole_parameters(), reference.parameters())


@pytest.mark.parametrize("sync", ALL)
def test_a_micro_batch_that_failed_is_left_out(pool, sync):
    same(pool(2).run(failure_in_accumulation, sync))


def full_shard_fails_everywhere(rank, size, accumulated):
    model, optim, reference, other = pair("full-shard", model_zoo.Exploding)
    for step in range(4):
        if step == 1:
            if accumulated:
                with model.accumulate():
                    model.backward(loss_on(model, rank, step), samples=6)
            model.module.broken = True
            with pytest.raises(FloatingPointError):
                model.backward(loss_on(model, rank, step), samples=6)
            model.module.broken = False
            optim.zero_grad()
            model.zero_grad()
            continue
        model.backward(loss_on(model, rank, step), samples=6)
        optim.step()
        optim.zero_grad()
        one_process(reference, other, [loss_on(reference, r, step) for r in range(size)])
    return max_difference(model.whole_parameters(), reference.parameters())


@pytest.mark.parametrize("accumulated", [False, True])
def test_full_shard_recovers_from_an_exception_on_all_ranks(pool, accumulated):
    same(pool(2).run(full_shard_fails_everywhere, accumulated))


def refused_then_dropped(rank, size):
    model, optim, reference, other = pair("full-shard", model_zoo.Plain)
    with model.no_sync():
        loss_on(model, rank).backward()
    with pytest.raises(UnsyncedGradients, match=r"rank \d.*layers.0.weight"):
        optim.step()
    optim.zero_grad()
    model.zero_grad()
    loss_on(model, rank, 1).backward()
    optim.step()
    one_process(reference, other, [loss_on(reference, r, 1) for r in range(size)])
    return max_difference(model.whole_parameters(), reference.parameters())


def test_full_shard_refuses_to_step_on_unsynchronised_gradients(pool):
    same(pool(2).run(refused_then_dropped))


def one_rank_forgets(rank, size, sync):
    model, optim, reference, other = pair(sync, model_zoo.Plain)
    loss = loss_on(model, rank)
    model.engine.sync_enabled = rank != 0
    loss.backward()
    model.engine.sync_enabled = True
    optim.step()
    one_process(reference, other, [loss_on(reference, r) for r in range(size)])
    return max_difference(model.whole_parameters(), reference.parameters())


@pytest.mark.parametrize("sync", [*REPLICATED, "sharded"])
def test_a_rank_that_forgot_to_synchronise_does_so_at_step(pool, sync):
    same(pool(2).run(one_rank_forgets, sync))


def step_tried_again(rank, size):
    model, optim, reference, other = pair("sharded", model_zoo.Plain, FailingSGD, lr=0.1)
    for step in range(3):
        model.backward(loss_on(model, rank, step), samples=6)
        FailingSGD.fails = step == 1
        if FailingSGD.fails:
            with pytest.raises(ArithmeticError):
                optim.step()
        FailingSGD.fails = False
        optim.step()
        optim.zero_grad()
        one_process(reference, other, [loss_on(reference, r, step) for r in range(size)])
    return max_difference(model.whole_parameters(), reference.parameters())


def test_a_sharded_step_that_raised_may_be_tried_again(pool):
    same(pool(2).run(step_tried_again))


def without_zero_grad(rank, size):
    model, optim, reference, other = pair("sharded", model_zoo.Plain)
    for step in range(3):
        model.backward(loss_on(model, rank, step), samples=6)
        optim.step()
        one_process(reference, other, [loss_on(reference, r, step) for r in range(size)])
    return max_difference(model.whole_parameters(), reference.parameters())


def test_a_sharded_step_uses_the_gradients_up(pool):
    same(pool(2).run(without_zero_grad))


def parameters_of_a_second_model(rank, size):
    first, second = (paceline.DataParallel(linear().double()) for _ in range(2))
    optim = torch.optim.SGD(first.parameters(), lr=0.1)
    loss_on(first, rank).backward()
    optim.step()
    optim.add_param_group({"params": list(second.parameters())})
    with second.no_sync():
        loss_on(second, rank).backward()
    optim.step()  # the gate must know of the second model by now
    return second.engine.unsynced


def test_the_gate_sees_parameters_that_join_an_optimizer_later(pool):
    assert pool(2).run(parameters_of_a_second_model) == [False, False]


class Normed(torch.nn.Module):
    """A model with buffers that forward changes."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(model_zoo.WIDTH, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
        )

    def forward(self, x):
        return self.layers(x)


def buffers_without_data(rank, size):
    model = paceline.DataParallel(Normed().double(), sync="full-shard")
    model.backward(loss_on(model, rank), samples=6)
    before = [buffer.clone() for buffer in model.module.buffers()]
    model.backward(loss_on(model, rank, 1) if rank == 0 else None, samples=6 if rank == 0 else 0)
    return [torch.equal(a, b) for a, b in zip(before, model.module.buffers(), strict=True)]


def test_a_rank_without_data_leaves_its_buffers_alone(pool):
    with_data, without = pool(2).run(buffers_without_data)
    assert not any(with_data)
    assert all(without)
