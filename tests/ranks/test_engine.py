"""What people do to a wrapped model, and what must come of it."""

from __future__ import annotations

import gc
import os
import re
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import zoo
from pool import RankError, spawn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from zoo import apart

import paceline as pl
from paceline.errors import BackwardFailed, MismatchError, SyncError, UnsyncedGradients, UsageError

REPLICATED = ["naive", "flat", "overlap", "bucketed"]
ALL = [*REPLICATED, "sharded", "full-shard"]


def data(rank, step=0, n=6):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(n, zoo.WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randn(n, 1, generator=generator, dtype=torch.float64)


def loss_on(model, rank, step=0, name="Plain"):
    return zoo.loss_of(model, name, *data(rank, step))


def wrapped(sync, name="Plain", lr=0.1, **options):
    model = pl.DataParallel(zoo.build(name), sync=sync, **options)
    return model, pl.ShardedOptimizer(model, torch.optim.SGD, lr=lr, momentum=0.9)


def same_on_all_ranks(tensors):
    """Whether every rank holds the same values."""
    flat = torch.cat([tensor.reshape(-1).to(torch.complex128) for tensor in tensors])
    rows = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, flat)
    return all(torch.equal(row, flat) for row in rows)


# ------------------------------------------------------------------ plain loss.backward()


def plain_backward_beside_ddp(rank, size, sync):
    ours, optim = wrapped(sync)
    ddp = DistributedDataParallel(zoo.build("Plain"))
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
    return apart(ours.whole_parameters(), ddp.module.parameters())


@pytest.mark.parametrize("sync", ALL)
def test_plain_backward_does_what_ddp_does(pool, sync):
    assert all(gap < 1e-13 for gap in pool(2).run(plain_backward_beside_ddp, sync))


# ------------------------------------------------------------------ the gate


def skipped_layer(rank, size, sync):
    model, optim = wrapped(sync, "Branches")
    reference = zoo.build("Branches")
    other = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):  # the third branch is taken by few samples, in some steps by none
        loss_on(model, rank, step, "Branches").backward()
        optim.step()
        optim.zero_grad()
        (sum(loss_on(reference, r, step, "Branches") for r in range(size)) / size).backward()
        other.step()
        other.zero_grad()
    return apart(model.whole_parameters(), reference.parameters())


@pytest.mark.parametrize("sync", ALL)
def test_a_layer_skipped_in_some_steps_trains_as_in_one_process(pool, sync):
    assert all(gap < 1e-13 for gap in pool(2).run(skipped_layer, sync))


def equal_backward_beside_ddp(rank, size, sync):
    """model.backward(loss) without samples: ranks count the same, micro-batches add up, as with DDP."""
    ours, optim = wrapped(sync)
    ddp = DistributedDataParallel(zoo.build("Plain"))
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
    return apart(ours.whole_parameters(), ddp.module.parameters())


@pytest.mark.parametrize("sync", ALL)
def test_backward_without_samples_counts_ranks_alike(pool, sync):
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
    return apart(model.whole_parameters(), reference.whole_parameters()), same_on_all_ranks(
        model.whole_parameters()
    )


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


def thawed(rank, size, sync):
    model = pl.DataParallel(zoo.build("Frozen"), sync=sync)
    optim = pl.ShardedOptimizer(model, torch.optim.SGD, [*model.parameters()], lr=0.1)
    model.module.scale.requires_grad_(True)
    loss_on(model, rank).backward()
    with pytest.raises(UnsyncedGradients, match=r"'scale' was frozen"):
        optim.step()


@pytest.mark.parametrize("sync", ALL)
def test_a_parameter_unfrozen_after_wrapping_is_named(pool, sync):
    pool(2).run(thawed, sync)


def wrong_optimizer(rank, size):
    model = pl.DataParallel(zoo.build("Plain"), sync="sharded")
    optim = torch.optim.AdamW(model.parameters())
    loss_on(model, rank).backward()
    with pytest.raises(UsageError, match=r"ShardedOptimizer\(model, torch.optim.AdamW"):
        optim.step()


