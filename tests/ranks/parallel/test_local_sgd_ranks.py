"""Local SGD with ranks that differ: in steps, in groups, by NaN, or from the beginning."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import paceline
from local_sgd_cases import WIDTH, adamw, batch_of, flat, network, same, sgd, take_step
from paceline.errors import SyncError, UsageError
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.local_sgd.optimizer_state_averaging import average_state


def uneven(rank, size, steps, options):
    """Return parameters and counts of a rank that makes `steps[rank]` local steps."""
    model = paceline.DataParallel(network(), sync="bucketed")
    optim = adamw(model)
    with paceline.DiLoCo(model, optim, **options) as loop:
        for step in range(1, steps[rank] + 1):
            take_step(model, optim, rank, step)
    take_step(model, optim, rank, 99)  # gradients are synchronised again
    return flat(model), loop.steps, loop.syncs


@pytest.mark.parametrize(
    "options", [{"every": 4}, {"every": 6, "fragments": 3, "delay": 2}, {"every": 5, "fragments": 2}]
)
def test_ranks_may_make_different_numbers_of_steps(pool, options):
    results = pool(3).run(uneven, [7, 19, 0], {**options, "compression": None})
    same([params for params, *_ in results[:2]])
    assert [steps for _, steps, _ in results] == [7, 19, 0]
    assert len({syncs for *_, syncs in results}) == 1, "all took part in all of them"


def test_gradients_that_a_finished_rank_had_not_sent_count(pool):
    """Rank 0 makes 3 of 4 steps: its last three count as three steps beside rank 1's four."""
    options = {"every": 4, "compression": None, "outer_lr": 1.0, "outer_momentum": 0.0}
    results = pool(2).run(uneven_plain, [3, 4], options)
    mine, workers = same(results), [network(), network()]
    for rank, steps in enumerate([3, 4]):
        optim = sgd(workers[rank])
        for step in range(1, steps + 1):
            take_step(workers[rank], optim, rank, step)
    assert torch.allclose(mine, (3 * flat(workers[0]) + 4 * flat(workers[1])) / 7, rtol=0, atol=1e-10)


def uneven_plain(rank, size, steps, options):
    model = network()
    optim = sgd(model)
    with paceline.DiLoCo(model, optim, **options):
        for step in range(1, steps[rank] + 1):
            take_step(model, optim, rank, step)
    return flat(model)


def levelled(rank, size):
    """Return this rank's optimizer state of a vector and of a number, before and after it is averaged."""
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(()))]
    optim = torch.optim.AdamW(params)
    for _ in range(rank + 1):
        for param in params:
            param.grad = torch.full_like(param, 3.0 - 2.0 * rank)
        optim.step()
    before = [optim.state[param]["exp_avg"].clone() for param in params]
    average_state(optim, Comm())
    return (
        before,
        [optim.state[param]["exp_avg"] for param in params],
        [float(optim.state[param]["step"]) for param in params],
    )


def test_states_become_the_mean_over_ranks_and_steps_the_most_of_them(pool):
    results = pool(3).run(levelled)
    for of_vector_and_number in range(2):
        mean = sum(before[of_vector_and_number] for before, *_ in results) / 3
        for _, after, steps in results:
            assert torch.allclose(after[of_vector_and_number], mean)
            assert steps[of_vector_and_number] == 3.0


def poisoned(rank, size, victim, delay):
    model = paceline.DataParallel(network(), sync="bucketed")
    optim = adamw(model)
    with paceline.DiLoCo(model, optim, every=4, delay=delay, compression=None) as loop:
        for step in range(1, 13):
            take_step(model, optim, rank, step)
            if rank == victim and step == 6:
                with torch.no_grad():
                    next(model.parameters())[0, 0] = float("nan")
    return flat(model), loop.rejected


@pytest.mark.parametrize("delay", [0, 1])
def test_a_pseudo_gradient_that_is_not_finite_is_left_out_and_its_rank_named(pool, delay):
    """Its rank is well again after the merge, although it had trained on between sending and merging."""
    results = pool(3).run(poisoned, 1, delay)
    assert bool(same([params for params, _ in results]).isfinite().all())
    assert [rejected for _, rejected in results] == [{1: 1}] * 3


