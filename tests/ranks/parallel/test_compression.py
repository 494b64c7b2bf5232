"""Compressed gradients: the same result on all ranks, close to the exact one, and nothing is lost permanently."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional

import paceline
from paceline.errors import BackwardFailed, MismatchError, UsageError
from paceline.parallel.compression.powersgd import LowRankFactors

NAMES = ["bf16", "fp16", "int8", "int4", "int2"]
BITS = {"bf16": 16, "fp16": 16, "int8": 8, "int4": 4, "int2": 2}
ERRORS = {"bf16": 0.005, "fp16": 0.001, "int8": 0.01, "int4": 0.2, "int2": 0.5}
SPARSE = paceline.Compression("topk", keep=0.1)
DEEP = paceline.Compression("topk", keep=0.02, momentum=0.9, warmup=6)
SPARSER = paceline.Compression("topk-int2")
THIN = paceline.Compression("powersgd", rank=4, warmup=2)


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
    """Train with unequal batches and accumulation; return parameters, the last loss, and the compression statistics."""
    plan = paceline.Sync(bucket_mib=bucket_mib, shard=shard, compression=compression)
    model = paceline.DataParallel(network(dtype), sync=plan)
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=3e-3)
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
    return flat(model.parameters()), held_out, model.compressed_buckets()


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["gloo", "paceline"])
@pytest.mark.parametrize("shard", ["none", "optimizer"])
@pytest.mark.parametrize("compression", NAMES)
def test_all_ranks_get_the_same_and_nearly_the_exact_one(pool, backend, shard, compression):
    exact = pool(3, backend).run(train, None, shard, 0.05, 24)
    ours = pool(3, backend).run(train, compression, shard, 0.05, 24)
    assert all(torch.equal(ours[0][0], other) for other, *_ in ours)
    assert ours[0][1] == pytest.approx(exact[0][1], rel=0.05)
    assert not exact[0][2]
    buckets = ours[0][2]
    assert len(buckets) > 1, "several buckets, the exempt ones beside them"
    assert not any(name.startswith("3.") or name.endswith("bias") for each in buckets for name in each.names)
    for each in buckets:
        if each.nbytes > 50_000:
            assert each.sent_nbytes < 1.08 * each.uncompressed_nbytes * BITS[compression] / 32
        assert 0 < each.error < ERRORS[compression]


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["gloo", "paceline"])
@pytest.mark.parametrize("shard", ["none", "optimizer"])
@pytest.mark.parametrize("compression", [SPARSE, DEEP, SPARSER, THIN], ids=lambda each: each.name)
def test_sparse_compression_is_equal_on_all_ranks_and_learns(pool, backend, shard, compression):
    first = pool(3, backend).run(train, None, shard, 0.05, 1)[0][1]
    ours = pool(3, backend).run(train, compression, shard, 0.05, 24)
    assert all(torch.equal(ours[0][0], other) for other, *_ in ours)
    assert ours[0][1] < first
    changed = {DEEP: 6, THIN: 2}.get(compression, 0)
    for load in ours[0][2]:
        assert load.sent_nbytes < 0.75 * load.uncompressed_nbytes
        assert load.step == changed, "packets became others, so what they leave out was measured anew"
        assert 0 < load.error < 1


def with_slow_exchange_thread(rank, size, shard):
    """Train with other samples in every step, while the second half of each sum takes its time."""
    orthogonalise = LowRankFactors.orthogonalise

    def slowly(factors):
        time.sleep(0.05)
        orthogonalise(factors)

    plan = paceline.Sync(bucket_mib=0.05, shard=shard, compression=paceline.Compression("powersgd"))
    model = paceline.DataParallel(network(), sync=plan)
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    with mock.patch.object(LowRankFactors, "orthogonalise", slowly):
        for step in range(4):
            model.backward(loss_of(model, rank, step, 4 + 3 * step), samples=4 + 3 * step)
            optim.step()
            optim.zero_grad()
    return flat(model.parameters())


def test_a_pending_sum_is_not_scaled(pool):
    """The residual is scaled with the result, so neither may be while a thread works on both."""
    whole, sharded = (pool(2).run(with_slow_exchange_thread, shard)[0] for shard in ("none", "optimizer"))
    assert torch.allclose(sharded, whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("compression", ["int8", "int4"])
def test_low_precision_parameters_are_compressed_too(pool, compression):
    results = pool(2).run(train, compression, "none", 25, 6, torch.bfloat16)
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][2][0].nbytes == 2 * sum(p.numel() for p in network().parameters() if p.dim() > 1)


def accumulated(rank, size, compression, uneven, call):
    """Return the sum of all results, of all exact results, and of this rank's residuals, by parameter."""
    squeezed = paceline.DataParallel(network(), sync=paceline.Sync(bucket_mib=0.05, compression=compression))
    exact = paceline.DataParallel(network(), sync="bucketed")
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
    parts = squeezed.engine.residuals.state()["parts"]
    return totals, {name: kept["residual"].double() for name, kept in parts.items()}