def test_a_plain_optimizer_on_a_sharded_model_is_refused(pool):
    pool(2).run(wrong_optimizer)


# ------------------------------------------------------------------ failures


def fails_on(rank, size, sync, bad, plain):
    torch.manual_seed(3)
    model = pl.DataParallel(zoo.Exploding().double(), sync=sync)
    optim = pl.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    for step in range(4):
        x, y = data(rank, step)
        model.module.broken = broken = step == 2 and rank in bad
        loss = zoo.loss_of(model, "Exploding", x, y)
        if step == 2:
            run = loss.backward if plain else partial(model.backward, loss, samples=len(x))
            expected = FloatingPointError if broken else BackwardFailed
            message = "injected" if broken else rf"rank {bad[0]}.*exception on rank"
            with pytest.raises(expected, match=message):
                run()
            if broken and plain:
                with pytest.raises(UnsyncedGradients, match="ended in an exception"):
                    optim.step()
            optim.zero_grad()
            continue
        loss.backward() if plain else model.backward(loss, samples=len(x))
        optim.step()
        optim.zero_grad()
    reference = one_process_without_step_2(size)
    return apart(model.whole_parameters(), reference)


def counts_a_filler(rank, size, sync, plain):
    loader = pl.Loader(list(range(20)), batch_size=4, shares=[0.8, 0.2])  # rank 1 runs dry after one step
    model = pl.DataParallel(torch.nn.Linear(1, 1), sync=sync)
    outcomes = []
    for batch in loader:
        loss = model(batch.float()[:, None]).mean()
        try:
            loss.backward() if plain else model.backward(loss)
            outcomes.append((None, ""))
        except SyncError as error:
            outcomes.append((type(error), str(error)))
        model.zero_grad()
    return outcomes


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("sync", ["naive", "bucketed", "sharded"])
def test_a_batch_without_samples_is_never_counted_as_one(pool, sync, plain):
    first, second = pool(2, "paceline").run(counts_a_filler, sync, plain)
    assert [kind for kind, _ in first] == [None, BackwardFailed, BackwardFailed, BackwardFailed]
    assert [kind for kind, _ in second] == [None, SyncError, SyncError, SyncError]
    for step, (_, told) in enumerate(second[1:], start=1):
        assert f"[rank 1, step {step}] backward without samples=" in told
        assert "model.backward(loss, samples=batch.samples)" in told


def one_process_without_step_2(size):
    model = zoo.build("Plain")
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in (0, 1, 3):
        parts = [data(rank, step) for rank in range(size)]
        x, y = (torch.cat(part) for part in zip(*parts, strict=True))
        zoo.loss_of(model, "Plain", x, y).backward()
        optim.step()
        optim.zero_grad()
    return list(model.parameters())


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("bad", [[0], [1], [0, 1, 2]])
@pytest.mark.parametrize("sync", ["naive", "flat", "overlap", "bucketed", "sharded"])
def test_an_exception_in_backward_is_named_and_training_goes_on(pool, sync, bad, plain):
    assert all(gap < 1e-12 for gap in pool(3).run(fails_on, sync, bad, plain))


