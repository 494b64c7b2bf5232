"""NaN or infinite gradients on simulated accelerators: steps are skipped without host waits, with the CPU's bits."""

from __future__ import annotations

import contextlib
import gc
import logging
import math

import pytest
import torch
from torch import nn

import model_zoo
import paceline
from paceline.errors import BackwardFailed, NonFiniteGradient, SyncError
from paceline.parallel.engine import deferred_status, gradient_finite_check
from simulated_accelerator import simulated_device, simulated_world

STEPS, COUNTED_FROM = 10, 5
"""The first steps build the buckets, make the optimizer's state, and are read in time."""

BAD = {1: (math.nan, [1], None), 6: (math.nan, [1], "2.weight"), 7: (math.inf, [0, 1], None)}
"""By step: the factor of a gradient, the ranks that have it, and the parameter; None: the loss."""


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))


def backward(model, rank, step, device, bad):
    """Run a backward with a gradient that is multiplied by a factor on some ranks."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    samples = 4 + (rank + step) % 3
    x = torch.randn(samples, 6, generator=generator)
    y = torch.randint(0, 3, (samples,), generator=generator)
    if device != "cpu":
        x, y = x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    factor, ranks, name = bad.get(step, (1.0, [], None))
    loss = nn.functional.cross_entropy(model(x), y)
    if rank in ranks and name is None:
        loss = loss * factor
    elif rank in ranks:  # a finite loss, with a slope of one parameter that is not
        loss = loss + (dict(model.module.named_parameters())[name].sum() * 0).abs().sqrt()
    model.backward(loss, samples=samples)


def tensors_of(model, optim):
    """Return copies of the parameters and of the optimizer's state."""
    state = optim.shards() if isinstance(optim, paceline.ShardedOptimizer) else None
    if state is None:
        states = list(optim.state_dict()["state"].values())
    else:
        states = [shard["state"] for shards in state.values() for shard in shards]
    held = [value for each in states for value in each.values() if isinstance(value, torch.Tensor)]
    local = [each.to_local() if hasattr(each, "to_local") else each for each in held]
    return [each.detach().cpu().clone() for each in [*model.whole_parameters(), *local]]


class Steps:
    """Counts the steps for the simulator, which is None on the CPU."""

    def __init__(self, simulator):
        self.simulator = simulator

    def next(self):
        if self.simulator is not None:
            self.simulator.next_step()
            self.simulator.phase = "step"

    def pause(self):
        if self.simulator is not None:
            self.simulator.phase = ""


def waits_within(simulator):
    """Return where the host waited within a late step, other than for the step before."""
    late = {module.__name__.rpartition(".")[2] for module in (deferred_status, gradient_finite_check)}
    return [
        (wait.step, wait.kind, wait.site)
        for wait in simulator.synchronisations
        if wait.phase == "step"
        and wait.step > COUNTED_FROM
        and not (wait.kind == "event" and wait.age >= 1 and any(name in wait.site for name in late))
    ]


def skips(rank, device, sync, optimizer, clip, source, bad=BAD, simulator=None):
    """Return parameters, state and reports of a training with bad steps."""
    kind, options = optimizer
    model = paceline.DataParallel(net().to(device), sync=sync)
    optim = paceline.ShardedOptimizer(model, getattr(torch.optim, kind), **options)
    guard = paceline.NonFiniteGuard(model, optim, "skip", source=source)
    steps = Steps(simulator)
    for step in range(STEPS):
        steps.next()
        backward(model, rank, step, device, bad)
        if clip == "model":
            model.clip_grad_norm_(0.1)
        elif clip == "torch":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optim.step()
        optim.zero_grad()
    steps.pause()
    latest = guard.latest
    return tensors_of(model, optim), (guard.skipped, latest.step, latest.ranks, sorted(latest.names))


