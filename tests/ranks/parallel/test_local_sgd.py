"""LocalSGD, DiLoCo and SlowMo equal their formulas up to rounding, however and whenever parameters are sent."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import paceline
from local_sgd_cases import adamw, flat, network, run, same, sgd, take_step, transcript

# ---------------------------------------------------------------------- the formulas, in one process


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_diloco_is_its_formula(pool, ranks, backend):
    options = {"every": 5, "compression": None}
    mine = same(pool(ranks, backend).run(run, "DiLoCo", 20, options))
    assert torch.allclose(mine, transcript(ranks, 20, 5, 0.7, 0.9, adamw), rtol=0, atol=1e-10)


def test_ranks_count_by_their_samples(pool):
    options = {"every": 4, "compression": None, "outer_lr": 0.5, "outer_momentum": 0.8}
    sizes = [2, 5, 9]
    mine = same(pool(3).run(run, "DiLoCo", 12, options, adamw, sizes))
    assert torch.allclose(mine, transcript(3, 12, 4, 0.5, 0.8, adamw, sizes), rtol=0, atol=1e-10)


def synchronous(rank, size, steps, optimizer):
    model = nn.parallel.DistributedDataParallel(network())
    optim = optimizer(model)
    for step in range(1, steps + 1):
        take_step(model, optim, rank, step)
    return flat(model)


def test_every_step_with_plain_sgd_is_ddp(pool):
    """H = 1, outer SGD of rate 1 without momentum, inner SGD: the mean of updates is the update by the mean."""
    ddp = same(pool(2).run(synchronous, 10, sgd))
    for kind, options in (("DiLoCo", {"outer_lr": 1.0, "outer_momentum": 0.0}), ("LocalSGD", {})):
        mine = same(pool(2).run(run, kind, 10, {"every": 1, "compression": None, **options}, sgd))
        assert torch.allclose(mine, ddp, rtol=0, atol=1e-6)


def test_slowmo_is_its_formula(pool):
    mine = same(pool(2).run(run, "SlowMo", 12, {"every": 4, "compression": None, "slow_momentum": 0.5}, sgd))
    theta, workers = network(), [network(), network()]
    optims, slow = [sgd(worker) for worker in workers], [torch.zeros_like(p) for p in theta.parameters()]
    for step in range(1, 13):
        for rank in range(2):
            take_step(workers[rank], optims[rank], rank, step)
        if step % 4 == 0:
            for shared, u, *own in zip(
                theta.parameters(), slow, *(w.parameters() for w in workers), strict=True
            ):
                u.mul_(0.5).add_((shared.detach() - (own[0] + own[1]).detach() / 2) / 0.1)
                shared.data.sub_(0.1 * u)
            for worker in workers:
                worker.load_state_dict(theta.state_dict())
    assert torch.allclose(mine, flat(theta), rtol=0, atol=1e-10)


def streaming_transcript(ranks, steps, every, fragments, delay, mix, keep_local_steps, layers):
    """Streaming DiLoCo, Algorithm 2 of arXiv 2501.18512, as it is written there: one process, one copy per worker.

    The offsets are t_p = (p + 1)·H/P − τ. With `keep_local_steps`, θ' + (w − w_sent) takes the place of θ'.
    """
    theta = [param.detach().clone() for param in network().parameters()]
    slow = [torch.zeros_like(each) for each in theta]
    workers = [network() for _ in range(ranks)]
    optims = [adamw(worker) for worker in workers]
    parts = [[at for layer in layers[p::fragments] for at in layer] for p in range(fragments)]
    offsets = [(p + 1) * every // fragments - delay for p in range(fragments)]
    sent, kept_steps = [None] * fragments, [0.0] * fragments

    def send(p):
        sent[p] = [
            {at: list(worker.parameters())[at].detach().clone() for at in parts[p]} for worker in workers
        ]
        kept_steps[p] = 0.0

    def merge(p, mix):
        for at in parts[p]:
            gradient = sum(theta[at] - each[at] for each in sent[p]) / ranks
            slow[at] = 0.9 * slow[at] + gradient
            theta[at] = theta[at] - 0.7 * (gradient + 0.9 * slow[at])
            for worker, each in zip(workers, sent[p], strict=True):
                param = list(worker.parameters())[at]
                new = theta[at] + (param.detach() - each[at]) if keep_local_steps else theta[at]
                param.data = mix * param.detach() + (1 - mix) * new
        sent[p] = None
        kept_steps[p] *= 1 if keep_local_steps else mix

    for t in range(1, steps + 1):
        for rank in range(ranks):
            take_step(workers[rank], optims[rank], rank, t)
        kept_steps = [each + 1 for each in kept_steps]
        for p in range(fragments):
            if (t - offsets[p]) % every == 0:
                send(p)
            if (t - offsets[p] - delay) % every == 0 and sent[p] is not None:
                merge(p, mix)
    # At the end of the block every worker takes all of θ.
    for p in range(fragments):
        if sent[p] is not None:
            merge(p, mix)
        if kept_steps[p]:
            send(p)
            merge(p, 0.0)
    return torch.cat([each.reshape(-1) for each in theta])


LAYERS = [[0, 1], [2, 3], [4, 5], [6, 7]]  # parameters of `network` by layer


def test_streaming_of_one_fragment_without_delay_is_diloco(pool):
    """Algorithm 2 then is Algorithm 1 of DiLoCo, and ranks compute it."""
    expected = transcript(2, 20, 5, 0.7, 0.9, adamw)
    assert torch.allclose(
        streaming_transcript(2, 20, 5, 1, 0, 0.0, False, LAYERS), expected, rtol=0, atol=1e-12
    )
    options = {"every": 5, "fragments": 1, "delay": 0, "compression": None}
    mine = same(pool(2).run(run, "DiLoCo", 20, options))
    assert torch.allclose(mine, expected, rtol=0, atol=1e-10)


@pytest.mark.sweep
@pytest.mark.parametrize("keep_local_steps", [False, True])
@pytest.mark.parametrize(
    ("every", "fragments", "delay", "mix"),
    [
        (6, 3, 1, 0.5),
        (6, 1, 2, 0.0),
        (6, 2, 0, 0.0),
        (6, 2, 0, 1.0),
        (6, 2, 2, 1.0),
        (6, 3, 2, 0.5),
        (6, 4, 3, 0.0),
        (6, 2, 5, 0.25),
        (7, 2, 3, 0.5),
        (9, 4, 7, 0.3),
        (2, 2, 1, 0.5),
        (13, 2, 1, 0.75),
    ],
)
def test_streaming_is_algorithm_2(pool, every, fragments, delay, mix, keep_local_steps):
    options = {"every": every, "fragments": fragments, "delay": delay, "mix": mix, "compression": None}
    results = pool(2).run(run, "DiLoCo", 20, options | {"keep_local_steps": keep_local_steps})
    theta = streaming_transcript(2, 20, every, fragments, delay, mix, keep_local_steps, LAYERS)
    assert torch.allclose(same(results), theta, rtol=0, atol=1e-10)


def test_local_sgd_keeps_what_is_learnt_during_the_delay(pool):
    """Delayed averaging, w ← w + mean(w_sent) − w_sent, is DiLoCo's delta rule with a plain outer step."""
    options = {"every": 6, "fragments": 3, "delay": 2, "mix": 0.25, "compression": None}
    mine = same(pool(2).run(run, "LocalSGD", 20, options))
    plain = {"outer_lr": 1.0, "outer_momentum": 0.0}
    kept = same(pool(2).run(run, "DiLoCo", 20, options | plain | {"keep_local_steps": True}))
    lost = same(pool(2).run(run, "DiLoCo", 20, options | plain))
    assert torch.allclose(mine, kept, rtol=0, atol=1e-12)
    assert not torch.allclose(mine, lost, rtol=0, atol=1e-4)