def peer_gone(rank, size, folder, sync):
    pl.init("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, size=size)
    model, optim = wrapped(sync)
    model.backward(loss_on(model, rank), samples=6)
    optim.step()
    optim.zero_grad()
    if rank == 1:
        os._exit(3)
    loss = loss_on(model, rank)
    with pytest.raises(SyncError, match="another rank ended or stopped answering"):
        model.backward(loss, samples=6)
    (Path(folder) / "told").touch()


@pytest.mark.parametrize("sync", ["bucketed", "sharded"])
def test_a_rank_that_is_gone_is_an_error_that_says_so(tmp_path, sync):
    with pytest.raises(RankError) as caught:
        spawn(peer_gone, 2, str(tmp_path), sync)
    assert list(caught.value.failures) == [1]
    assert (tmp_path / "told").exists()


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
    return apart(model.whole_parameters(), reference.whole_parameters()), len(model.engine._latest)


def test_full_shard_repeats_only_forwards_that_backward_went_through(pool):
    for gap, repeated in pool(2).run(forwards_without_backward):
        assert gap < 1e-12
        assert repeated == 1


def nobody_has_samples(rank, size, sync):
    model, optim = wrapped(sync)
    model.backward(loss_on(model, rank), samples=6)
    optim.step()
    optim.zero_grad()
    before = model.whole_parameters()
    model.backward(None, samples=0)
    optim.step()
    return apart(before, model.whole_parameters()), model.samples


@pytest.mark.parametrize("sync", ALL)
def test_a_step_in_which_no_rank_has_samples_changes_nothing(pool, sync):
    assert pool(2).run(nobody_has_samples, sync) == [(0.0, 0.0)] * 2


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
    reference = zoo.build("Plain")
    losses = [loss_on(reference, r, 0) for r in range(size)]
    if weighted:
        losses = [(6 * a + 2 * loss_on(reference, r, 1)) / 8 for r, a in enumerate(losses)]
    (sum(losses) / size * (1 if weighted else 2)).backward()
    torch.optim.SGD(reference.parameters(), lr=1.0).step()
    return apart(model.whole_parameters(), reference.parameters())


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


# ------------------------------------------------------------------ wrapping


def different_models(rank, size, what):
    torch.manual_seed(rank)
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 4 + (what == "shape" and rank == 2)), torch.nn.BatchNorm1d(4)
    )
    if what == "order" and rank == 1:
        net = torch.nn.Sequential(net[1], net[0])
    if what == "dtype" and rank == 1:
        net.half()
    if what == "frozen" and rank == 2:
        net[0].weight.requires_grad_(False)
    pl.DataParallel(net, sync="flat" if what == "plan" and rank == 1 else "bucketed")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shape", r"rank 2.*'0.weight': shape \[4, 4\].*'0.weight': shape \[5, 4\]"),
        ("order", r"rank 1.*parameter '0.weight': shape \[4, 4\].*parameter '0.weight': shape \[4\]"),
        ("dtype", r"rank 1.*'0.weight'.*float32.*float16"),
        ("frozen", r"rank 2.*'0.weight'.*frozen"),
        ("plan", r"rank 1.*sync plan"),
    ],
)
def test_ranks_with_different_models_are_told_the_parameter_and_the_rank(pool, what, message):
    with pytest.raises(RankError) as caught:
        pool(3).run(different_models, what)
    assert isinstance(caught.value.cause, MismatchError)
    assert len(caught.value.failures) == 3
    assert re.search(message, str(caught.value.cause), re.DOTALL)


def values_after_wrapping(rank, size, sync):
    torch.manual_seed(rank)
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1, dtype=torch.bfloat16)
    )
    net[1].running_mean.fill_(rank + 1)
    model = pl.DataParallel(net, sync=sync)
    whole = model.whole_parameters()
    return same_on_all_ranks(whole), same_on_all_ranks(list(net.buffers())), net[1].running_mean[0].item()


@pytest.mark.parametrize("sync", ALL)
def test_parameters_and_buffers_come_from_rank_0(pool, sync):
    assert pool(2).run(values_after_wrapping, sync) == [(True, True, 1.0)] * 2


def test_sparse_embeddings_are_refused_by_name():
    net = torch.nn.ModuleDict({"words": torch.nn.Embedding(5, 2, sparse=True)})
    with pytest.raises(UsageError, match=r"'words.weight' has sparse gradients"):
        pl.DataParallel(net)


def functional_sparse(rank, size):
    class Words(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(5, 2))

        def forward(self, index):
            return torch.nn.functional.embedding(index, self.table, sparse=True)

    model = pl.DataParallel(Words())
    with pytest.raises(SyncError, match="'table' has a sparse gradient"):
        model(torch.tensor([1, 2])).sum().backward()


def test_sparse_gradients_are_refused_by_name(pool):
    pool(2).run(functional_sparse)


