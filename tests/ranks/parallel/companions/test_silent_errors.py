"""Silent errors of real trainings, as TrainCheck (OSDI '25) collects them: prevented, harmless or named, by default.

"Harmless" is what one process makes of the same mistake. Replicas that differ and replaced memory have other files.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter

import pytest
import torch

import model_zoo
import paceline
from engine_cases import ALL, REPLICATED, data, loss_on, same_on_all_ranks
from model_zoo import max_difference
from paceline.errors import MismatchError, SyncError, UnsyncedGradients, UsageError
from single_process import SGD, one_process, pair, same

EVERY = [*ALL, "auto"]
WHOLE = [*REPLICATED, "sharded", "auto"]


def reference_step(reference, other, size, step):
    one_process(reference, other, [loss_on(reference, r, step) for r in range(size)])


# 1. zero_grad() is missing (StackOverflow 60335387).


def zero_grad_missing(rank, size, sync):
    """Gradients add up as in one process: once per step, not once per rank; `step()` of shards uses them up."""
    net, reference = model_zoo.build("Plain"), model_zoo.build("Plain")
    model = paceline.DataParallel(net, sync=sync)
    optim = (
        paceline.ShardedOptimizer(model, torch.optim.SGD, **SGD)
        if sync == "sharded"
        else torch.optim.SGD(model.parameters(), **SGD)
    )
    other = torch.optim.SGD(reference.parameters(), **SGD)
    for step in range(4):
        loss_on(model, rank, step).backward()
        optim.step()
        (sum(loss_on(reference, r, step) for r in range(size)) / size).backward()
        other.step()
        if sync == "sharded":
            other.zero_grad()
    return max_difference(model.whole_parameters(), reference.parameters())


@pytest.mark.parametrize("sync", EVERY)
def test_1_gradients_that_were_not_zeroed_count_once(pool, sync):
    same(pool(2).run(zero_grad_missing, sync))


# 2. Ranks draw other initial weights (DDP out of sync).


def other_seeds(rank, size, sync):
    torch.manual_seed(rank)
    model = paceline.DataParallel(model_zoo.Plain().double(), sync=sync)
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, **SGD)
    model.backward(loss_on(model, rank), samples=6)
    optim.step()
    return same_on_all_ranks(model.whole_parameters())


@pytest.mark.parametrize("sync", EVERY)
def test_2_ranks_that_draw_other_weights_start_from_those_of_rank_0(pool, sync):
    assert all(pool(2).run(other_seeds, sync))


# 3. Forward goes to the inner module, around the wrapper (torch's DDP then sends nothing).


def around_the_wrapper(rank, size, sync):
    model, optim, reference, other = pair(sync, model_zoo.Plain)
    for step in range(3):
        loss_on(model.module, rank, step).backward()
        optim.step()
        optim.zero_grad()
        reference_step(reference, other, size, step)
    return max_difference(model.whole_parameters(), reference.parameters())


@pytest.mark.parametrize("sync", WHOLE)
def test_3_a_forward_around_the_wrapper_is_synchronised(pool, sync):
    same(pool(2).run(around_the_wrapper, sync))


# 4.–5. Layers frozen on one rank (PyTorch forum 84911), another dtype on one rank (Lightning Thunder 725).


def unlike_models(rank, size, sync, what):
    net = model_zoo.build("Plain")
    if rank == 1 and what == "frozen":
        net.layers[0].weight.requires_grad_(False)
    if rank == 1 and what == "dtype":
        net.float()
    with pytest.raises(MismatchError, match="rank 1"):
        paceline.DataParallel(net, sync=sync)


@pytest.mark.parametrize("what", ["frozen", "dtype"])
@pytest.mark.parametrize("sync", ["bucketed", "sharded", "full-shard", "auto"])
def test_4_and_5_models_that_differ_between_ranks_are_named(pool, sync, what):
    pool(2).run(unlike_models, sync, what)


# 6. The optimizer holds parameters that are not the model's any more: of a copy, or from before a conversion.


def stale_parameters(rank, size, sync):
    net = model_zoo.build("Plain")
    model, stale = paceline.DataParallel(net, sync=sync), copy.deepcopy(model_zoo.build("Plain"))
    with pytest.raises(UsageError, match="is not one of the model's"):
        paceline.ShardedOptimizer(model, torch.optim.SGD, stale.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="holds no parameter of this model"):
        paceline.NonFiniteGuard(model, torch.optim.SGD(stale.parameters(), lr=0.1))


@pytest.mark.parametrize("sync", EVERY)
def test_6_an_optimizer_of_other_parameters_is_named(pool, sync):
    pool(2).run(stale_parameters, sync)


# 7. Gradient accumulation and unequal batches weight samples unequally (the Transformers library's, 2024).


def unequal_micro_batches(rank, size, sync):
    model, optim, reference, other = pair(sync, model_zoo.Plain)
    for step in range(3):
        counts = [[5, 2], [1, 4]]
        for micro, count in enumerate(counts[rank]):
            model.require_backward_grad_sync = micro == 1
            x, y = data(rank, 10 * step + micro, count)
            model.backward(model_zoo.loss_of(model, "", x, y), samples=count)
        optim.step()
        optim.zero_grad()
        batches = [data(r, 10 * step + m, counts[r][m]) for r in range(size) for m in range(2)]
        x, y = (torch.cat(part) for part in zip(*batches, strict=True))
        one_process(reference, other, [model_zoo.loss_of(reference, "", x, y)])
    return max_difference(model.whole_parameters(), reference.parameters())


@pytest.mark.parametrize("sync", EVERY)
def test_7_micro_batches_count_by_their_samples(pool, sync):
    same(pool(2).run(unequal_micro_batches, sync))


# 8. The flag of the last micro-batch is wrong on one rank.


def flag_left_off(rank, size, sync):
    model, optim, reference, other = pair(sync, model_zoo.Plain)
    for step in range(3):
        model.require_backward_grad_sync = rank == 0 or step != 1
        loss_on(model, rank, step).backward()
        model.require_backward_grad_sync = True
        optim.step()
        optim.zero_grad()
        reference_step(reference, other, size, step)
    return max_difference(model.whole_parameters(), reference.parameters())


@pytest.mark.parametrize("sync", WHOLE)
def test_8_a_rank_that_did_not_synchronise_does_so_in_step(pool, sync):
    same(pool(2).run(flag_left_off, sync))


# 9. step() comes before backward().


def wrong_order(rank, size, sync):
    """Each step takes the gradient of the batch before, and the first none, as in one process."""
    model, optim, reference, other = pair(sync, model_zoo.Plain)
    for step in range(4):
        optim.step()
        optim.zero_grad()
        loss_on(model, rank, step).backward()
        other.step()
        other.zero_grad()
        (sum(loss_on(reference, r, step) for r in range(size)) / size).backward()
    return max_difference(model.whole_parameters(), reference.parameters())


@pytest.mark.parametrize("sync", EVERY)
def test_9_steps_before_backward_are_those_of_one_process(pool, sync):
    same(pool(2).run(wrong_order, sync))


# 10. The scheduler steps before the optimizer.


def scheduler_first(rank, size, sync):
    model, optim, _, _ = pair(sync, model_zoo.Plain)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler.step()
    assert any("lr_scheduler.step()` before `optimizer.step()" in str(each.message) for each in caught)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_on(model, rank).backward()
        optim.step()
        scheduler.step()


@pytest.mark.parametrize("sync", EVERY)
def test_10_a_scheduler_that_steps_first_is_named_by_torch(pool, sync):
    pool(2).run(scheduler_first, sync)


# 11. All ranks, or all epochs, see the same samples in the same order (no DistributedSampler, no set_epoch).


def epochs_served(rank, size):
    loader = paceline.Loader(list(range(40)), batch_size=5)
    return [[number for batch in loader for number in batch.tolist()] for _ in range(2)]


def test_11_ranks_and_epochs_are_dealt_other_samples(pool):
    first, second = pool(2).run(epochs_served)
    for epoch in range(2):
        assert Counter(first[epoch] + second[epoch]) == Counter(range(40))
    assert first[0] != first[1]


# 12. A failed backward is swallowed on one rank, which then steps with what it has.


def swallowed(rank, size, sync):
    model, optim, reference, other = pair(sync, model_zoo.Exploding)
    for step in range(3):
        model.module.broken = step == 1 and rank == 1
        try:
            loss_on(model, rank, step).backward()
        except (FloatingPointError, SyncError):
            assert step == 1
            if rank == 1:
                with pytest.raises(UnsyncedGradients, match="ended in an exception"):
                    optim.step()
            optim.zero_grad()
            continue
        optim.step()
        optim.zero_grad()
        reference_step(reference, other, size, step)
    return max_difference(model.whole_parameters(), reference.parameters())


@pytest.mark.parametrize("sync", WHOLE)
def test_12_a_backward_that_failed_on_one_rank_is_named_and_steps_nobody(pool, sync):
    same(pool(2).run(swallowed, sync))
