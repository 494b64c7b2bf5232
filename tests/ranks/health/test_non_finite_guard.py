"""NaN or infinite gradients on some rank: reported alike on all ranks, skipped or refused, with every strategy."""

from __future__ import annotations

import math

import pytest
import torch

import model_zoo
import paceline
from paceline.errors import NonFiniteGradient

STRATEGIES = [
    "naive",
    "flat",
    "bucketed",
    "sharded",
    "full-shard",
    paceline.Sync(2**-11),
    paceline.Sync(2**-11, shard="optimizer"),
]


def wrapped(sync, action, **options):
    model = paceline.DataParallel(model_zoo.build("Plain"), sync=sync)
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=0.05)
    return model, optim, paceline.NonFiniteGuard(model, optim, action, **options)


def data(rank, step, samples=4):
    made = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(samples, model_zoo.WIDTH, generator=made, dtype=torch.float64)
    return inputs, torch.randn(samples, 1, generator=made, dtype=torch.float64)


def backward(model, rank, step, factor=1.0, samples=4, plain=False):
    if not samples:
        return model.backward(None, samples=0)
    loss = model_zoo.loss_of(model, "Plain", *data(rank, step, samples)) * factor
    return loss.backward() if plain else model.backward(loss, samples=samples)


def one_process(steps, ranks, micros=1):
    """Train on these steps' batches of all ranks; return the parameters."""
    model = model_zoo.build("Plain")
    optim = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in steps:
        parts = [data(rank, step * micros + micro) for micro in range(micros) for rank in ranks]
        x, y = (torch.cat(part) for part in zip(*parts, strict=True))
        model_zoo.loss_of(model, "Plain", x, y).backward()
        optim.step()
        optim.zero_grad()
    return [param.detach() for param in model.parameters()]


def skips(rank, size, sync, plain, clip, source):
    """Rank 1 has a NaN in step 1, ranks 0 and 1 an infinity in step 3; the result is as if these steps had not been."""
    model, optim, guard = wrapped(sync, "skip", source=source)
    bad = {1: (math.nan, [1]), 3: (math.inf, [0, 1])}
    reports = []
    for step in range(5):
        factor, ranks = bad.get(step, (1.0, []))
        backward(model, rank, step, factor if rank in ranks else 1.0, plain=plain)
        if clip:
            model.clip_grad_norm_(math.inf)
        optim.step()
        optim.zero_grad()
        if ranks:
            reports.append((guard.latest.step, guard.latest.ranks, len(guard.latest.names), guard.skipped))
    return (
        reports,
        model_zoo.max_difference(model.whole_parameters(), one_process([0, 2, 4], range(size))),
        guard.latest.parameters,
    )


@pytest.mark.sweep
@pytest.mark.parametrize("sync", STRATEGIES, ids=str)
def test_a_skipped_step_changes_nothing_on_any_rank(pool, sync):
    for plain, clip, source in (
        (False, False, True),
        (True, True, True),
        (False, False, False),
        (False, True, False),
    ):
        for reports, gap, of in pool(3, "paceline").run(skips, sync, plain, clip, source):
            assert reports == [(1, (1,), of, 1), (3, (0, 1), of, 2)]
            assert gap < 1e-12


def accumulates(rank, size, sync):
    """A NaN in a micro-batch that is not the last one; then a rank without data; then too many in a row."""
    model, optim, guard = wrapped(sync, "skip", in_a_row=2)
    for step in range(3):
        with model.accumulate():
            backward(model, rank, 2 * step, math.nan if (rank, step) == (0, 1) else 1.0)
        backward(model, rank, 2 * step + 1)
        optim.step()
        optim.zero_grad()
    gap = model_zoo.max_difference(model.whole_parameters(), one_process([0, 2], range(size), micros=2))
    seen = [guard.latest.ranks]
    backward(model, rank, 8, samples=4 if rank == 1 else 0)
    optim.step(), optim.zero_grad()
    seen.append(guard.skipped)
    for step in (9, 10):
        backward(model, rank, step, math.nan, samples=4 if rank == 1 else 0)
        try:
            optim.step()
        except NonFiniteGradient as error:
            seen.append(str(error))
        optim.zero_grad()
    backward(model, rank, 11)
    optim.step()
    guard.remove()
    return seen, gap, bool(all(torch.isfinite(param).all() for param in model.whole_parameters()))