def poisoned_host(rank, size, sync):
    """Hosts of two ranks, whose optimizer may be sharded; the first host's parameters become NaN."""
    groups = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    model = paceline.DataParallel(network(), sync=sync, group=groups[rank // 2])
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=0.02)
    with paceline.DiLoCo(model, optim, every=3, compression=None, group=groups[2 + rank % 2]) as loop:
        for step in range(1, 10):
            take_step(model, optim, rank, step)
            if rank < 2 and step == 4:
                with torch.no_grad():
                    next(model.parameters())[0, 0] = float("nan")
    return flat(model), loop.rejected


@pytest.mark.parametrize("sync", ["bucketed", "sharded"])
def test_a_host_whose_parameters_became_nan_resets_its_optimizer(pool, sync):
    results = pool(4).run(poisoned_host, sync)
    assert bool(same([params for params, _ in results]).isfinite().all())
    assert [rejected for _, rejected in results] == [{0: 1}] * 4


def grouped(rank, size):
    """Two hosts of two ranks: gradients inside a host every step, parameters between hosts every 3 steps."""
    inner = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])][rank // 2]
    outer = [torch.distributed.new_group([0, 2]), torch.distributed.new_group([1, 3])][rank % 2]
    model = paceline.DataParallel(network(), sync="sharded", group=inner)
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=0.02, weight_decay=0.1)
    with paceline.DiLoCo(model, optim, every=3, compression=None, group=outer):
        for step in range(1, 10):
            take_step(model, optim, rank, step)
    return flat(model)


def test_ranks_of_a_host_may_synchronise_gradients_while_hosts_synchronise_parameters(pool):
    mine = same(pool(4).run(grouped))
    theta, workers = network(), [network(), network()]
    optims = [adamw(worker) for worker in workers]
    outer = torch.optim.SGD(theta.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(1, 10):
        for host, (worker, optim) in enumerate(zip(workers, optims, strict=True)):
            losses = [
                functional.mse_loss(worker(x), y)
                for x, y in (batch_of(2 * host, step), batch_of(2 * host + 1, step))
            ]
            (sum(losses) / 2).backward()
            optim.step()
            optim.zero_grad()
        if step % 3 == 0:
            for shared, one, other in zip(
                theta.parameters(), *(w.parameters() for w in workers), strict=True
            ):
                shared.grad = shared.detach() - (one.detach() + other.detach()) / 2
            outer.step()
            for worker in workers:
                worker.load_state_dict(theta.state_dict())
    assert torch.allclose(mine, flat(theta), rtol=0, atol=1e-10)


def started_apart(rank, size, kind):
    """Train before the block; return the parameters after its beginning, and at its end."""
    torch.manual_seed(rank)  # other parameters on each rank
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()
    if kind == "synchronised":
        model = paceline.DataParallel(model, sync="bucketed")
    elif kind == "in groups of one":
        groups = [torch.distributed.new_group([each]) for each in range(size)]
        model = paceline.DataParallel(model, sync="bucketed", group=groups[rank])
    optim = sgd(model)
    loop = paceline.LocalSGD(model, optim, every=3, compression=None)
    for step in range(rank + 1 if kind == "bare" else 2):
        take_step(model, optim, rank, step)
    with loop:
        shared = torch.cat([each.reshape(-1).clone() for each in loop.shared().values()])
        for step in range(4):
            take_step(model, optim, rank, step)
    return shared, flat(model), loop.module[1].running_var.clone()


@pytest.mark.parametrize("kind", ["bare", "synchronised", "in groups of one"])
def test_ranks_that_differ_when_the_block_begins_are_made_equal(pool, kind):
    for each in zip(*pool(3).run(started_apart, kind), strict=True):
        same(each)


def broken_off(rank, size):
    """An exception in the block is not followed by a synchronisation; parameters differ then, and that is known."""
    model = paceline.DataParallel(network(), sync="bucketed")
    optim = adamw(model)
    try:
        with paceline.LocalSGD(model, optim, every=2, compression=None) as loop:
            take_step(model, optim, rank, 1)
            take_step(model, optim, rank, 2)
            take_step(model, optim, rank, 3)
            raise ValueError("a fault of the program")
    except ValueError as error:
        messages = [str(error)]
    for attempt in (lambda: take_step(model, optim, rank, 3), loop.__enter__):
        try:
            attempt()
        except (SyncError, UsageError) as error:
            messages.append(str(error))
    with paceline.LocalSGD(
        model, optim, every=2, compression=None
    ):  # a new one begins from rank 0's parameters
        take_step(model, optim, rank, 4)
    take_step(model, optim, rank, 5)
    return messages, flat(model)


def test_an_exception_ends_the_block_without_more_messages(pool):
    results = pool(2).run(broken_off)
    for messages, _ in results:
        assert messages[0] == "a fault of the program"
        assert "parameters differ between ranks" in messages[1]
        assert "was left by an exception" in messages[2]
    same([params for _, params in results])
