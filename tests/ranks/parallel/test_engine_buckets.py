"""Buckets of gradients: views that are never copied, in the order of backward, with late gradients too."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import model_zoo
import paceline
from engine_cases import loss_on, wrapped
from model_zoo import max_difference


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


def writes_in_a_step(rank, size, sync):
    def count(step):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step()
        writing = ("copy_", "clone", "cat", "mul_out", "zero_", "fill_", "add_")
        return sum(
            event.count for event in profile.key_averages() if event.key.removeprefix("aten::") in writing
        )

    model, optim = wrapped(sync)
    bare = model_zoo.build("Plain")
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
def test_a_step_writes_each_gradient_once(pool, sync):
    # seven gradients are copied into their bucket, neither zeroed nor added; the round status is one more copy
    assert max(pool(2).run(writes_in_a_step, sync)) <= 8


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

    model = paceline.DataParallel(Backwards(), sync="overlap")
    model(torch.ones(2, 4)).sum().backward()
    return [names for _, names in model.bucket_plan()]


def test_buckets_follow_the_order_in_which_gradients_become_ready(pool):
    expected = [[f"layers.{index}.weight"] for index in range(4)]
    assert pool(2).run(ready_order) == [expected] * 2


def layers_of_each_bucket(rank, size, sync):
    net = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(8)))  # 1 MiB each
    model = paceline.DataParallel(net, sync=sync)
    model.backward(model(torch.ones(1, 512)).sum())
    return [len(names) for _, names in model.bucket_plan() if names]  # the round status has no names


@pytest.mark.parametrize(
    ("sync", "layers"),
    [
        (paceline.Sync(), [8]),
        (paceline.Sync(bucket_mib=7), [1, 2, 4, 1]),
        (paceline.Sync(bucket_mib=7, shard="optimizer"), [1, 2, 4, 1]),
        (paceline.Sync(bucket_mib=2), [1, 2, 2, 2, 1]),
        (paceline.Sync(bucket_mib=2, overlap=False), [2, 2, 2, 2]),
        (paceline.Sync.of("flat"), [8]),
    ],
)
def test_buckets_double_from_1_mib_to_their_size(pool, sync, layers):
    assert pool(2).run(layers_of_each_bucket, sync) == [layers] * 2


def late_gradient(rank, size, sync):
    class Sometimes(torch.nn.Module):
        """Uses one layer in re-entrant checkpoints, more often in later steps."""

        def __init__(self):
            super().__init__()
            self.first, self.shared = (
                torch.nn.Linear(model_zoo.WIDTH, model_zoo.WIDTH),
                torch.nn.Linear(model_zoo.WIDTH, model_zoo.WIDTH),
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
    model, reference = paceline.DataParallel(Sometimes().double(), sync=sync), None
    torch.manual_seed(0)
    reference = Sometimes().double()
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
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
    return max_difference(model.whole_parameters(), reference.parameters())


@pytest.mark.sweep
@pytest.mark.parametrize("sync", ["overlap", "bucketed", "sharded", "flat"])
def test_gradients_that_arrive_after_their_bucket_was_sent_are_not_lost(pool, sync):
    assert all(gap < 1e-12 for gap in pool(3).run(late_gradient, sync))


def low_precision(rank, size, sync, reduce_dtype):
    torch.manual_seed(0)
    net = torch.nn.Linear(64, 8, bias=False).bfloat16()
    model = paceline.DataParallel(net, sync=sync, reduce_dtype=reduce_dtype)
    paceline.ShardedOptimizer(model, torch.optim.SGD, lr=0.0)
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
    loss_on(net, rank).backward()  # a leftover hook would start a round that never ends
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
