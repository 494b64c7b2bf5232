"""Uses of a wrapped model beside torch's DDP and one process: the same gradients and parameters."""

from __future__ import annotations

import contextlib
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import model_zoo
import paceline
from engine_cases import ALL, REPLICATED, data, loss_on, same_on_all_ranks, wrapped
from model_zoo import max_difference
from paceline.errors import SyncError, UnsyncedGradients, UsageError
from paceline.parallel.gradient_collectives import Comm

# ------------------------------------------------------------------ plain loss.backward()


def plain_backward_beside_ddp(rank, size, sync):
    ours, optim = wrapped(sync)
    ddp = DistributedDataParallel(model_zoo.build("Plain"))
    theirs = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        with ours.no_sync():
            loss_on(ours, rank, step).backward()
        loss_on(ours, rank, step + 50).backward()
        with ddp.no_sync():
            loss_on(ddp, rank, step).backward()
        loss_on(ddp, rank, step + 50).backward()
        optim.step(), theirs.step()
        optim.zero_grad(), theirs.zero_grad()
    return max_difference(ours.whole_parameters(), ddp.module.parameters())


@pytest.mark.sweep
@pytest.mark.parametrize("sync", ALL)
def test_plain_backward_equals_ddp(pool, sync):
    assert all(gap < 1e-13 for gap in pool(2).run(plain_backward_beside_ddp, sync))


# ------------------------------------------------------------------ the gate


def skipped_layer(rank, size, sync):
    model, optim = wrapped(sync, "Branches")
    reference = model_zoo.build("Branches")
    other = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):  # few samples use the third branch, in some steps none
        loss_on(model, rank, step, "Branches").backward()
        optim.step()
        optim.zero_grad()
        (sum(loss_on(reference, r, step, "Branches") for r in range(size)) / size).backward()
        other.step()
        other.zero_grad()
    return max_difference(model.whole_parameters(), reference.parameters())


@pytest.mark.parametrize("sync", ALL)
def test_a_layer_skipped_in_some_steps_trains_as_in_one_process(pool, sync):
    assert all(gap < 1e-13 for gap in pool(2).run(skipped_layer, sync))


def equal_backward_beside_ddp(rank, size, sync):
    """model.backward(loss) without samples: ranks count the same, micro-batches add up, as with DDP."""
    ours, optim = wrapped(sync)
    ddp = DistributedDataParallel(model_zoo.build("Plain"))
    theirs = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        with ours.accumulate():
            ours.backward(loss_on(ours, rank, step))
        ours.backward(loss_on(ours, rank, step + 50))
        ours.backward(loss_on(ours, rank, step + 70))
        with ddp.no_sync():
            loss_on(ddp, rank, step).backward()
        loss_on(ddp, rank, step + 50).backward()
        loss_on(ddp, rank, step + 70).backward()
        optim.step(), theirs.step()
        optim.zero_grad(), theirs.zero_grad()
    return max_difference(ours.whole_parameters(), ddp.module.parameters())


@pytest.mark.sweep
@pytest.mark.parametrize("sync", ALL)
def test_backward_without_samples_counts_ranks_equally(pool, sync):
    assert all(gap < 1e-13 for gap in pool(3).run(equal_backward_beside_ddp, sync))


def no_sync_around_backward_only(rank, size, sync):
    model, optim = wrapped(sync)
    reference, other = wrapped("naive")
    for step in range(3):
        loss = loss_on(model, rank, step)
        with model.no_sync():
            loss.backward()
        optim.step()
        optim.zero_grad()
        loss_on(reference, rank, step).backward()
        other.step()
        other.zero_grad()
    return max_difference(model.whole_parameters(), reference.whole_parameters()), same_on_all_ranks(
        model.whole_parameters()
    )


@pytest.mark.sweep
@pytest.mark.parametrize("sync", [*REPLICATED, "sharded"])
def test_no_sync_around_only_the_backward_is_made_good_at_step(pool, sync):
    for gap, same in pool(2).run(no_sync_around_backward_only, sync):
        assert gap < 1e-13
        assert same


def flag_toggled(rank, size):
    model, optim = wrapped("bucketed")
    with model.no_sync():
        loss = loss_on(model, rank)
    loss.backward()  # what counts is where backward runs
    optim.step()
    return same_on_all_ranks(model.whole_parameters())


def test_forward_inside_no_sync_and_backward_outside_synchronises(pool):
    assert all(pool(2).run(flag_toggled))


