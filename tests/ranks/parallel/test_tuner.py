"""``sync="auto"``: results never change, ranks switch at the same step, state moves, and the choice is cached."""

from __future__ import annotations

import contextlib
import math
import time
from itertools import cycle

import pytest
import torch
import torch.distributed as dist

import model_zoo
import paceline
from paceline.errors import UsageError

PLANS = [
    paceline.Sync(),
    paceline.Sync(bucket_mib=0),
    paceline.Sync(bucket_mib=1e-4, shard="optimizer"),
    paceline.Sync(bucket_mib=math.inf, overlap=False),
    paceline.Sync(bucket_mib=math.inf, shard="optimizer"),
    paceline.Sync(bucket_mib=0, shard="optimizer"),
    paceline.Sync(bucket_mib=1e-4),
    paceline.Sync(shard="optimizer"),
]


class Ordered:
    """Stands in for the tuner: another plan before every step, in an order that is given."""

    def __init__(self, engine, plans):
        from paceline.parallel.tuning.tuner import Tuner

        self._tuner = Tuner(engine)
        self._plans = cycle(plans)
        self.seen = []

    def attach(self, optimizer):
        self._tuner.attach(optimizer)

    def optimizer_stepping(self, optimizer):
        self._tuner.optimizer_stepping(optimizer)

    def apply_pending_plan(self, **options):
        self._tuner.apply_pending_plan(**options)

    def round_ended(self):
        self.seen.append(self._tuner._engine.plan)
        self._tuner.target = next(self._plans)


ADAMW = {"lr": 0.02, "weight_decay": 0.05, "fused": True}
SGD = {"lr": 0.05, "momentum": 0.9}


def optimizers_of(model, kind):
    """Return the optimizers of a kind: one, or Muon on the hidden matrices and AdamW on the rest."""
    if kind == "muon":
        matrices, rest = paceline.matrix_parameters(model)
        muon = paceline.ShardedOptimizer(model, torch.optim.Muon, matrices, lr=0.02)
        return [muon, paceline.ShardedOptimizer(model, torch.optim.AdamW, rest, **ADAMW)]
    cls, options = {"adamw": (torch.optim.AdamW, ADAMW), "sgd": (torch.optim.SGD, SGD)}[kind]
    return [paceline.ShardedOptimizer(model, cls, **options)]


def zero_grad(optims):
    for optim in optims:
        optim.zero_grad()


def train(rank, name, kind, sync, plans=None, steps=9, *, dtype=torch.float64, sharded=True, late_zero=False):
    """Train on this rank's data; return the parameters, the optimizer's state, and the plans."""
    net = model_zoo.build(name).to(dtype)
    model = paceline.DataParallel(net, sync=sync)
    if plans is not None:
        model.engine.tuner = Ordered(model.engine, plans)
    optims = optimizers_of(model, kind) if sharded else [torch.optim.SGD(model.parameters(), **SGD)]
    data = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        x = torch.randn(4, model_zoo.WIDTH, generator=data, dtype=dtype)
        y = torch.randn(4, 1, generator=data, dtype=dtype)
        loss = model_zoo.loss_of(model, name, x, y)
        if late_zero:
            zero_grad(optims)
        model.backward(loss, samples=4)
        model.clip_grad_norm_(0.1)
        for optim in optims:
            optim.step()
        if not late_zero:
            zero_grad(optims)
    seen = [] if plans is None else model.engine.tuner.seen
    return [param.detach().clone() for param in model.module.parameters()], seen


def check_moving(rank, size, name, kind, dtype=torch.float64):
    plain, _ = train(rank, name, kind, "auto", [paceline.Sync()], dtype=dtype)
    moved, seen = train(rank, name, kind, "auto", PLANS, dtype=dtype)
    assert seen[1:] == PLANS
    return [torch.equal(a, b) for a, b in zip(plain, moved, strict=True)]


MODELS = ["Plain", "Tied", "Unused", "Frozen", "Branches", "Strided", "CheckpointedReentrant"]


@pytest.mark.sweep
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_plans_that_change_before_every_step_leave_every_bit_as_it_is(pool, ranks, kind, name):
    for equal in pool(ranks, "paceline").run(check_moving, name, kind):
        assert all(equal)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_moving_between_plans_changes_nothing_in_float32(pool, kind):
    for equal in pool(2, "paceline").run(check_moving, "Plain", kind, torch.float32):
        assert all(equal)


# ---------------------------------------------------------------------- without a sharding optimizer


def check_whole_plans(rank, size):
    plans = [plan for plan in PLANS if plan.shard == "none"]
    plain, _ = train(rank, "Branches", "sgd", "auto", [paceline.Sync()], sharded=False)
    results = []
    for late in (False, True):  # gradients of the last step are there when the plan changes, or not
        moved, seen = train(rank, "Branches", "sgd", "auto", plans, sharded=False, late_zero=late)
        assert seen[1:5] == plans
        results += [torch.equal(a, b) for a, b in zip(plain, moved, strict=True)]
    return results


