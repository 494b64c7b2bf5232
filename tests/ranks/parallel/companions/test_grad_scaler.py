"""`torch.amp.GradScaler` with every strategy: the gradient of all ranks decides about a step, alike on every rank."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

import model_zoo
import paceline
from engine_cases import ALL, REPLICATED, loss_on, same_on_all_ranks
from model_zoo import max_difference
from paceline.errors import UnsyncedGradients, UsageError
from single_process import same

SGD = {"lr": 0.1, "momentum": 0.9}
SCALER = {"init_scale": 2.0**10, "growth_interval": 2}
OVERFLOWS_AT = 2


def models(sync, name="Plain"):
    model = paceline.DataParallel(model_zoo.build(name), sync=sync)
    return model, model_zoo.build(name)


def scaled_step(scaler, optim, clip, clips):
    """Clip the unscaled gradients, if wanted, step and update, as programs do."""
    if clips:
        scaler.unscale_(optim)
        clip(0.3)
    scaler.step(optim)
    scaler.update()
    optim.zero_grad()


def losses_of(model, rank, step, name="Plain"):
    loss = loss_on(model, rank, step, name)
    return loss * math.inf if step == OVERFLOWS_AT and rank == 1 else loss


def beside_one_process(rank, size, sync, how, clips, name="Plain"):
    """Return gaps and scales; in one step rank 1 alone overflows."""
    model, reference = models(sync, name)
    kind = torch.optim.AdamW if how == "fused" else torch.optim.SGD
    options = {"lr": 0.01, "fused": True} if how == "fused" else SGD
    optim = (
        kind(model.parameters(), **options)
        if how in ("plain", "fused")
        else paceline.ShardedOptimizer(model, kind, **options)
    )
    other = kind(reference.parameters(), **options)
    scaler, one = (torch.amp.GradScaler("cpu", **SCALER) for _ in range(2))
    scales = []
    for step in range(6):
        loss = scaler.scale(losses_of(model, rank, step, name))
        if how == "accumulated":
            with model.accumulate():
                loss.backward()
        elif how == "samples":
            model.backward(loss, samples=6)
        else:
            loss.backward()
        scaled_step(scaler, optim, model.clip_grad_norm_, clips)
        one.scale(sum(losses_of(reference, r, step, name) for r in range(size)) / size).backward()
        scaled_step(one, other, partial(torch.nn.utils.clip_grad_norm_, list(reference.parameters())), clips)
        scales.append((scaler.get_scale(), one.get_scale()))
    whole = model.whole_parameters()
    return max_difference(whole, reference.parameters()), scales, same_on_all_ranks(whole)


CASES = [
    *[(sync, how) for sync in [*ALL, "auto"] for how in ("samples", "sharded")],
    *[(sync, how) for sync in [*REPLICATED, "full-shard", "auto"] for how in ("plain", "fused")],
    *[(sync, "accumulated") for sync in [*REPLICATED, "sharded", "auto"]],
]


@pytest.mark.sweep
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize(("sync", "how"), CASES)
def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(pool, sync, how, clips):
    results = pool(2).run(beside_one_process, sync, how, clips)
    # the norm is rounded to float32 where the plan may change
    same([gap for gap, _, _ in results], 1e-7 if sync == "auto" and clips else 1e-12)
    for _, scales, equal in results:
        assert equal
        assert all(ours == theirs for ours, theirs in scales)
        assert scales[OVERFLOWS_AT][0] < scales[OVERFLOWS_AT - 1][0]


@pytest.mark.parametrize("sync", ["sharded", "full-shard"])
def test_a_rank_whose_shard_is_empty_skips_along(pool, sync):
    results = pool(3).run(beside_one_process, sync, "sharded", False, "Tied")
    same([gap for gap, _, _ in results])
    assert all(ours == theirs for _, scales, _ in results for ours, theirs in scales)


def two_optimizers(rank, size, sync):
    """Return the gap to one process, where each optimizer has a scaler and half of the model."""
    model, reference = models(sync)
    gaps = []
    halves = [
        [list(m.layers[0].parameters()), [*m.layers[2:].parameters(), m.scale]]
        for m in (model.module, reference)
    ]
    ours, theirs = ([torch.optim.SGD(half, **SGD) for half in each] for each in halves)
    scaler, one = (torch.amp.GradScaler("cpu", **SCALER) for _ in range(2))
    for step in range(4):
        scaler.scale(loss_on(model, rank, step)).backward()
        one.scale(sum(loss_on(reference, r, step) for r in range(size)) / size).backward()
        for each, optims in ((scaler, ours), (one, theirs)):
            for optim in optims:
                each.unscale_(optim)
            for optim in optims:
                each.step(optim)
                optim.zero_grad()
            each.update()
        gaps.append(max_difference(model.whole_parameters(), reference.parameters()))
    return max(gaps)


@pytest.mark.parametrize("sync", ["bucketed", "full-shard"])
def test_two_optimizers_unscale_their_own_gradients(pool, sync):
    same(pool(2).run(two_optimizers, sync))


def refused(rank, size, sync, error, match):
    model, _ = models(sync)
    optim = torch.optim.SGD(model.parameters(), **SGD)
    scaler = torch.amp.GradScaler("cpu", **SCALER)
    with model.no_sync():
        scaler.scale(losses_of(model, rank, OVERFLOWS_AT)).backward()
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(error, match=match):
            call(optim)
        scaler.update(1.0)


@pytest.mark.parametrize(
    ("sync", "error", "match"),
    [
        ("full-shard", UnsyncedGradients, "leave accumulate"),
        ("sharded", UsageError, r"ShardedOptimizer\(model, torch.optim.SGD"),
    ],
)
def test_what_can_not_step_is_refused_when_it_is_unscaled(pool, sync, error, match):
    pool(2).run(refused, sync, error, match)