@pytest.mark.sweep
@pytest.mark.parametrize("call", ["samples", "share", "plain"])
@pytest.mark.parametrize(
    "compression", ["int8", "int4", paceline.Compression("bf16", feedback=True), SPARSE, THIN], ids=str
)
def test_sent_values_plus_the_residual_make_up_the_input(pool, compression, call):
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


# ---------------------------------------------------------------------- when something goes wrong


def poisoned(rank, size, compression):
    """One gradient of rank 1 is not a number, and one backward of rank 0 fails; training continues."""
    model = paceline.DataParallel(network(), sync=paceline.Sync(bucket_mib=0.05, compression=compression))
    optim = torch.optim.AdamW(model.parameters(), lr=3e-3)
    finite = paceline.NonFiniteGuard(model, optim, "skip")
    failed = []
    for step in range(8):
        loss = loss_of(model, rank, step)
        if rank == 1 and step == 3:
            loss = loss * float("nan")
        if rank == 0 and step == 5:
            loss.register_hook(lambda grad: 1 / 0)
        try:
            model.backward(loss, samples=8)
        except (BackwardFailed, ZeroDivisionError) as error:
            failed.append((step, type(error).__name__))
            optim.zero_grad()
            continue
        optim.step()
        optim.zero_grad()
    kept = model.engine.residuals.state()["parts"]
    clean = all(bool(each.isfinite().all()) for parts in kept.values() for each in parts.values())
    return flat(model.parameters()), finite.skipped, finite.latest.ranks, failed, clean


@pytest.mark.parametrize("compression", ["int8", SPARSE, THIN], ids=str)
def test_a_gradient_that_is_not_finite_is_found_and_leaves_nothing_behind(pool, compression):
    results = pool(3).run(poisoned, compression)
    for rank, (params, skipped, ranks, failed, clean) in enumerate(results):
        assert torch.equal(params, results[0][0])
        assert bool(params.isfinite().all())
        assert (skipped, ranks) == (1, (1,))
        assert failed == [(5, "ZeroDivisionError" if rank == 0 else "BackwardFailed")]
        assert clean


# ---------------------------------------------------------------------- checkpoints


def resumed(rank, size, folder, compression, steps, total):
    """Train up to step `steps` from the checkpoint on; return parameters and residuals."""
    torch.manual_seed(rank)
    model = paceline.DataParallel(network(), sync=paceline.Sync(bucket_mib=0.05, compression=compression))
    optim = torch.optim.AdamW(model.parameters(), lr=3e-3)
    checkpoint = paceline.Checkpoint(folder, model, optim)
    checkpoint.load()
    while checkpoint.step < steps:
        model.backward(loss_of(model, rank, checkpoint.step), samples=8)
        optim.step()
        optim.zero_grad()
    if steps < total:
        checkpoint.save(wait=True)
    checkpoint.close()
    kept = model.engine.residuals.state()["parts"]
    residuals = {name: parts["residual"].double() for name, parts in kept.items() if "residual" in parts}
    return flat(model.parameters()), residuals