def test_an_ordinary_optimizer_sees_the_same_gradients(pool):
    for equal in pool(2, "paceline").run(check_whole_plans):
        assert all(equal)


def check_kept_gradients(rank, size):
    """Add up two rounds of gradients without zero_grad() between, with another plan for the second."""
    found = []
    for sync in ("bucketed", "auto"):
        model = paceline.DataParallel(model_zoo.build("Plain"), sync=sync)
        if sync == "auto":
            model.engine.tuner = Ordered(model.engine, [paceline.Sync(bucket_mib=0)])
        for step in range(4):
            if step != 3:
                model.zero_grad()
            x = torch.full((2, model_zoo.WIDTH), 0.1 * (step + rank), dtype=torch.float64)
            model.backward(model(x).square().mean(), samples=2)
        found.append([param.grad.clone() for param in model.parameters()])
    assert model.plan == paceline.Sync(bucket_mib=0)
    return [torch.equal(a, b) for a, b in zip(*found, strict=True)]


def test_gradients_that_were_kept_move_along(pool):
    for equal in pool(2, "paceline").run(check_kept_gradients):
        assert all(equal)


def check_evaluation(rank, size, how):
    """After every step rank 0 alone runs the model, while the others wait; return the changes to the parameters."""
    context = torch.no_grad if how == "no_grad" else contextlib.nullcontext
    ends = []
    for evaluates in (False, True):
        model = paceline.DataParallel(model_zoo.build("Plain"), sync="auto")
        model.engine.tuner = Ordered(model.engine, PLANS)
        optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=0.02)
        for step in range(2 * len(PLANS)):
            x = torch.full((2, model_zoo.WIDTH), 0.1 * (step + rank), dtype=torch.float64)
            model.backward(model(x).square().mean(), samples=2)
            if evaluates and how == "before step" and rank == 0:
                model(x)
            optim.step()
            optim.zero_grad()
            if evaluates and how != "before step":
                if rank == 0:
                    with context():
                        model.eval()
                        model(x)
                        model.train()
                dist.barrier()
        assert set(model.engine.tuner.seen) == set(PLANS)
        ends.append(list(model.parameters()))
    return [torch.equal(a, b) for a, b in zip(*ends, strict=True)]


@pytest.mark.parametrize("how", ["no_grad", "with grad", "before step"])
def test_one_rank_may_evaluate_while_the_others_wait(pool, how):
    for equal in pool(2, "paceline").run(check_evaluation, how):
        assert all(equal)


def check_saved_states(rank, size, folder):
    """Save before each change of the layout, by hand and by a checkpoint; resume from both; return the differences."""

    def made():
        model = paceline.DataParallel(model_zoo.build("Plain"), sync="auto")
        model.engine.tuner = Ordered(model.engine, PLANS)
        return model, paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=0.02)

    def steps(model, optim, first):
        for number in range(first, 10):
            data = torch.Generator().manual_seed(100 * number + rank)
            x, y = (
                torch.randn(4, width, generator=data, dtype=torch.float64) for width in (model_zoo.WIDTH, 1)
            )
            model.backward(model_zoo.loss_of(model, "Plain", x, y), samples=4)
            optim.step()
            optim.zero_grad()
            yield number

    straight, layouts = made(), set()
    for number in steps(*straight, 0):
        with paceline.Checkpoint(folder / str(number), *straight) as checkpoint:
            checkpoint.save(wait=True)
        layouts.add("shards" in straight[1].state_dict())
        torch.save([part.state_dict() for part in straight], folder / f"{number}-{rank}.pt")
    assert layouts == {True, False}
    ends = []
    for number in range(10):
        by_hand, by_checkpoint = made(), made()
        for part, state in zip(by_hand, torch.load(folder / f"{number}-{rank}.pt"), strict=True):
            part.load_state_dict(state)
        with paceline.Checkpoint(folder / str(number), *by_checkpoint) as checkpoint:
            checkpoint.load()
        for model, optim in (by_hand, by_checkpoint):
            list(steps(model, optim, number + 1))
            ends.append(list(model.parameters()))
    return [torch.equal(a, b) for end in ends for a, b in zip(straight[0].parameters(), end, strict=True)]


@pytest.mark.thorough
def test_a_checkpoint_in_any_layout_resumes_bitwise(pool, tmp_path):
    for equal in pool(2, "paceline").run(check_saved_states, tmp_path):
        assert all(equal)


# ---------------------------------------------------------------------- the search itself


def kept_in(folder, ranks=2):
    """Return the environment of ranks that cache their choice in `folder`."""
    return [{"XDG_CACHE_HOME": str(folder)}] * ranks


