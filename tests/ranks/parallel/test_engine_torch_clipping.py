"""torch's own functions on the gradients of sharded models: exact, or refused by name; never a silent 0."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import model_zoo
import paceline
from engine_cases import loss_on, same_on_all_ranks, wrapped
from model_zoo import max_difference
from paceline.errors import UsageError


def beside_one_process(rank, size, sync, clip, name, options):
    model, optim = wrapped(sync, name, **options)
    reference = model_zoo.build(name)
    other = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    gaps = []
    for step in range(4):
        loss_on(model, rank, step, name).backward()
        (sum(loss_on(reference, r, step, name) for r in range(size)) / size).backward()
        ours, theirs = clip(list(model.parameters())), clip(list(reference.parameters()))
        if theirs is not None:
            ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
            gaps.append(abs(ours.item() - theirs.item()))
        optim.step(), other.step()
        optim.zero_grad(), other.zero_grad()
    gaps.append(max_difference(model.whole_parameters(), reference.parameters()))
    return max(gaps), same_on_all_ranks(model.whole_parameters())


def by_norm(params):
    return clip_grad_norm_(params, 0.3)


def by_largest(params):
    return clip_grad_norm_(params, 0.05, math.inf)


def by_1_norm(params):
    return clip_grad_norm_((param for param in params), 0.5, 1.0)


def by_value(params):
    clip_grad_value_(params, 0.02)


def some_of_them(params):
    """Two groups with a limit each, and the norm of one parameter."""
    clip_grad_norm_(params[:3], 0.1), clip_grad_norm_(params[3:], 0.2)
    return params[0].grad.norm()


def in_two_calls(params):
    norm = get_total_norm([param.grad for param in params if param.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(params, 0.3, norm)
    clip_grad_norm_(params, 0.1)
    return get_total_norm([param.grad for param in params if param.grad is not None])


def by_hand(params):
    """Clip as many training scripts do."""
    total = sum(param.grad.data.norm(2).item() ** 2 for param in params if param.grad is not None) ** 0.5
    for param in params:
        if param.grad is not None:
            param.grad.data.mul_(min(1.0, 0.3 / (total + 1e-6)))
    return torch.tensor(total)


def in_foreach(params):
    clip_grad_value_(params, 0.02, foreach=True)
    return clip_grad_norm_(params, 0.03, foreach=True)


CLIPS = [by_norm, by_largest, by_1_norm, by_value, some_of_them, in_two_calls, by_hand, in_foreach]


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["Plain", "Branches", "Strided"])
@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: clip.__name__)
def test_torch_clips_sharded_gradients_as_whole_ones(pool, clip, name):
    if name == "Strided" and clip in (by_value, by_largest, in_foreach):
        name = "Tied"  # torch can't clamp complex numbers, and an empty tensor has no largest element
    for gap, same in pool(2).run(beside_one_process, "sharded", clip, name, {}):
        assert gap < 1e-9
        assert same


def rounded_and_weighted(rank, size):
    """bf16 parameters reduced in float32, more parameters than a rank holds shards of, and weights."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 1)).bfloat16()
    model = paceline.DataParallel(net, sync="sharded", reduce_dtype=torch.float32)
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    x = torch.randn(4, 6, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(rank))
    model.backward(model(x).square().mean(), samples=4)
    grads = [param.grad for param in model.parameters()]
    norm = get_total_norm(grads)
    exact = model.clip_grad_norm_(math.inf)
    model.clip_grad_norm_(exact.item() / 2)
    halved = clip_grad_norm_(model.parameters(), math.inf)
    optim.step()
    return (
        abs(norm.item() / exact.item() - 1),
        abs(halved.item() / exact.item() - 0.5),
        same_on_all_ranks(net.parameters()),
    )


def test_torch_and_paceline_clip_alike(pool):
    for gap, other, same in pool(2).run(rounded_and_weighted):
        assert gap < 1e-6
        assert other < 1e-5
        assert same


def refused(rank, size):
    model, optim = wrapped("sharded")
    loss_on(model, rank).backward()
    grad = model.module.scale.grad
    assert repr(grad) == "ShardedGradient('scale', shape=[])"
    for use in (grad.item, lambda: grad + 1, lambda: grad.copy_(torch.ones(())), grad.abs, grad.isnan):
        with pytest.raises(
            UsageError, match=r"'scale', of which every rank holds a shard\n.*model.clip_grad_norm_"
        ):
            use()
    with pytest.raises(UsageError, match=r"'layers.0.weight'"):
        torch.cat([param.grad.flatten() for param in model.module.layers.parameters()])
    optim.step()
    return model.module.scale.grad is None and same_on_all_ranks(model.whole_parameters())


def test_what_needs_a_whole_gradient_is_refused_by_name(pool):
    assert pool(2).run(refused) == [True, True]


def kept_and_dropped(rank, size, via):
    """A second backward adds to kept shards, and starts from zero without them, also past the wrapper."""
    model, _ = wrapped("sharded")
    reference = model_zoo.build("Plain")
    loss_on(model, rank).backward()
    (sum(loss_on(reference, r) for r in range(size)) / size).backward()
    if via == "zero_grad":
        model.module.zero_grad(set_to_none=False), reference.zero_grad()
    loss_on(model.module if via == "past the wrapper" else model, rank, 1).backward()
    (sum(loss_on(reference, r, 1) for r in range(size)) / size).backward()
    return abs(clip_grad_norm_(model.parameters(), 1.0) - clip_grad_norm_(reference.parameters(), 1.0)).item()


@pytest.mark.parametrize("via", ["kept", "zero_grad", "past the wrapper"])
def test_kept_shards_count_in_the_next_backward(pool, via):
    assert all(gap < 1e-12 for gap in pool(2).run(kept_and_dropped, via))


def scaled(rank, size, poisoned):
    """torch's GradScaler: unscales the shards, and all ranks skip a step if one shard is not finite."""
    model, optim = wrapped("sharded")
    reference = model_zoo.build("Plain")
    other = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(4):
        bad = poisoned and step == 1
        scaler.scale(loss_on(model, rank, step) * (math.inf if bad and rank == 1 else 1)).backward()
        torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])  # of scaled gradients
        scaler.unscale_(optim)
        norm = clip_grad_norm_(model.parameters(), 0.3)
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()
        if not bad:
            (sum(loss_on(reference, r, step) for r in range(size)) / size).backward()
            assert abs(norm - clip_grad_norm_(reference.parameters(), 0.3)) < 1e-6
            other.step()
            other.zero_grad()
    return max_difference(model.whole_parameters(), reference.parameters()), scaler.get_scale()


@pytest.mark.parametrize("poisoned", [False, True])
def test_grad_scaler_unscales_shards(pool, poisoned):
    for gap, scale in pool(2).run(scaled, poisoned):
        assert gap < 1e-6
        assert scale == (32.0 if poisoned else 64.0)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["Tied", "Plain"])  # FSDP2 does not shard the scalar of the latter
@pytest.mark.parametrize("clip", [by_norm, by_value, in_two_calls], ids=lambda clip: clip.__name__)
def test_torch_clips_gradients_of_fsdp2_exactly(pool, clip, name):
    for gap, same in pool(2).run(beside_one_process, "full-shard", clip, name, {}):
        assert gap < 1e-9
        assert same
