"""Communication hooks: what `DistributedDataParallel` and `DataParallel` give them, and what their results become."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import model_zoo
import paceline
from engine_cases import data, loss_on, same_on_all_ranks, wrapped
from model_zoo import max_difference
from paceline.errors import SyncError, UsageError
from rank_pool import RankError

OursDDP = paceline.DistributedDataParallel


def train(kind, rank, name, hook=None, steps=4):
    model = kind(model_zoo.build(name))
    if hook is not None:
        model.register_comm_hook(*hook(model))
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        loss_on(model, rank, step, name).backward()
        optim.step()
        optim.zero_grad()
    return list(model.parameters())


def averaging(state, bucket):
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def waiting(state, bucket):
    dist.all_reduce(bucket.buffer())
    return bucket.buffer() / dist.get_world_size()


HOOKS = {
    "all-reduce": lambda model: (None, default_hooks.allreduce_hook),
    "float16": lambda model: (None, default_hooks.fp16_compress_hook),
    "a wrapper": lambda model: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "PowerSGD": lambda model: (
        powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2),
        powerSGD_hook.powerSGD_hook,
    ),
    "post-local SGD": lambda model: (
        post_localSGD_hook.PostLocalSGDState(
            None, dist.new_subgroups_by_enumeration([[r] for r in range(dist.get_world_size())])[0], 2
        ),
        post_localSGD_hook.post_localSGD_hook,
    ),
    "the program's own": lambda model: (None, averaging),
}


def hook_beside_torch(rank, size, name):
    ours, theirs = (train(kind, rank, "Tied", HOOKS[name]) for kind in (OursDDP, TorchDDP))
    return max_difference(ours, theirs)


@pytest.mark.sweep
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_give_what_they_give_in_torchs_class(pool, name):
    assert all(gap < 1e-12 for gap in pool(2).run(hook_beside_torch, name))


def bfloat16_hook(rank, size):
    hooked = train(OursDDP, rank, "Plain", lambda model: (None, default_hooks.bf16_compress_hook), 1)
    plain = train(OursDDP, rank, "Plain", steps=1)
    return same_on_all_ranks(hooked), max_difference(hooked, plain)


def test_the_bfloat16_hook_works_on_cpus(pool):
    for same, gap in pool(2).run(bfloat16_hook):
        assert same
        assert 0 < gap < 0.01


def built_in_hooks(rank, size):
    gaps = []
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        model = OursDDP(model_zoo.build("Plain"))
        model._register_builtin_comm_hook(kind)
        loss_on(model, rank, 0).backward()
        plain = OursDDP(model_zoo.build("Plain"))
        loss_on(plain, rank, 0).backward()
        gaps.append(
            max_difference([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
        )
    return gaps


def test_built_in_hooks_average(pool):
    for exact, half in pool(2).run(built_in_hooks):
        assert exact < 1e-15
        assert 0 < half < 0.01


def futures_of_its_own(rank, size):
    def doubled(state, bucket):
        future = torch.futures.Future()
        future.set_result([torch.ones_like(bucket.buffer())])
        return future.then(lambda done: done.value()[0] + torch.ones_like(done.value()[0]))

    model = OursDDP(model_zoo.build("Plain"))
    model.register_comm_hook(None, doubled)
    loss_on(model, rank, 0).backward()
    return [set(param.grad.reshape(-1).tolist()) for param in model.parameters()]


def test_a_hooks_own_future_decides(pool):
    for grads in pool(2).run(futures_of_its_own):
        assert all(values == {2.0} for values in grads)


def what_a_hook_sees(rank, size):
    seen = []

    def look(state, bucket):
        named = {id(param): name for name, param in model.module.named_parameters()}
        names = [named[id(param)] for param in bucket.parameters()]
        views = all(
            grad.shape == param.shape
            for grad, param in zip(bucket.gradients(), bucket.parameters(), strict=True)
        )
        whole = sum(grad.numel() for grad in bucket.gradients()) == bucket.buffer().numel()
        seen.append((bucket.index(), bucket.is_last(), names, views, whole))
        return averaging(state, bucket)

    model = OursDDP(model_zoo.build("Plain"), bucket_cap_mb=0.0003)
    model.register_comm_hook(None, look)
    loss_on(model, rank, 0).backward()
    seen.clear()
    loss_on(model, rank, 1).backward()
    return seen


def test_a_hook_sees_each_bucket_once_without_gaps(pool):
    first, second = pool(2).run(what_a_hook_sees)
    assert first == second
    assert [index for index, *_ in first] == list(range(len(first)))
    assert [last for _, last, *_ in first] == [False] * (len(first) - 1) + [True]
    assert len(first) > 1
    assert all(views and whole for *_, views, whole in first)


def wrong_hooks(rank, size, what):
    model = OursDDP(model_zoo.build("Plain"))
    if what == "no function":
        model.register_comm_hook(None, 1)
    elif what == "twice":
        model.register_comm_hook(None, averaging)
        model.register_comm_hook(None, averaging)
    else:
        values = {"a number": lambda bucket: 1, "another size": lambda bucket: torch.zeros(3)}
        model.register_comm_hook(None, lambda state, bucket: values[what](bucket))
        loss_on(model, rank, 0).backward()


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("no function", TypeError, "must be callable"),
        ("twice", SyncError, "can only be called once"),
        ("a number", SyncError, "callback must return a torch.futures.Future object, but got"),
        ("another size", UsageError, r"returned \[3\] for a bucket of"),
    ],
)
def test_wrong_hooks_are_refused(pool, what, error, message):
    with pytest.raises(RankError) as caught:
        pool(2).run(wrong_hooks, what)
    assert isinstance(caught.value.cause, error)
    assert message.replace("\\", "") in str(caught.value.cause)


def registered_late(rank, size):
    model = OursDDP(model_zoo.build("Plain"), bucket_cap_mb=0.0003)
    loss_on(model, rank, 0).backward()
    model.register_comm_hook(None, waiting)
    model.zero_grad()
    loss_on(model, rank, 1).backward()
    plain = OursDDP(model_zoo.build("Plain"))
    loss_on(plain, rank, 1).backward()
    return max_difference([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_a_hook_may_be_registered_after_a_backward_and_return_a_tensor(pool):
    assert all(gap < 1e-15 for gap in pool(2).run(registered_late))


# ------------------------------------------------------------------ DataParallel


def weighted_steps(rank, size, sync, hooked):
    model, optim = wrapped(sync)
    if hooked:
        model.register_comm_hook(None, averaging)
    for step in range(4):
        samples = 2 + 3 * rank + step
        x, y = data(rank, step, samples)
        model.backward(model_zoo.loss_of(model, "Plain", x, y), samples=samples)
        model.clip_grad_norm_(0.5)
        optim.step()
        optim.zero_grad()
    return model.whole_parameters()


def hook_and_weights(rank, size, sync):
    hooked, plain = (weighted_steps(rank, size, sync, each) for each in (True, False))
    return same_on_all_ranks(hooked), max_difference(hooked, plain)


@pytest.mark.sweep
@pytest.mark.parametrize("sync", ["naive", "flat", "bucketed", "sharded"])
def test_a_hook_composes_with_sample_weights(pool, sync):
    for same, gap in pool(2).run(hook_and_weights, sync):
        assert same
        assert gap < 1e-13


def equal_ranks_without_samples(rank, size):
    gaps = []
    for plain_call in (True, False):
        grads = []
        for hooked in (True, False):
            model, _ = wrapped("bucketed")
            if hooked:
                model.register_comm_hook(None, averaging)
            loss = loss_on(model, rank, 0)
            if plain_call:
                loss.backward()
            else:
                model.backward(loss)
            grads.append([param.grad for param in model.parameters()])
        gaps.append(max_difference(*grads))
    return gaps


def test_a_hook_composes_with_both_calls_without_samples(pool):
    for gaps in pool(2).run(equal_ranks_without_samples):
        assert max(gaps) < 1e-15


def in_place(rank, size):
    def hook(state, bucket):
        state.append(bucket.index())
        dist.all_reduce(bucket.buffer())
        bucket.buffer().div_(dist.get_world_size())

    model, _ = wrapped("bucketed")
    seen = []
    model.register_comm_hook(seen, hook)
    loss_on(model, rank, 0).backward()
    return seen, same_on_all_ranks([param.grad for param in model.parameters()])


def test_a_hook_may_write_the_mean_in_place(pool):
    assert pool(2).run(in_place) == [([0], True)] * 2


def accumulated(rank, size):
    calls = []

    def hook(state, bucket):
        calls.append(bucket.index())
        return averaging(state, bucket)

    model, _ = wrapped("bucketed")
    model.register_comm_hook(None, hook)
    with model.accumulate():
        loss_on(model, rank, 0).backward()
        loss_on(model, rank, 1).backward()
    loss_on(model, rank, 2).backward()
    return calls


def test_a_hook_is_called_once_per_bucket_and_round(pool):
    assert pool(2).run(accumulated) == [[0], [0]]


def steps_in_shards(rank, size, registers):
    """Return the parameters after two steps, before and after which a hook is refused."""
    model, optim = wrapped("sharded")
    for step in range(2):
        loss_on(model, rank, step).backward()
        for update in (optim.step, optim.zero_grad):
            if registers:
                with pytest.raises(SyncError, match="after the first backward with a sharded optimizer"):
                    model.register_comm_hook(None, averaging)
            update()
    return model.whole_parameters()


def test_a_hook_is_refused_once_the_optimizer_holds_shards(pool):
    """It would go on with buckets that are no longer the model's."""
    refused, plain = (pool(2).run(steps_in_shards, each) for each in (True, False))
    assert max_difference(refused[0], plain[0]) == 0.0