# ---------------------------------------------------------------------- compressed, in pieces, on bare modules


def large(rank, size, compression, fragments, delay):
    """Tensors larger than a piece, pieces larger than a tensor; return parameters and the reported bytes."""
    torch.manual_seed(rank)
    model = nn.Sequential(
        nn.Linear(300, 200), nn.BatchNorm1d(200), nn.ReLU(), nn.Linear(200, 100), nn.Linear(100, 3)
    )
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"every": 4, "fragments": fragments, "delay": delay, "compression": compression}
    with paceline.DiLoCo(model, optim, **options, piece_mib=0.05) as loop:
        for step in range(1, 11):
            generator = torch.Generator().manual_seed(100 * rank + step)
            inputs = torch.randn(16, 300, generator=generator)
            functional.mse_loss(model(inputs), inputs[:, :3]).backward()
            optim.step()
            optim.zero_grad()
    inputs = torch.randn(64, 300, generator=torch.Generator().manual_seed(7))
    model.eval()
    return (
        flat(model),
        model[1].running_var.clone(),
        float(functional.mse_loss(model(inputs), inputs[:, :3])),
        loop.syncs,
    )


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["gloo", "paceline"])
@pytest.mark.parametrize("compression", [None, "bf16", "int8", "int4"])
@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (3, 2)])
def test_every_parameter_is_the_same_on_all_ranks_after_a_synchronisation(
    pool, backend, compression, fragments, delay
):
    """Also of tensors that are cut over several pieces, and of pieces with several tensors; and statistics."""
    results = pool(3, backend).run(large, compression, fragments, delay)
    exact = pool(3, backend).run(large, None, fragments, delay)
    same([params for params, *_ in results])
    same([variance for _, variance, *_ in results])
    assert results[0][2] == pytest.approx(exact[0][2], rel=0.1), "compression hardly changes what is learnt"
    assert {syncs for *_, syncs in results} == {10 // 4 + 1 if fragments == 1 else results[0][3]}
