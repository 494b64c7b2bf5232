"""LocalSGD, DiLoCo and SlowMo compute their formulas, to the last digits, whatever is sent when and how."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import paceline as pl
from paceline.errors import MismatchError, SyncError, UsageError

BATCH, WIDTH = 4, 6


def network(dtype=torch.float64, seed=1):
    """Return a model of five layers, the same everywhere."""
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2)]
    return nn.Sequential(*layers).to(dtype)


def batch_of(rank, step, dtype=torch.float64, size=BATCH):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(size, WIDTH, dtype=dtype, generator=generator) + 0.3 * rank
    return inputs, torch.randn(size, 2, dtype=dtype, generator=generator)


def take_step(model, optim, rank, step, size=BATCH, dtype=torch.float64):
    inputs, targets = batch_of(rank, step, dtype, size)
    loss = functional.mse_loss(model(inputs), targets)
    if isinstance(model, pl.DataParallel):
        model.backward(loss, samples=size)
    else:
        loss.backward()
    optim.step()
    optim.zero_grad()


def flat(model):
    return torch.cat([param.detach().reshape(-1).double() for param in model.parameters()])


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


# ---------------------------------------------------------------------- the formulas, in one process


def transcript(ranks, steps, every, outer_lr, momentum, optimizer, sizes=None, dtype=torch.float64):
    """DiLoCo, Algorithm 1 of arXiv 2311.08105, as it is written there: one process, one copy for each worker."""
    sizes = sizes or [BATCH] * ranks
    theta = network(dtype)
    workers = [copy.deepcopy(theta) for _ in range(ranks)]
    optims = [optimizer(worker) for worker in workers]
    outer = torch.optim.SGD(theta.parameters(), lr=outer_lr, momentum=momentum, nesterov=momentum > 0)
    for step in range(1, steps + 1):
        for rank, (worker, optim) in enumerate(zip(workers, optims, strict=True)):
            take_step(worker, optim, rank, step, sizes[rank], dtype)
        if step % every == 0:
            for shared, *mine in zip(theta.parameters(), *(w.parameters() for w in workers), strict=True):
                given = [
                    size * (shared.detach() - own.detach()) for size, own in zip(sizes, mine, strict=True)
                ]
                shared.grad = sum(given) / sum(sizes)
            outer.step()
            for worker in workers:
                worker.load_state_dict(theta.state_dict())
    return flat(theta)


def run(rank, size, kind, steps, options, optimizer=adamw, sizes=None, wrap=True, dtype=torch.float64):
    """Return the parameters of this rank after `steps` local steps."""
    model = network(dtype, seed=1 if wrap else rank)
    model = pl.DataParallel(model, sync="bucketed") if wrap else model
    optim = optimizer(model)
    with getattr(pl, kind)(model, optim, **options):
        for step in range(1, steps + 1):
            take_step(model, optim, rank, step, sizes[rank] if sizes else BATCH, dtype)
    return flat(model)


def same(results):
    """Return what all ranks have, having checked that it is the same to the bit."""
    assert all(torch.equal(results[0], other) for other in results[1:])
    return results[0]


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
    delay, mix = 0, 0.0  # at the end everybody takes all of it
    for _ in range(fragments):
        if sent_at[cycle] < steps:  # else nobody has anything new, and θ stays
            send(cycle, steps)
            merge(steps)
        cycle = (cycle + 1) % fragments
    return torch.cat([each.reshape(-1) for each in theta])


LAYERS = [[0, 1], [2, 3], [4, 5], [6, 7]]  # parameters of `network` by layer


def test_streaming_of_one_fragment_without_delay_is_diloco(pool):
    """The delta rule then is Algorithm 1 of DiLoCo, and that is what the ranks compute."""
    expected = transcript(2, 20, 5, 0.7, 0.9, adamw)
    assert torch.allclose(streaming_transcript(2, 20, 5, 1, 0, 0.0, LAYERS), expected, rtol=0, atol=1e-12)
    options = {"every": 5, "fragments": 1, "delay": 0, "compression": None}
    mine = same(pool(2).run(run, "DiLoCo", 20, options))
    assert torch.allclose(mine, expected, rtol=0, atol=1e-10)


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
    """Tensors larger than a piece, pieces larger than a tensor; return parameters and what was said of the bytes."""
    torch.manual_seed(rank)
    model = nn.Sequential(
        nn.Linear(300, 200), nn.BatchNorm1d(200), nn.ReLU(), nn.Linear(200, 100), nn.Linear(100, 3)
    )
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"every": 4, "fragments": fragments, "delay": delay, "compression": compression}
    with pl.DiLoCo(model, optim, **options, piece_mib=0.05) as loop:
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


# ---------------------------------------------------------------------- ranks that differ


def uneven(rank, size, steps, options):
    """Return parameters and counts of a rank that makes `steps[rank]` local steps."""
    model = pl.DataParallel(network(), sync="bucketed")
    optim = adamw(model)
    with pl.DiLoCo(model, optim, **options) as loop:
        for step in range(1, steps[rank] + 1):
            take_step(model, optim, rank, step)
    take_step(model, optim, rank, 99)  # gradients are synchronised again
    return flat(model), loop.steps, loop.syncs


@pytest.mark.parametrize(
    "options", [{"every": 4}, {"every": 6, "fragments": 3, "delay": 2}, {"every": 5, "fragments": 2}]
)
def test_ranks_may_make_different_numbers_of_steps(pool, options):
    results = pool(3).run(uneven, [7, 19, 0], {**options, "compression": None})
    same([params for params, *_ in results[:2]])
    assert [steps for _, steps, _ in results] == [7, 19, 0]
    assert len({syncs for *_, syncs in results}) == 1, "all took part in all of them"


def test_what_a_finished_rank_had_not_sent_still_counts(pool):
    """Rank 0 makes 3 of 4 steps: its last three count as three steps beside rank 1's four."""
    options = {"every": 4, "compression": None, "outer_lr": 1.0, "outer_momentum": 0.0}
    results = pool(2).run(uneven_plain, [3, 4], options)
    mine, workers = same(results), [network(), network()]
    for rank, steps in enumerate([3, 4]):
        optim = sgd(workers[rank])
        for step in range(1, steps + 1):
            take_step(workers[rank], optim, rank, step)
    assert torch.allclose(mine, (3 * flat(workers[0]) + 4 * flat(workers[1])) / 7, rtol=0, atol=1e-10)