def compare(rank, size, path, *case):
    """Return whether a simulated device has the CPU's tensors and reports, and where the host waited."""
    records = []
    logging.getLogger("paceline.health").addHandler(handler := Records(records))
    try:
        with simulated_world(rank, size, path, "cpu:gloo,sim:simccl", seed=1) as simulator:
            expected, report = skips(rank, "cpu", *case)
            on_cpu, records[:] = list(records), []
            found, late_report = skips(rank, "sim", *case, simulator=simulator)
            waits = waits_within(simulator)
    finally:
        logging.getLogger("paceline.health").removeHandler(handler)
    assert report == late_report
    assert records == on_cpu
    assert len(records) == (3 if rank == 0 else 0)
    assert report[:3] == (3, 7, (0, 1))
    return len(found) == len(expected) and all(map(torch.equal, found, expected)), waits


class Records(logging.Handler):
    """Keeps the messages."""

    def __init__(self, texts):
        super().__init__()
        self.texts = texts

    def emit(self, record):
        self.texts.append(record.getMessage())


FUSED_ADAMW = ("AdamW", {"lr": 0.1, "fused": True})
FUSED_SGD = ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True})
FOREACH_ADAMW = ("AdamW", {"lr": 0.1, "foreach": True})


@pytest.mark.parametrize(
    ("sync", "optimizer", "clip", "source"),
    [
        ("bucketed", FUSED_ADAMW, "", True),
        ("bucketed", FUSED_SGD, "torch", False),
        ("sharded", FUSED_ADAMW, "", False),
        ("sharded", FUSED_SGD, "torch", True),
        ("full-shard", FUSED_ADAMW, "model", False),
        ("full-shard", FUSED_ADAMW, "", True),
    ],
)
def test_a_fused_optimizer_skips_a_step_without_a_wait(
    simulated_pool, tmp_path, sync, optimizer, clip, source
):
    found = simulated_pool(2).run(
        compare, str(tmp_path / "store"), sync, optimizer, clip, source, world=False
    )
    assert found == [(True, [])] * 2


@pytest.mark.parametrize("sync", ["bucketed", "sharded"])
def test_another_optimizer_skips_in_time_and_waits_once_a_step(simulated_pool, tmp_path, sync):
    found = simulated_pool(2).run(
        compare, str(tmp_path / "store"), sync, FOREACH_ADAMW, "", True, world=False
    )
    for same, waits in found:
        assert same
        assert {kind for _, kind, _ in waits} == {"event"}
        steps = [step for step, _, _ in waits]  # none in a step whose device was done already
        assert len(steps) == len(set(steps))


def stops(rank, size, path, sync, optimizer):
    """A step is bad: the next one raises, with everything as before the bad one, and training goes on."""
    kind, options = optimizer
    with simulated_world(rank, size, path, "cpu:gloo,sim:simccl", seed=1) as simulator:
        model = paceline.DataParallel(net().to("sim"), sync=sync)
        optim = paceline.ShardedOptimizer(model, getattr(torch.optim, kind), **options)
        guard = paceline.NonFiniteGuard(model, optim, "stop")
        steps, before = Steps(simulator), []
        for step in range(STEPS):
            steps.pause()
            if step == 6:
                before = tensors_of(model, optim)
            steps.next()
            backward(model, rank, step, "sim", {6: BAD[6]})
            if step != 7:
                optim.step()
            else:
                with pytest.raises(NonFiniteGradient) as caught:
                    optim.step()
                steps.pause()
                assert all(map(torch.equal, tensors_of(model, optim), before))
            optim.zero_grad()
        steps.pause()
        moved = not any(map(torch.equal, tensors_of(model, optim), before))
        assert guard.skipped == 0
        guard.remove()
        error = caught.value
        return (
            str(error).partition("\n")[0],
            error.rank,
            error.step,
            guard.latest.names,
            moved,
            waits_within(simulator),
        )


@pytest.mark.parametrize(
    ("sync", "optimizer"), [("bucketed", FUSED_SGD), ("sharded", FUSED_ADAMW), ("full-shard", FUSED_ADAMW)]
)
def test_stop_raises_a_step_late_with_the_state_of_before(simulated_pool, tmp_path, sync, optimizer):
    results = simulated_pool(2).run(stops, str(tmp_path / "store"), sync, optimizer, world=False)
    assert results[0] == results[1]
    text, rank, step, names, moved, waits = results[0]
    assert text.startswith("[rank 1, step 6] the gradient of ")
    assert text.endswith(": from rank 1")
    assert (rank, step, moved, waits) == (1, 6, True, [])
    assert "2.weight" in names


