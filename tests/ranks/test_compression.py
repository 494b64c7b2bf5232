"""Compressed gradients: the same result on all ranks, close to the exact one, and nothing is lost for good."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import paceline as pl

NAMES = ["bf16", "fp16", "int8", "int4"]
BITS = {"bf16": 16, "fp16": 16, "int8": 8, "int4": 4}
ERRORS = {"bf16": 0.005, "fp16": 0.001, "int8": 0.01, "int4": 0.2}
SPARSE = pl.Compression("topk", keep=0.1)
DEEP = pl.Compression("topk", keep=0.02, momentum=0.9, warmup=6)
THIN = pl.Compression("powersgd", rank=4, warmup=2)


def network(dtype=torch.float32):
    """Return a model with matrices that are compressed and vectors that are not, the same everywhere."""
    torch.manual_seed(3)
    layers = [
        nn.Embedding(50, 64),
        nn.Flatten(),
        nn.Linear(256, 120),
        nn.LayerNorm(120),
        nn.Tanh(),
        nn.Linear(120, 40),
    ]
    return nn.Sequential(*layers).to(dtype)


def loss_of(model, rank, step, size=8):
    generator = torch.Generator().manual_seed(7919 * rank + step)
    inputs = torch.randint(0, 50, (size, 4), generator=generator)
    targets = torch.randint(0, 40, (size,), generator=generator)
    return functional.cross_entropy(model(inputs).float(), targets)


def flat(tensors):
    return torch.cat([each.detach().reshape(-1).double() for each in tensors])


def grads(model):
    return flat(param.grad for param in model.parameters())


def train(rank, size, compression, shard, bucket_mib, steps, dtype=torch.float32):
    """Train with unequal batches and accumulation; return parameters, the last loss, and what compression says."""
    plan = pl.Sync(bucket_mib=bucket_mib, shard=shard, compression=compression)
    model = pl.DataParallel(network(dtype), sync=plan)
    optim = pl.ShardedOptimizer(model, torch.optim.AdamW, lr=3e-3)
    for step in range(steps):
        samples = 4 + (3 * rank + step) % 5
        if step % 3 == 2:
            with model.accumulate():
                model.backward(loss_of(model, rank, 100 + step, 2), samples=2)
        if step % 4 == 3 and rank == 0:
            model.backward(None, samples=0)
        else:
            model.backward(loss_of(model, rank, step, samples), samples=samples)
        model.clip_grad_norm_(5.0)
        optim.step()
        optim.zero_grad()
    held_out = sum(float(loss_of(model.module, 50, 5000 + step)) for step in range(4)) / 4
    return flat(model.parameters()), held_out, model.loads()


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
@pytest.mark.parametrize("shard", ["none", "optimizer"])
@pytest.mark.parametrize("compression", NAMES)
def test_all_ranks_get_the_same_and_nearly_the_exact_one(pool, backend, shard, compression):
    exact = pool(3, backend).run(train, None, shard, 0.05, 24)
    ours = pool(3, backend).run(train, compression, shard, 0.05, 24)
    assert all(torch.equal(ours[0][0], other) for other, *_ in ours)
    assert ours[0][1] == pytest.approx(exact[0][1], rel=0.05)
    assert not exact[0][2]
    loads = ours[0][2]
    assert len(loads) > 1, "several buckets, the exempt ones beside them"
    assert not any(name.startswith("3.") or name.endswith("bias") for load in loads for name in load.names)
    for load in loads:
        if load.nbytes > 50_000:
            assert load.sent_nbytes < 1.08 * load.uncompressed_nbytes * BITS[compression] / 32
        assert 0 < load.error < ERRORS[compression]


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
@pytest.mark.parametrize("shard", ["none", "optimizer"])
@pytest.mark.parametrize("compression", [SPARSE, DEEP, THIN], ids=lambda each: each.name)
def test_what_sends_a_part_only_is_the_same_on_all_ranks_and_learns(pool, backend, shard, compression):
    first = pool(3, backend).run(train, None, shard, 0.05, 1)[0][1]
    ours = pool(3, backend).run(train, compression, shard, 0.05, 24)
    assert all(torch.equal(ours[0][0], other) for other, *_ in ours)
    assert ours[0][1] < first
    for load in ours[0][2]:
        assert load.sent_nbytes < 0.75 * load.uncompressed_nbytes


@pytest.mark.parametrize("compression", ["int8", "int4"])
def test_low_precision_parameters_are_compressed_too(pool, compression):
    results = pool(2).run(train, compression, "none", 25, 6, torch.bfloat16)
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][2][0].nbytes == 2 * sum(p.numel() for p in network().parameters() if p.dim() > 1)


def accumulated(rank, size, compression, uneven, call):
    """Return the sum of all results, of all exact results, and of what this rank has left out, by parameter."""
    squeezed = pl.DataParallel(network(), sync=pl.Sync(bucket_mib=0.05, compression=compression))
    exact = pl.DataParallel(network(), sync="bucketed")
    totals = []
    for step in range(12):
        for model, total in ((squeezed, 0), (exact, 1)):
            samples = 1 + 3 * ((rank + step) % size) if uneven else 4
            loss = loss_of(model, rank, step, samples)
            if call == "samples":
                model.backward(loss, samples=samples)
            elif call == "share":
                model.backward(loss)
            else:
                loss.backward()
            if len(totals) <= total:
                totals.append(torch.zeros_like(grads(model)))
            totals[total] += grads(model)
            model.zero_grad()
    parts = squeezed.engine.leftovers.state()["parts"]
    return totals, {name: kept["residual"].double() for name, kept in parts.items()}


@pytest.mark.parametrize("call", ["samples", "share", "plain"])
@pytest.mark.parametrize(
    "compression", ["int8", "int4", pl.Compression("bf16", feedback=True), SPARSE, THIN], ids=str
)
def test_what_was_sent_and_what_is_left_out_make_up_what_was_given(pool, compression, call):
    """Also where ranks have other samples in every step, and results are scaled after the sum."""
    results = pool(3).run(accumulated, compression, call == "samples", call)
    for sent, given in ([sum_ for sum_ in totals] for totals, _ in results):
        assert torch.equal(sent, results[0][0][0])
        left = flat(
            sum(parts[name] for _, parts in results) if name in results[0][1] else torch.zeros(param.numel())
            for name, param in network().named_parameters()
        )
        assert left.norm() > 0
        assert torch.allclose(sent + left, given, rtol=0, atol=2e-6 * float(given.abs().max()) * 12)
        assert not torch.allclose(sent, given, rtol=0, atol=0.1 * float(left.abs().max()))