def uneven_plain(rank, size, steps, options):
    model = network()
    optim = sgd(model)
    with pl.DiLoCo(model, optim, **options):
        for step in range(1, steps[rank] + 1):
            take_step(model, optim, rank, step)
    return flat(model)


def poisoned(rank, size, victim):
    model = pl.DataParallel(network(), sync="bucketed")
    optim = adamw(model)
    with pl.DiLoCo(model, optim, every=4, compression=None) as loop:
        for step in range(1, 13):
            take_step(model, optim, rank, step)
            if rank == victim and step == 6:
                with torch.no_grad():
                    next(model.parameters())[0, 0] = float("nan")
    return flat(model), loop.rejected


def test_a_pseudo_gradient_that_is_not_finite_is_left_out_and_its_rank_named(pool):
    results = pool(3).run(poisoned, 1)
    assert bool(same([params for params, _ in results]).isfinite().all())
    assert [rejected for _, rejected in results] == [{1: 1}] * 3


def poisoned_host(rank, size, sync):
    """Hosts of two ranks, whose optimizer may be sharded; the first host's parameters become NaN."""
    groups = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    model = pl.DataParallel(network(), sync=sync, group=groups[rank // 2])
    optim = pl.ShardedOptimizer(model, torch.optim.AdamW, lr=0.02)
    with pl.DiLoCo(model, optim, every=3, compression=None, group=groups[2 + rank % 2]) as loop:
        for step in range(1, 10):
            take_step(model, optim, rank, step)
            if rank < 2 and step == 4:
                with torch.no_grad():
                    next(model.parameters())[0, 0] = float("nan")
    return flat(model), loop.rejected


@pytest.mark.parametrize("sync", ["bucketed", "sharded"])
def test_a_host_whose_parameters_became_nan_begins_its_optimizer_anew(pool, sync):
    results = pool(4).run(poisoned_host, sync)
    assert bool(same([params for params, _ in results]).isfinite().all())
    assert [rejected for _, rejected in results] == [{0: 1}] * 4


def grouped(rank, size):
    """Two hosts of two ranks: gradients inside a host every step, parameters between hosts every 3 steps."""
    inner = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])][rank // 2]
    outer = [torch.distributed.new_group([0, 2]), torch.distributed.new_group([1, 3])][rank % 2]
    model = pl.DataParallel(network(), sync="sharded", group=inner)
    optim = pl.ShardedOptimizer(model, torch.optim.AdamW, lr=0.02, weight_decay=0.1)
    with pl.DiLoCo(model, optim, every=3, compression=None, group=outer):
        for step in range(1, 10):
            take_step(model, optim, rank, step)
    return flat(model)


def test_ranks_of_a_host_may_synchronise_gradients_while_hosts_synchronise_parameters(pool):
    mine = same(pool(4).run(grouped))
    theta, workers = network(), [network(), network()]
    optims = [adamw(worker) for worker in workers]
    outer = torch.optim.SGD(theta.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(1, 10):
        for host, (worker, optim) in enumerate(zip(workers, optims, strict=True)):
            losses = [
                functional.mse_loss(worker(x), y)
                for x, y in (batch_of(2 * host, step), batch_of(2 * host + 1, step))
            ]
            (sum(losses) / 2).backward()
            optim.step()
            optim.zero_grad()
        if step % 3 == 0:
            for shared, one, other in zip(
                theta.parameters(), *(w.parameters() for w in workers), strict=True
            ):
                shared.grad = shared.detach() - (one.detach() + other.detach()) / 2
            outer.step()
            for worker in workers:
                worker.load_state_dict(theta.state_dict())
    assert torch.allclose(mine, flat(theta), rtol=0, atol=1e-10)


def begun_apart(rank, size, kind):
    """Train before the block; return what all ranks share when it has begun, and what they have at its end."""
    torch.manual_seed(rank)  # other parameters on each rank
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()
    if kind == "synchronised":
        model = pl.DataParallel(model, sync="bucketed")
    elif kind == "in groups of one":
        groups = [torch.distributed.new_group([each]) for each in range(size)]
        model = pl.DataParallel(model, sync="bucketed", group=groups[rank])
    optim = sgd(model)
    loop = pl.LocalSGD(model, optim, every=3, compression=None)
    for step in range(rank + 1 if kind == "bare" else 2):
        take_step(model, optim, rank, step)
    with loop:
        shared = torch.cat([each.reshape(-1).clone() for each in loop.shared().values()])
        for step in range(4):
            take_step(model, optim, rank, step)
    return shared, flat(model), loop.module[1].running_var.clone()


@pytest.mark.parametrize("kind", ["bare", "synchronised", "in groups of one"])
def test_ranks_that_differ_when_the_block_begins_are_made_equal(pool, kind):
    for each in zip(*pool(3).run(begun_apart, kind), strict=True):
        same(each)


def broken_off(rank, size):
    """An exception in the block is not followed by a synchronisation; parameters differ then, and that is known."""
    model = pl.DataParallel(network(), sync="bucketed")
    optim = adamw(model)
    try:
        with pl.LocalSGD(model, optim, every=2, compression=None) as loop:
            take_step(model, optim, rank, 1)
            take_step(model, optim, rank, 2)
            take_step(model, optim, rank, 3)
            raise ValueError("a fault of the program")
    except ValueError as error:
        said = [str(error)]
    for attempt in (lambda: take_step(model, optim, rank, 3), loop.__enter__):
        try:
            attempt()
        except (SyncError, UsageError) as error:
            said.append(str(error))
    with pl.LocalSGD(model, optim, every=2, compression=None):  # a new one begins from rank 0's parameters
        take_step(model, optim, rank, 4)
    take_step(model, optim, rank, 5)
    return said, flat(model)


def test_an_exception_ends_the_block_without_more_messages(pool):
    results = pool(2).run(broken_off)
    for said, _ in results:
        assert said[0] == "a fault of the program"
        assert "parameters differ between ranks" in said[1]
        assert "was left by an exception" in said[2]
    same([params for _, params in results])


# ---------------------------------------------------------------------- checkpoints


def trained(rank, size, folder, total, options, broken_at):
    """Train to step `total`, or up to `broken_at`; go on from the folder's checkpoint where there is one."""
    model = pl.DataParallel(network(torch.float32), sync="bucketed")
    optim = adamw(model)
    loop = pl.DiLoCo(model, optim, **options)
    keep = pl.Checkpoint(folder, model, optim, loop)
    keep.load()
    with loop:
        while keep.step < (broken_at or total):
            take_step(model, optim, rank, keep.step + 1, dtype=torch.float32)
        if broken_at:
            keep.save(wait=True)
            saved = {name: each.clone() for name, each in loop.shared().items()}
            keep.close()
            return saved
    keep.close()
    return flat(model)


@pytest.mark.parametrize("options", [{"every": 4}, {"every": 6, "fragments": 3, "delay": 2}])
@pytest.mark.parametrize(
    "compression", [None, "int4", pl.Compression("int8", rounding="stochastic")], ids=str
)
def test_a_run_that_is_resumed_between_synchronisations_is_the_same_to_the_bit(
    pool, tmp_path, options, compression
):
    options = {**options, "compression": compression}
    whole = same(pool(3).run(trained, str(tmp_path / "whole"), 20, options, None))
    shared = pool(3).run(trained, str(tmp_path / "cut"), 20, options, 9)
    assert all(torch.equal(shared[0][name], each[name]) for each in shared for name in each)
    assert torch.equal(same(pool(3).run(trained, str(tmp_path / "cut"), 20, options, None)), whole)


def test_with_other_ranks_all_begin_from_what_was_shared(pool, tmp_path):
    options = {"every": 4, "fragments": 2, "delay": 1}
    shared = pool(3).run(trained, str(tmp_path), 20, options, 9)[0]
    results = pool(2).run(resumed, str(tmp_path), options)
    for start, steps, end in results:
        assert all(torch.equal(start[name], shared[name]) for name in shared)
        assert steps == 9
        assert torch.equal(end, results[0][2])
    grown = pool(4).run(resumed, str(tmp_path), options)
    same([end for *_, end in grown])


def resumed(rank, size, folder, options):
    model = pl.DataParallel(network(torch.float32), sync="bucketed")
    optim = adamw(model)
    loop = pl.DiLoCo(model, optim, **options)
    keep = pl.Checkpoint(folder, model, optim, loop)
    found = keep.load()
    start = {name: param.detach().clone() for name, param in model.module.named_parameters()}
    with loop:
        for step in range(10, 16):
            take_step(model, optim, rank, step, dtype=torch.float32)
    keep.close()
    return start, found.step, flat(model)


# ---------------------------------------------------------------------- bad input


def refused(rank, size, kind, options):
    options = options(rank) if callable(options) else options
    model = pl.DataParallel(network(torch.float32), sync=options.pop("sync", "bucketed"))
    optim = pl.ShardedOptimizer(model, torch.optim.AdamW, lr=0.02)
    try:
        getattr(pl, kind)(model, optim, **options)
    except (UsageError, MismatchError) as error:
        return type(error).__name__, str(error)
    return "", ""


def other_on_rank_1(rank):
    return {"every": 4 if rank == 0 else 5}


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("DiLoCo", {"every": 0}, "every=0"),
        ("LocalSGD", {"every": 2.5}, "every=2.5"),
        ("DiLoCo", {"every": 9, "fragments": 5}, "fragments=5, but the model has 4 layers"),
        ("DiLoCo", {"every": 3, "fragments": 4}, "at most as many fragments as steps"),
        ("DiLoCo", {"every": 3, "delay": 3}, "delay=3 with every=3"),
        ("DiLoCo", {"every": 3, "delay": -1}, "delay=-1"),
        ("DiLoCo", {"every": 3, "mix": 1.0}, "mix=1.0"),
        ("DiLoCo", {"every": 3, "outer_lr": 0.0}, "outer_lr=0.0"),
        ("DiLoCo", {"every": 3, "outer_momentum": 1.0}, "outer_momentum=1.0"),
        ("SlowMo", {"every": 3, "slow_momentum": -0.1}, "slow_momentum=-0.1"),
        ("DiLoCo", {"every": 3, "warmup": -1}, "warmup=-1"),
        ("DiLoCo", {"every": 3, "piece_mib": 0}, "piece_mib=0"),
        ("LocalSGD", {"every": 3, "compression": "int5"}, "unknown compression 'int5'"),
        ("LocalSGD", {"every": 3, "compression": "powersgd"}, "powersgd"),
        ("LocalSGD", {"every": 3, "sync": "sharded"}, "sync='sharded' leaves each rank a part"),
        ("DiLoCo", other_on_rank_1, "[rank 1] DiLoCo differs between ranks"),
    ],
)
def test_bad_input_is_refused_on_all_ranks_before_anything_begins(pool, kind, options, said):
    for name, text in pool(2).run(refused, kind, options):
        assert name == ("MismatchError" if callable(options) else "UsageError")
        assert said in text