def reads_the_last(rank, size, path, action):
    """The last step is bad: rank 0 alone reads the report, and `remove` acts on it."""
    with simulated_world(rank, size, path, "sim:simccl", seed=1):
        model = paceline.DataParallel(net().to("sim"), sync="bucketed")
        optim = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        guard = paceline.NonFiniteGuard(model, optim, action)
        for step in range(5):
            backward(model, rank, step, "sim", {4: BAD[6]})
            optim.step()
            optim.zero_grad()
        read = (guard.latest.step, guard.latest.ranks, guard.skipped) if rank == 0 else None
        with (
            contextlib.nullcontext() if action == "skip" else pytest.raises(NonFiniteGradient, match="step 4")
        ):
            guard.remove()
        return read, guard.latest.step, guard.skipped, not hasattr(optim, "found_inf")


@pytest.mark.parametrize("action", ["skip", "stop"])
def test_the_report_on_the_last_step_is_not_lost(simulated_pool, tmp_path, action):
    skipped = int(action == "skip")
    read = (4, (1,), skipped)
    assert simulated_pool(2).run(reads_the_last, str(tmp_path / "store"), action, world=False) == [
        (read if rank == 0 else None, 4, skipped, True) for rank in range(2)
    ]


def too_many(rank, size, path):
    """Every step from the fourth on is bad."""
    with simulated_world(rank, size, path, "sim:simccl", seed=1):
        model = paceline.DataParallel(net().to("sim"), sync="bucketed")
        optim = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        guard = paceline.NonFiniteGuard(model, optim, "skip", in_a_row=2)
        bad = dict.fromkeys(range(4, 9), (math.nan, [0], None))
        for step in range(6):
            backward(model, rank, step, "sim", bad)
            optim.step()
            optim.zero_grad()
        backward(model, rank, 6, "sim", bad)
        with pytest.raises(NonFiniteGradient) as caught:
            optim.step()
        return caught.value.step, guard.latest.step, ", 2 in a row" in str(caught.value)


def test_too_many_in_a_row_raise_a_step_late(simulated_pool, tmp_path):
    assert simulated_pool(2).run(too_many, str(tmp_path / "store"), world=False) == [(5, 5, True)] * 2


def alone(rank, size, optimizer, clip):
    """Rank 0 alone trains on the CPU and on a device, without a world."""
    if rank:
        return None
    bad = {0: (math.nan, [0], None), 6: (math.nan, [0], "2.weight"), 7: (math.inf, [0], None)}
    with simulated_device(seed=1) as simulator:
        expected, report = skips(0, "cpu", "bucketed", optimizer, clip, True, bad)
        found, late_report = skips(0, "sim", "bucketed", optimizer, clip, True, bad, simulator)
        assert late_report == report == (3, 7, (0,), ["0.bias", "0.weight", "2.bias", "2.weight"])
        return all(map(torch.equal, found, expected)), waits_within(simulator)


@pytest.mark.parametrize(
    ("optimizer", "clip"), [(FUSED_ADAMW, "model"), (FUSED_SGD, "")], ids=["AdamW", "SGD"]
)
def test_one_process_skips_without_a_wait_once_the_optimizer_has_a_state(simulated_pool, optimizer, clip):
    assert simulated_pool(2).run(alone, optimizer, clip, world=False)[0] == (True, [])


def finds_later(rank, size, path):
    """Without measuring, a finite loss is no evidence; the second time the rank is known."""
    with simulated_world(rank, size, path, "sim:simccl", seed=1):
        model = paceline.DataParallel(net().to("sim"), sync="sharded")
        optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=0.1, fused=True)
        guard = paceline.NonFiniteGuard(model, optim, source=False)
        seen = []
        for step in range(8):
            backward(model, rank, step, "sim", {4: BAD[6], 6: BAD[6]})
            optim.step()
            optim.zero_grad()
            if step in (3, 4, 6):
                seen.append(guard.latest and (guard.latest.step, guard.latest.ranks, guard.latest.names))
        return seen