@pytest.mark.parametrize("sync", ["naive", "bucketed", "sharded", "full-shard"])
def test_accumulation_ranks_without_data_and_too_many_in_a_row(pool, sync):
    for seen, gap, sound in pool(2).run(accumulates, sync):
        assert seen[:2] == [(0,), 1]
        assert len(seen) == 3
        assert seen[2].startswith("[rank 1, step 5] the gradient of ")
        assert "from rank 1, 2 in a row" in seen[2]
        assert gap < 1e-12
        assert sound


def stops(rank, size, sync):
    """One parameter's gradient is infinite on rank 1: all ranks raise alike, and nothing has changed."""
    model, optim, guard = wrapped(sync, "stop")
    backward(model, rank, 0)
    optim.step()
    optim.zero_grad()
    before = model.whole_parameters()
    x, y = data(rank, 1)
    if rank == 1:
        handle = model.module.layers[0].register_full_backward_pre_hook(
            lambda _, grads: (grads[0] * math.inf,)
        )
    model.backward(model_zoo.loss_of(model, "Plain", x, y), samples=4)
    if rank == 1:
        handle.remove()
    with pytest.raises(NonFiniteGradient) as caught:
        optim.step()
    optim.zero_grad()
    same = model_zoo.max_difference(model.whole_parameters(), before)
    backward(model, rank, 2)
    optim.step()
    moved = model_zoo.max_difference(model.whole_parameters(), before)
    return str(caught.value), caught.value.rank, caught.value.step, guard.latest.names, same, moved


@pytest.mark.parametrize("sync", ["naive", "bucketed", "sharded", "full-shard"])
def test_stop_names_parameters_and_rank_on_all_ranks_and_changes_nothing(pool, sync):
    results = pool(2, "paceline").run(stops, sync)
    assert results[0] == results[1]
    text, rank, step, names, same, moved = results[0]
    assert (rank, step) == (1, 1)
    assert "from rank 1" in text
    assert all(name.startswith("layers.0.") for name in names)
    assert names
    assert same == 0 < moved


def finds_later(rank, size, sync):
    """Without measuring, a finite loss is no evidence; the second time the rank is known."""
    model, optim, guard = wrapped(sync, "skip", source=False)
    seen = []
    for step in range(3):
        loss = model_zoo.loss_of(model, "Plain", *data(rank, step))
        if rank == 1 and step:
            # 0, with a slope that is infinite.
            loss = loss + (model.module.layers[0].weight.sum() * 0).abs().sqrt()
        model.backward(loss, samples=4)
        model.clip_grad_norm_(1.0)
        optim.step()
        optim.zero_grad()
        seen.append(guard.latest and (guard.latest.ranks, guard.latest.names))
    return seen


@pytest.mark.parametrize("sync", ["bucketed", "sharded"])
def test_without_measuring_the_first_source_may_be_unknown_and_the_next_is_not(pool, sync):
    name = ("layers.0.weight",)
    assert pool(2).run(finds_later, sync) == [[None, ((), name), ((1,), name)]] * 2


def overflows(rank, size, sync):
    """Every rank's gradient is finite, and their sum is not."""
    model = paceline.DataParallel(torch.nn.Linear(2, 1, bias=False), sync=sync)
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=1e-38)
    guard = paceline.NonFiniteGuard(model, optim)
    before = model.whole_parameters()
    model.backward(model(torch.ones(2, 2)).mean(), samples=1)
    optim.zero_grad()
    # 4 samples where 2 were expected: the sum is twice the mean.
    for factor in (2e38, 1e38, 1.0):
        model.backward(model(torch.ones(2, 2)).mean() * factor, samples=2)
        optim.step()
        optim.zero_grad()
        moved = model_zoo.max_difference(model.whole_parameters(), before)
        assert (moved > 0.5) == (factor < 2e38)
    return guard.skipped, guard.latest.ranks, guard.latest.names


@pytest.mark.parametrize("sync", ["bucketed", "sharded"])
def test_only_a_sum_that_overflows_is_skipped_and_it_names_no_rank(pool, sync):
    assert pool(2).run(overflows, sync) == [(1, (), ("weight",))] * 2
