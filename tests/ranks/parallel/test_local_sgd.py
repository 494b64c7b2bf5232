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


def streaming_transcript(ranks, steps, every, fragments, delay, mix, layers):
    """The delta rule, fragment by fragment, in one process: w ← θ' + (w − w_sent), then a share `mix` of w stays."""
    theta = [p.detach().clone() for p in network().parameters()]
    slow = [torch.zeros_like(p) for p in theta]
    workers = [network() for _ in range(ranks)]
    optims = [adamw(worker) for worker in workers]
    part = [[at for layer in layers[f::fragments] for at in layer] for f in range(fragments)]
    flying, cycle, sent_at = {}, 0, [0] * fragments

    def send(f, step):
        sent_at[f] = step
        flying[step + delay] = (
            f,
            [[list(w.parameters())[at].detach().clone() for at in part[f]] for w in workers],
        )

    def merge(step):
        f, sent = flying.pop(step)
        for index, at in enumerate(part[f]):
            g = sum(theta[at] - each[index] for each in sent) / ranks
            slow[at] = 0.9 * slow[at] + g
            theta[at] = theta[at] - 0.7 * (g + 0.9 * slow[at])
            for worker, each in zip(workers, sent, strict=True):
                param = list(worker.parameters())[at]
                new = theta[at] + (param.detach() - each[index])
                param.data = (1 - mix) * new + mix * param.detach()

    for step in range(1, steps + 1):
        for rank in range(ranks):
            take_step(workers[rank], optims[rank], rank, step)
        if delay and step in flying:
            merge(step)
        for f in range(fragments):
            if (step - (f + 1) * every // fragments) % every == 0:
                send(f, step)
                cycle = (f + 1) % fragments
                if not delay:
                    merge(step)
    for step in sorted(flying):
        merge(step)
    delay, mix = 0, 0.0  # at the end every worker takes all of it
    for _ in range(fragments):
        if sent_at[cycle] < steps:  # else no worker has anything new, and θ stays
            send(cycle, steps)
            merge(steps)
        cycle = (cycle + 1) % fragments
    return torch.cat([each.reshape(-1) for each in theta])


LAYERS = [[0, 1], [2, 3], [4, 5], [6, 7]]  # parameters of `network` by layer


def test_streaming_of_one_fragment_without_delay_is_diloco(pool):
    """The delta rule then is Algorithm 1 of DiLoCo, and ranks compute it."""
    expected = transcript(2, 20, 5, 0.7, 0.9, adamw)
    assert torch.allclose(streaming_transcript(2, 20, 5, 1, 0, 0.0, LAYERS), expected, rtol=0, atol=1e-12)
    options = {"every": 5, "fragments": 1, "delay": 0, "compression": None}
    mine = same(pool(2).run(run, "DiLoCo", 20, options))
    assert torch.allclose(mine, expected, rtol=0, atol=1e-10)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("fragments", "delay", "mix"), [(1, 2, 0.0), (2, 0, 0.0), (4, 3, 0.0), (3, 2, 0.5), (2, 5, 0.25)]
)
def test_streaming_is_the_delta_rule(pool, fragments, delay, mix):
    options = {"every": 6, "fragments": fragments, "delay": delay, "mix": mix, "compression": None}
    results = pool(2).run(run, "DiLoCo", 20, options)
    theta = streaming_transcript(2, 20, 6, fragments, delay, mix, LAYERS)
    assert torch.allclose(same(results), theta, rtol=0, atol=1e-10)


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
