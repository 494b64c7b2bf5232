"""ZeRO-2: a bucket's gradients are freed once they are reduced, and results are those of ZeRO-1."""

from __future__ import annotations

import pytest
import torch

import model_zoo
import paceline
from model_zoo import max_difference
from paceline.parallel.buckets.bucket import Bucket

WIDTH, LAYERS = 256, 8  # 256 KiB of gradients per layer


def layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def held_nbytes(model):
    return sum(bucket.flat.untyped_storage().nbytes() for bucket in model.engine.buckets if bucket.slots)


def most_held(rank, size, shard):
    """Return the most bytes of buckets during the third backward, what is left after it, and the bytes of all."""
    model = paceline.DataParallel(layers(), sync=paceline.Sync(0.25, shard=shard))
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3)
    seen = []
    keep, hold = Bucket.keep_own, Bucket.hold

    def watched(method):
        def call(bucket):
            method(bucket)
            seen.append(held_nbytes(model))

        return call

    for step in range(3):
        if step == 2:
            Bucket.keep_own, Bucket.hold = watched(keep), watched(hold)
        model.backward(model(torch.randn(3, WIDTH)).square().mean(), samples=3)
        if step == 2:
            Bucket.keep_own, Bucket.hold = keep, hold
            optim.step()
            return max(seen), held_nbytes(model), sum(param.nbytes for param in model.parameters())
        optim.step()
    raise AssertionError("the third step returns")


def test_no_more_than_three_buckets_are_held(pool):
    for most, left, total in pool(2).run(most_held, "gradients"):
        assert most <= 3 * total / LAYERS
        assert left == 0
    for most, left, total in pool(2).run(most_held, "optimizer"):
        assert (most, left) == (total, total)


def accumulated_and_kept(rank, size, shard, dtype):
    """Return the parameters after steps with accumulation, and with gradients that the next round carries."""
    model = paceline.DataParallel(model_zoo.build("Plain").to(dtype), sync=paceline.Sync(0.001, shard=shard))
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=0.02)
    for step in range(6):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(3 + rank, model_zoo.WIDTH, generator=generator).to(dtype)
        y = torch.randn(3 + rank, 1, generator=generator).to(dtype)
        with model.accumulate():
            model.backward(model_zoo.loss_of(model, "Plain", x, y), samples=len(x))
        model.backward(model_zoo.loss_of(model, "Plain", y.expand(-1, model_zoo.WIDTH), y), samples=len(x))
        model.clip_grad_norm_(0.5)
        if step % 3:  # else the next round carries the gradient
            optim.step()
            optim.zero_grad()
    return model.whole_parameters()


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_accumulation_and_kept_gradients_give_the_bits_of_zero_1(pool, backend):
    one, two = (
        pool(2, backend).run(accumulated_and_kept, shard, torch.float64)
        for shard in ("optimizer", "gradients")
    )
    for ours, theirs in zip(two, one, strict=True):
        assert max_difference(ours, theirs) == 0.0


def test_the_alias():
    assert paceline.Sync.of("zero2") == paceline.Sync(shard="gradients")
    assert paceline.Sync(shard="gradients").name == "sharded-gradients"