def tuned(rank, steps, *, kind="adamw", sharded=True, idle=None, accumulate=1, moments=None):
    """Train a little model with sync="auto"; return the plan before every step and the messages."""
    torch.manual_seed(5)
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    model = paceline.DataParallel(net, sync="auto")
    optims = optimizers_of(model, kind) if sharded else [torch.optim.AdamW(model.parameters(), lr=1e-3)]
    plans = []
    for step in range(steps):
        plans.append(model.plan.label)
        for micro in range(accumulate):
            x = torch.full((2, 64), 0.01 * (step + rank + micro))
            with model.accumulate() if micro < accumulate - 1 else contextlib.nullcontext():
                if idle is not None and rank == idle and step % 3 == 1:
                    model.backward(None, samples=0)
                else:
                    model.backward(model(x).square().mean(), samples=2)
        for optim in optims:
            optim.step()
        zero_grad(optims)
    return plans, model.tuning.sentences, model.tuning.settled, [p.detach().clone() for p in net.parameters()]


def check_search(rank, size, options):
    plans, sentences, settled, params = tuned(rank, 45, **options)
    return plans, sentences, None if settled is None else settled.plan.label, params


@pytest.mark.parametrize("backend", ["paceline", "gloo"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_settle_on_one_plan_within_40_steps(pool, ranks, backend, tmp_path):
    found = pool(ranks, backend).run(check_search, {}, env=kept_in(tmp_path, ranks))
    plans, sentences, settled, params = found[0]
    assert all(other[0] == plans and other[2] == settled for other in found)
    assert set(plans[:3]) == {"bucketed, 25 MiB"}
    assert len(set(plans)) == 5, "a few candidates ran"
    assert any(plan.startswith("sharded") for plan in plans)
    assert set(plans[40:]) == {settled}, "it is in force in step 40 at the latest, seen before its forward"
    (sentence,) = sentences
    assert settled in sentence
    assert "Seconds per step, by rounds: bucketed, 25 MiB: " in sentence
    for other in found:
        assert all(torch.equal(a, b) for a, b in zip(params, other[3], strict=True))


@pytest.mark.sweep
@pytest.mark.parametrize("options", [{"idle": 1}, {"accumulate": 2}, {"sharded": False}, {"kind": "muon"}])
def test_the_search_continues_with_uneven_and_accumulated_batches(pool, options, tmp_path):
    found = pool(2, "paceline").run(check_search, options, env=kept_in(tmp_path))
    plans, _, settled, params = found[0]
    assert settled is not None
    assert len(set(plans)) >= 3
    assert any(plan.startswith("sharded") for plan in plans) == options.get("sharded", True)
    assert all(torch.equal(a, b) for a, b in zip(params, found[1][3], strict=True))


def check_two_runs(rank, size, other_model):
    first = tuned(rank, 45)
    again = tuned(rank, 6) if not other_model else tuned(rank, 6, sharded=False)
    return first[2].plan, again[0], again[1], again[2]


def test_the_result_is_reused_in_the_next_run(pool, tmp_path):
    for plan, plans, sentences, settled in pool(2, "paceline").run(
        check_two_runs, False, env=kept_in(tmp_path)
    ):
        assert settled.plan == plan
        assert plans[-1] == plan.label
        assert "found for this model on these hosts on" in sentences[0]
    assert len(list((tmp_path / "paceline" / "tuned").iterdir())) == 1


def check_drift(rank, size):
    """Make steps much slower once a plan is found, and see the search begin again."""
    torch.manual_seed(5)
    net = torch.nn.Linear(64, 64)
    model = paceline.DataParallel(net, sync="auto")
    optim = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(45 + 20 + 3 * 20 + 10):
        if step > 75:
            time.sleep(0.02)
        model.backward(model(torch.ones(2, 64)).square().mean(), samples=2)
        optim.step()
        optim.zero_grad()
    return model.tuning.sentences, model.tuning.settled


def test_when_steps_become_much_slower_the_search_begins_again(pool, tmp_path):
    for sentences, settled in pool(2, "paceline").run(check_drift, env=kept_in(tmp_path)):
        assert "the search begins again" in sentences[1]
        assert settled is None


# ---------------------------------------------------------------------- where it does not apply


def test_a_world_of_one_has_nothing_to_tune():
    model = paceline.DataParallel(torch.nn.Linear(2, 2), sync="auto")
    assert model.tuning is None
    model.backward(model(torch.ones(1, 2)).sum())
    assert all(param.grad is not None for param in model.parameters())


def check_local_sgd_ranks(rank, size):
    model = paceline.DataParallel(torch.nn.Linear(2, 2), sync="auto")
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="sync='auto'") as caught, paceline.LocalSGD(model, optim, every=2):
        pass
    return str(caught.value)


def test_ranks_of_local_sgd_refuse_it(pool):
    for message in pool(2, "paceline").run(check_local_sgd_ranks):
        assert "use 'bucketed'" in message


def test_an_unknown_name_is_refused_with_the_valid_ones():
    with pytest.raises(UsageError, match=r"'automatic'.*auto"):
        paceline.DataParallel(torch.nn.Linear(2, 2), sync="automatic")
    with pytest.raises(UsageError, match="DataParallel"):
        paceline.Sync.of("auto")