def flag_of_ddp(rank, size, sync, weighted):
    """Accumulate as nanoGPT does; return the rounds, and the gap to torch's DDP."""
    ours, optim = wrapped(sync)
    ddp = DistributedDataParallel(model_zoo.build("Plain"))
    theirs = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        for micro in range(3):
            ours.require_backward_grad_sync = ddp.require_backward_grad_sync = micro == 2
            assert ours.require_backward_grad_sync == (micro == 2)
            loss = loss_on(ours, rank, 10 * step + micro)
            if weighted:
                ours.backward(loss, samples=6)
            else:
                (loss / 3).backward()
            (loss_on(ddp, rank, 10 * step + micro) / 3).backward()
        optim.step(), theirs.step()
        optim.zero_grad(), theirs.zero_grad()
    return ours.engine.step, max_difference(ours.whole_parameters(), ddp.module.parameters())


@pytest.mark.sweep
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sync", [*ALL, "auto"])
def test_require_backward_grad_sync_acts_as_on_ddp(pool, sync, weighted):
    for rounds, gap in pool(2).run(flag_of_ddp, sync, weighted):
        assert rounds == 3
        assert gap < 1e-13


def thawed(rank, size, sync):
    model = paceline.DataParallel(model_zoo.build("Frozen"), sync=sync)
    model.module.scale.requires_grad_(True)
    with pytest.raises(UnsyncedGradients, match=r"'scale' was thawed"):
        loss_on(model, rank).backward()


@pytest.mark.parametrize("sync", ALL)
def test_a_parameter_unfrozen_after_wrapping_is_named(pool, sync):
    pool(2).run(thawed, sync)


def wrong_optimizer(rank, size):
    model = paceline.DataParallel(model_zoo.build("Plain"), sync="sharded")
    optim = torch.optim.AdamW(model.parameters())
    loss_on(model, rank).backward()
    with pytest.raises(UsageError, match=r"ShardedOptimizer\(model, torch.optim.AdamW"):
        optim.step()


def test_a_plain_optimizer_on_a_sharded_model_is_refused(pool):
    pool(2).run(wrong_optimizer)


# ------------------------------------------------------------------ samples


def mixed_calls(rank, size):
    model, _ = wrapped("bucketed")
    loss = loss_on(model, rank)
    run = partial(model.backward, loss, samples=6) if rank == 0 else loss.backward
    with pytest.raises(
        SyncError, match=r"ranks \[0\] called model.backward.*ranks \[1\] called loss.backward"
    ):
        run()
    with model.accumulate():
        model.backward(loss_on(model, rank), samples=6)
    with pytest.raises(SyncError, match="mixed in one gradient"):
        loss_on(model, rank).backward()


def test_mixing_weighted_and_plain_backward_is_an_error(pool):
    pool(2).run(mixed_calls)


@contextlib.contextmanager
def means_divide_first():
    """Make all-reduce on gloo average as NCCL does: each rank's numbers are divided before they are added."""
    all_reduce = dist.all_reduce

    def divided(flat, op=dist.ReduceOp.SUM, **options):
        if op == dist.ReduceOp.AVG:
            flat.div_(dist.get_world_size())
        return all_reduce(flat, op=dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op, **options)

    with (
        mock.patch.object(dist, "all_reduce", divided),
        mock.patch.object(Comm, "divides_before_sum", return_value=True),
    ):
        yield


def mixed_calls_divided_first(rank, size, sync, calls, round_of_mistake):
    model, _ = wrapped(sync)
    with means_divide_first():
        for step in range(round_of_mistake):
            loss_on(model, rank, step).backward()
            model.zero_grad()
        run = {
            "plain": lambda loss: loss.backward(),
            "share": model.backward,
            "samples": partial(model.backward, samples=6),
        }[calls[rank]]
        with pytest.raises(SyncError, match=r"ranks \[1\] called"):
            run(loss_on(model, rank))


@pytest.mark.sweep
@pytest.mark.parametrize("round_of_mistake", [0, 1])
@pytest.mark.parametrize(
    "calls", [("plain", "samples"), ("samples", "plain"), ("plain", "share"), ("share", "samples")]
)
@pytest.mark.parametrize("sync", REPLICATED)
def test_mixed_calls_are_found_where_means_divide_first(pool, sync, calls, round_of_mistake):
    pool(2).run(mixed_calls_divided_first, sync, calls, round_of_mistake)


def trained_where_means_divide_first(rank, size, sync):
    with means_divide_first():
        return plain_backward_beside_ddp(rank, size, sync)


@pytest.mark.parametrize("sync", REPLICATED)
def test_plain_backward_equals_ddp_where_means_divide_first(pool, sync):
    assert all(gap < 1e-13 for gap in pool(3).run(trained_where_means_divide_first, sync))