def test_without_measuring_the_first_source_may_be_unknown_and_the_next_is_not(simulated_pool, tmp_path):
    names = ("2.weight",)
    expected = [None, (4, (), names), (6, (1,), names)]
    assert simulated_pool(2).run(finds_later, str(tmp_path / "store"), world=False) == [expected] * 2


def ends(rank, size, path):
    """The last step is bad, and nothing reads that before the model is gone."""
    records = []
    logging.getLogger("paceline.health").addHandler(handler := Records(records))
    with simulated_world(rank, size, path, "sim:simccl", seed=1):
        model = paceline.DataParallel(net().to("sim"), sync="bucketed")
        optim = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        paceline.NonFiniteGuard(model, optim)
        for step in range(5):
            backward(model, rank, step, "sim", {4: BAD[6]})
            optim.step()
            optim.zero_grad()
        del model, optim
        gc.collect()
    logging.getLogger("paceline.health").removeHandler(handler)
    return records


def test_a_last_step_that_nothing_has_read_is_logged_at_the_end(simulated_pool, tmp_path):
    for records in simulated_pool(2).run(ends, str(tmp_path / "store"), world=False):
        assert records == ["step 4, the last one, is skipped: the gradient of 2.weight is not finite"]


def fails(rank, size, path):
    """A backward raises on rank 1 in a step that is reported late."""
    with simulated_world(rank, size, path, "sim:simccl", seed=1):
        model = paceline.DataParallel(net().to("sim"), sync="sharded")
        optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=0.1, fused=True)
        guard = paceline.NonFiniteGuard(model, optim)
        for step in range(4):
            backward(model, rank, step, "sim", {})
            optim.step()
        if rank == 1:
            with pytest.raises(FloatingPointError, match="injected"):
                model.backward(
                    model_zoo.Explode.apply(model(torch.ones(4, 6, device="sim")).sum()), samples=4
                )
        else:
            backward(model, rank, 4, "sim", {})
        expected = (
            (SyncError, r"on this rank in step 4") if rank == 1 else (BackwardFailed, r"step 4.*on rank 1")
        )
        with pytest.raises(expected[0], match=expected[1]):
            model.engine.settle()
        return guard.latest


def test_a_rank_without_a_result_takes_part_in_the_inspection(simulated_pool, tmp_path):
    assert simulated_pool(2).run(fails, str(tmp_path / "store"), world=False) == [None, None]


def scales(rank, size, path, sync, optimizer):
    """A GradScaler decides, with a guard beside it."""
    kind, options = optimizer
    ends = []
    with simulated_world(rank, size, path, "cpu:gloo,sim:simccl", seed=1) as simulator:
        for device in ("cpu", "sim"):
            model = paceline.DataParallel(net().to(device), sync=sync)
            optim = paceline.ShardedOptimizer(model, getattr(torch.optim, kind), **options)
            guard = paceline.NonFiniteGuard(model, optim, "stop")
            scaler = torch.amp.GradScaler(device, init_scale=4.0)
            steps = Steps(simulator if device == "sim" else None)
            for step in range(STEPS):
                steps.next()
                x, y = torch.ones(4, 6, device=device), torch.ones(4, dtype=torch.int64, device=device)
                loss = nn.functional.cross_entropy(model(x), y)
                loss = loss * math.inf if (rank, step) == (1, 7) else loss
                model.backward(scaler.scale(loss), samples=4)
                scaler.step(optim)
                scaler.update()
                optim.zero_grad()
            steps.pause()
            ends.append((tensors_of(model, optim), scaler.get_scale(), guard.latest))
        (expected, scale, _), (found, late_scale, latest) = ends
        assert (scale, late_scale, latest) == (2.0, 2.0, None)
        return all(map(torch.equal, found, expected)), waits_within(simulator)


@pytest.mark.parametrize("sync", ["bucketed", "sharded"])
def test_a_grad_scaler_skips_without_a_wait(simulated_pool, tmp_path, sync):
    found = simulated_pool(2).run(scales, str(tmp_path / "store"), sync, FUSED_ADAMW, world=False)
    assert found == [(True, [])] * 2