def in_two_groups(rank, size):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = pl.DataParallel(zoo.build("Plain", seed=rank // 2), sync="sharded", group=groups[rank // 2])
    optim = pl.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    model.backward(loss_on(model, rank), samples=6)
    optim.step()
    reference = zoo.build("Plain", seed=rank // 2)
    first = rank // 2 * 2
    sum(loss_on(reference, r) / 2 for r in (first, first + 1)).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    return apart(model.whole_parameters(), reference.parameters())


def test_groups_of_ranks_train_apart(pool):
    assert all(gap < 1e-13 for gap in pool(4).run(in_two_groups))


def along_a_mesh_axis(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "data"))
    model = pl.DataParallel(zoo.build("Plain"), group=mesh["data"])
    model.backward(loss_on(model, rank), samples=6)
    return model.wire.size, model.samples


def test_the_data_axis_of_a_device_mesh_is_a_group(pool):
    assert pool(4).run(along_a_mesh_axis) == [(2, 12.0)] * 4


def foreign_unit(rank, size):
    with pytest.raises(UsageError, match="unit Linear is no submodule"):
        pl.DataParallel(zoo.build("Plain"), sync="full-shard", units=[torch.nn.Linear(2, 2)])


def test_units_must_be_submodules(pool):
    pool(2).run(foreign_unit)


# ------------------------------------------------------------------ buckets


def gradients_are_views(rank, size, sync):
    model, _ = wrapped(sync)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = set()
    for step in range(4):
        model.backward(loss_on(model, rank, step), samples=6)
        seen.add(tuple(param.grad.data_ptr() for param in model.parameters()))
        inside = all(
            param.grad is slot.view
            for param, slot in zip(model.parameters(), model.engine.slots, strict=True)
        )
        optim.step()
        optim.zero_grad(set_to_none=True)
    return len(seen), inside, len(model.bucket_plan())


@pytest.mark.parametrize(("sync", "buckets"), [("flat", 1), ("bucketed", 1), ("naive", 7), ("overlap", 7)])
def test_gradients_stay_views_through_zero_grad(pool, sync, buckets):
    assert pool(2).run(gradients_are_views, sync) == [(1, True, buckets)] * 2


def copies_in_a_step(rank, size, sync):
    def count(step):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step()
        copying = ("aten::copy_", "aten::clone", "aten::cat", "aten::_foreach_copy_", "aten::mul_out")
        return sum(event.count for event in profile.key_averages() if event.key in copying)

    model, optim = wrapped(sync)
    bare = zoo.build("Plain")
    bare_optim = torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9)

    def ours():
        model.backward(loss_on(model, rank), samples=6)
        optim.step()
        optim.zero_grad()

    def alone():
        loss_on(bare, rank).backward()
        bare_optim.step()
        bare_optim.zero_grad()

    for step in (ours, ours, alone, alone):
        step()
    return count(ours) - count(alone)


@pytest.mark.parametrize("sync", ["flat", "bucketed", "overlap", "sharded"])
def test_a_step_copies_no_gradient(pool, sync):
    # the ledger is written by one copy of its own; seven gradients would be seven more
    assert max(pool(2).run(copies_in_a_step, sync)) <= 1


def ready_order(rank, size):
    class Backwards(torch.nn.Module):
        """Uses its layers in the reverse order of registration."""

        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(4))

        def forward(self, x):
            for layer in reversed(self.layers):
                x = layer(x)
            return x

    model = pl.DataParallel(Backwards(), sync="overlap")
    model(torch.ones(2, 4)).sum().backward()
    return [names for _, names in model.bucket_plan()]


def test_buckets_follow_the_order_in_which_gradients_become_ready(pool):
    expected = [[f"layers.{index}.weight"] for index in range(4)]
    assert pool(2).run(ready_order) == [expected] * 2