def forwards_without_backward(rank, size):
    def step(model, has_data):
        model.backward(loss_on(model, rank) if has_data else None, samples=6 if has_data else 0)

    (model, optim), (reference, other) = wrapped("full-shard"), wrapped("naive")
    step(model, True)
    kept = [loss_on(model, rank) for _ in range(3)]  # an evaluation that forgot no_grad
    optim.zero_grad()
    step(model, rank == 0)
    optim.step()
    step(reference, rank == 0)
    other.step()
    del kept
    return max_difference(model.whole_parameters(), reference.whole_parameters()), len(model.engine._latest)


def test_full_shard_repeats_only_forwards_that_backward_went_through(pool):
    for gap, repeated in pool(2).run(forwards_without_backward):
        assert gap < 1e-12
        assert repeated == 1


def no_rank_has_samples(rank, size, sync):
    model, optim = wrapped(sync)
    model.backward(loss_on(model, rank), samples=6)
    optim.step()
    optim.zero_grad()
    before = model.whole_parameters()
    model.backward(None, samples=0)
    optim.step()
    return max_difference(before, model.whole_parameters()), model.samples


@pytest.mark.parametrize("sync", ALL)
def test_a_step_in_which_no_rank_has_samples_changes_nothing(pool, sync):
    assert pool(2).run(no_rank_has_samples, sync) == [(0.0, 0.0)] * 2


class ScalesSome(torch.nn.Module):
    """Has a scalar, which FSDP2 can't shard, and uses it for positive batches only."""

    def __init__(self):
        super().__init__()
        self.head, self.scale = torch.nn.Linear(4, 2), torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        out = self.head(x)
        return out * self.scale if x.sum() > 0 else out


def unused_but_repeated(rank, size):
    model = paceline.DataParallel(ScalesSome(), sync="full-shard")
    model.backward(model(torch.ones(3, 4)).sum(), samples=3)
    model.zero_grad()
    if rank == 0:
        model.backward(model(-torch.ones(3, 4)).sum(), samples=3)
    else:  # repeats its latest forward, which used the scalar
        model.backward(None, samples=0)
    return model.module.scale.grad


def test_a_rank_without_data_uses_no_parameter_that_no_other_uses(pool):
    assert pool(2).run(unused_but_repeated) == [None, None]


def passes_over_gradients(rank, size):
    """Count multiplications in place in one backward: with the total of the last one, and with another."""
    model, optim = wrapped("flat")
    counts = []
    for samples in (6, 6, 6, 5):
        loss = loss_on(model, rank)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model.backward(loss, samples=samples)
        scaling = ("aten::mul_", "aten::_foreach_mul_")
        counts.append(sum(event.count for event in profile.key_averages() if event.key in scaling))
        optim.zero_grad()
    return counts[2:]


def test_equal_totals_cost_no_pass_over_the_gradients(pool):
    assert pool(2).run(passes_over_gradients) == [[0, 1]] * 2


def backward_twice(rank, size, sync, weighted):
    model, optim = wrapped(sync, lr=1.0)
    loss = loss_on(model, rank)
    if weighted:
        model.backward(loss, samples=6, retain_graph=True)
        model.backward(loss_on(model, rank, 1), samples=2)
    else:
        loss.backward(retain_graph=True)
        loss.backward()
    optim.step()
    reference = model_zoo.build("Plain")
    losses = [loss_on(reference, r, 0) for r in range(size)]
    if weighted:
        losses = [(6 * a + 2 * loss_on(reference, r, 1)) / 8 for r, a in enumerate(losses)]
    (sum(losses) / size * (1 if weighted else 2)).backward()
    torch.optim.SGD(reference.parameters(), lr=1.0).step()
    return max_difference(model.whole_parameters(), reference.parameters())


@pytest.mark.sweep
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sync", ALL)
def test_gradients_accumulate_over_synchronised_backwards(pool, sync, weighted):
    assert all(gap < 1e-13 for gap in pool(3).run(backward_twice, sync, weighted))


def bad_arguments(rank, size):
    model, _ = wrapped("bucketed")
    with pytest.raises(UsageError, match="pass the number of samples"):
        model.backward(loss_on(model, rank), samples=-1)
    with pytest.raises(UsageError, match="samples=0"):
        model.backward(None)
    with pytest.raises(UsageError, match=r"shape \[6, 1\]"):
        model.backward(model(data(rank)[0]), samples=6)
    with pytest.raises(UsageError, match="above 0"):
        model.clip_grad_norm_(0)


def test_wrong_arguments_are_refused_before_anything_is_sent(pool):
    pool(2).run(bad_arguments)