def test_numbers_that_compression_is_unfit_for_are_named():
    model = network(torch.float64)
    model[0] = nn.Linear(WIDTH, 256).double()
    with pytest.raises(UsageError, match=r"int4 is unfit for parameter '0\.weight' of float64"):
        pl.DiLoCo(model, adamw(model), every=4)
    wrapped = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="holds no parameter of this model"):
        pl.LocalSGD(wrapped, adamw(network()), every=4)


def test_a_world_of_one_takes_outer_steps_alone():
    model = network()
    optim = adamw(model)
    with pl.DiLoCo(model, optim, every=5, compression=None):
        for step in range(1, 11):
            take_step(model, optim, 0, step)
    assert torch.allclose(flat(model), transcript(1, 10, 5, 0.7, 0.9, adamw), rtol=0, atol=1e-10)


def other_rates(rank, size):
    """SlowMo divides by the inner learning rate: where ranks have other ones, all take the same mean of them."""
    model = network()
    optim = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank))
    with pl.SlowMo(model, optim, every=2, compression=None):
        for step in range(1, 9):
            take_step(model, optim, rank, step)
    return flat(model)


def test_ranks_with_other_learning_rates_take_the_same_slow_step(pool):
    assert bool(same(pool(3).run(other_rates)).isfinite().all())


@pytest.mark.parametrize(
    ("spoil", "said"), [("complex", "is complex64"), ("frozen", "no parameter that is trained")]
)
def test_models_whose_parameters_cannot_be_averaged_are_refused(spoil, said):
    model = nn.Linear(3, 3)
    if spoil == "complex":
        model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    else:
        model.requires_grad_(False)
    with pytest.raises(UsageError) as refused:
        pl.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2)
    assert said in str(refused.value)