def refused(rank, size, sync):
    model = paceline.DataParallel(model_zoo.build("Plain"), sync=sync)
    model.register_comm_hook(None, averaging)


@pytest.mark.parametrize("sync", ["auto", "full-shard", paceline.Sync(compression="int8")])
def test_a_hook_is_refused_where_something_else_reduces(pool, sync):
    with pytest.raises(RankError) as caught:
        pool(2).run(refused, sync)
    assert isinstance(caught.value.cause, UsageError)
    assert "register_comm_hook with" in str(caught.value.cause)


def copied_with_its_hook(rank, size):
    def nothing(state, bucket):
        return bucket.buffer()

    model = paceline.DataParallel(model_zoo.build("Plain"))
    model.register_comm_hook(None, nothing)
    made = copy.deepcopy(model)
    del model
    optim = torch.optim.SGD(made.parameters(), lr=0.1)
    for step in range(4):
        loss_on(made, rank, step).backward()
        optim.step()
        optim.zero_grad()
    return same_on_all_ranks(list(made.parameters()))


def test_a_copy_keeps_its_hook_which_may_let_ranks_differ(pool):
    assert pool(2).run(copied_with_its_hook) == [False, False]


def in_another_process_group(rank, size):
    model = OursDDP(model_zoo.build("Plain"))
    calls = []

    def counted(state, bucket):
        calls.append(bucket.index())
        return averaging(state, bucket)

    model.register_comm_hook(None, counted)
    loss_on(model, rank, 0).backward()
    model.zero_grad()
    model._update_process_group(dist.new_group())
    loss_on(model, rank, 1).backward()
    return calls, same_on_all_ranks([param.grad for param in model.parameters()])


def test_a_hook_goes_along_to_another_process_group(pool):
    assert pool(2).run(in_another_process_group) == [([0, 0], True)] * 2


def unpickled_with_its_hook(rank, size):
    model = OursDDP(model_zoo.build("Plain"))
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    grads = []
    for each in (model, pickle.loads(pickle.dumps(model))):
        loss_on(each, rank, 0).backward()
        grads.append([param.grad for param in each.parameters()])
    return max_difference(*grads)


def test_an_unpickled_model_has_its_hook(pool):
    assert pool(2).run(unpickled_with_its_hook) == [0.0, 0.0]