def late_gradient(rank, size, sync):
    class Sometimes(torch.nn.Module):
        """Uses one layer in re-entrant checkpoints, more often in later steps."""

        def __init__(self):
            super().__init__()
            self.first, self.shared = (
                torch.nn.Linear(zoo.WIDTH, zoo.WIDTH),
                torch.nn.Linear(zoo.WIDTH, zoo.WIDTH),
            )
            self.times = 1

        def forward(self, x):
            x = self.first(x)
            for _ in range(self.times):
                x = torch.utils.checkpoint.checkpoint(
                    lambda z: torch.tanh(self.shared(z)), x, use_reentrant=True
                )
            return x.sum(1, keepdim=True)

    torch.manual_seed(0)
    model, reference = pl.DataParallel(Sometimes().double(), sync=sync), None
    torch.manual_seed(0)
    reference = Sometimes().double()
    optim = pl.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    other = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(5):
        model.module.times = reference.times = 1 + step + (rank if step == 3 else 0)
        model.backward(loss_on(model, rank, step), samples=6)
        optim.step()
        optim.zero_grad()
        losses = []
        for r in range(size):
            reference.times = 1 + step + (r if step == 3 else 0)
            losses.append(loss_on(reference, r, step) / size)
            losses[-1].backward()
        other.step()
        other.zero_grad()
    return apart(model.whole_parameters(), reference.parameters())


@pytest.mark.parametrize("sync", ["overlap", "bucketed", "sharded", "flat"])
def test_gradients_that_come_after_their_bucket_left_are_not_lost(pool, sync):
    assert all(gap < 1e-12 for gap in pool(3).run(late_gradient, sync))


def low_precision(rank, size, sync, reduce_dtype):
    torch.manual_seed(0)
    net = torch.nn.Linear(64, 8, bias=False).bfloat16()
    model = pl.DataParallel(net, sync=sync, reduce_dtype=reduce_dtype)
    pl.ShardedOptimizer(model, torch.optim.SGD, lr=0.0)
    for micro in range(32):
        torch.manual_seed(1000 * rank + micro)
        x = torch.randn(4, 64).bfloat16()
        with model.accumulate():
            model.backward(model(x).float().square().mean(), samples=4)
    model.engine.synchronise()
    exact = torch.zeros(8, 64, dtype=torch.float64)
    weight = net.weight.detach().double().requires_grad_()
    for r in range(size):
        for micro in range(32):
            torch.manual_seed(1000 * r + micro)
            x = torch.randn(4, 64).bfloat16().double()
            (exact_part,) = torch.autograd.grad((x @ weight.t()).square().mean(), weight)
            exact += exact_part / (32 * size)
    shown = model.engine.slots[0].view
    return (
        ((shown.double() - exact).norm() / exact.norm()).item(),
        str(shown.dtype),
        net.weight.grad.dtype == net.weight.dtype,
    )


def test_bf16_gradients_are_accumulated_in_float32_on_request(pool):
    rough = pool(2).run(low_precision, "bucketed", None)
    fine = pool(2).run(low_precision, "bucketed", torch.float32)
    assert all(shown == "torch.bfloat16" and same for _, shown, same in rough)
    assert all(shown == "torch.float32" and same for _, shown, same in fine)
    assert max(error for error, *_ in fine) < 0.5 * min(error for error, *_ in rough)


def forgotten(rank, size):
    model, optim = wrapped("bucketed")
    model.backward(loss_on(model, rank), samples=6)
    net, engine = model.module, weakref.ref(model.engine)
    del model, optim
    gc.collect()
    net.zero_grad()
    loss_on(net, rank).backward()  # a hook left behind would start a round that nobody ends
    hooked = [p for p in net.parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    return engine() is None and not hooked


def test_a_model_that_is_dropped_leaves_no_hooks(pool):
    assert all(pool(2).run(forgotten))


def timings(rank, size, sync):
    model, optim = wrapped(sync)
    for _ in range(3):
        model.backward(loss_on(model, rank), samples=6)
        optim.step()
        optim.zero_grad()
    seen = model.timings
    return seen.calls, len(seen.call_seconds), seen.nbytes > 0, seen.exposed_seconds > 0


@pytest.mark.parametrize(("sync", "calls"), [("naive", 7), ("flat", 1), ("overlap", 7), ("bucketed", 1)])
def test_timings_count_collectives(pool, sync, calls):
    assert pool(2).run(timings, sync) == [(calls, calls, True, True)] * 2