@pytest.mark.sweep
@pytest.mark.parametrize(
    "compression",
    ["int8", paceline.Compression("int4", rounding="stochastic"), DEEP, paceline.Compression("powersgd")],
    ids=str,
)
def test_residuals_are_saved_so_a_resumed_run_is_bitwise_equal(pool, tmp_path, compression):
    whole = pool(2).run(resumed, str(tmp_path / "whole"), compression, 10, 10)
    pool(2).run(resumed, str(tmp_path / "cut"), compression, 6, 10)
    cut = pool(2).run(resumed, str(tmp_path / "cut"), compression, 10, 10)
    assert all(torch.equal(params, whole[0][0]) for params, _ in whole + cut)


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_new_ranks_take_over_the_residuals_of_the_old_ones(pool, tmp_path, ranks):
    before = [residuals for _, residuals in pool(3).run(resumed, str(tmp_path), "int4", 5, 10)]
    after = pool(ranks).run(residuals_after_loading, str(tmp_path), "int4")
    for name in before[0]:
        total = sum(residuals[name] for residuals in before)
        assert total.norm() > 0
        assert torch.allclose(sum(residuals[name] for residuals in after), total, rtol=0, atol=1e-7)


def residuals_after_loading(rank, size, folder, compression):
    model = paceline.DataParallel(network(), sync=paceline.Sync(bucket_mib=0.05, compression=compression))
    optim = torch.optim.AdamW(model.parameters(), lr=3e-3)
    checkpoint = paceline.Checkpoint(folder, model, optim)
    checkpoint.load()
    checkpoint.close()
    residuals = [state["parts"] for state in model.engine.residuals._loaded]
    return (
        {name: sum(parts[name]["residual"].double() for parts in residuals) for name in residuals[0]}
        if residuals
        else Zeros()
    )


class Zeros(dict):
    """Return the residual of a rank that is new in the world."""

    def __missing__(self, name):
        return 0.0


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "int7"}, "unknown compression 'int7'"),
        ({"name": "topk", "keep": 0}, "keep=0"),
        ({"name": "topk", "keep": 1.5}, "keep=1.5"),
        ({"name": "topk", "momentum": 1.0}, "momentum=1.0"),
        ({"name": "int8", "momentum": 0.9}, "use momentum correction with topk"),
        ({"name": "topk", "momentum": 0.9, "feedback": False}, "with feedback"),
        ({"name": "powersgd", "rank": 0}, "rank=0"),
        ({"name": "int8", "block": 100}, "multiple of 32"),
        ({"name": "fp16", "rounding": "stochastic"}, "no stochastic rounding"),
        ({"name": "int8", "rounding": "up"}, "unknown rounding 'up'"),
        ({"name": "topk", "warmup": -1}, "warmup=-1"),
        ({"name": "int8", "exempt": "*.bias"}, "give a tuple: exempt=('*.bias',)"),
    ],
)
def test_an_invalid_compression_is_refused(options, message):
    with pytest.raises(UsageError) as refused:
        paceline.Compression(**options)
    assert message in str(refused.value)


def test_an_unknown_compression_is_refused():
    with pytest.raises(UsageError, match="unknown compression 8"):
        paceline.Sync(compression=8)


def test_values_unfit_for_compression_are_named():
    with pytest.raises(UsageError, match=r"int8 can't compress parameter '0\.weight' of float64"):
        paceline.DataParallel(network(torch.float64), sync=paceline.Sync(compression="int8"))
    with pytest.raises(UsageError, match=r"bf16 can't compress parameter '0\.weight' of bfloat16"):
        paceline.DataParallel(network(torch.bfloat16), sync=paceline.Sync(compression="bf16"))
    with pytest.raises(UsageError, match="PyTorch's FSDP2 reduces gradients itself"):
        paceline.Sync(shard="parameters", compression="int8")
    spared = paceline.Compression("int8", exempt=("*",))
    assert (
        paceline.DataParallel(network(torch.float64), sync=paceline.Sync(compression=spared)).plan.compression
        == spared
    )


def differing(rank, size):
    compression = paceline.Compression("int8", block=256 if rank == 0 else 128)
    try:
        paceline.DataParallel(network(), sync=paceline.Sync(compression=compression))
    except MismatchError as error:
        return str(error)


def test_a_rank_with_another_compression_is_named_at_the_start(pool):
    for message in pool(3).run(differing):
        assert "[rank 1] the model differs between ranks" in message
        assert "block=128" in message
