"""Training with gathers that stay in flight: modes, several optimizers, failures, compilation."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode, _len_torch_function_stack

import paceline
from held_back_gathers import EACH_PARAMETER, WIDTH, Small, X, held_back, one_step, pending, saved, wrapped
from paceline.errors import PacelineError
from paceline.parallel.sharding import sharded_layout


class Looking(TorchFunctionMode):
    """A mode of the program that looks at what comes out."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if type(found) is torch.Tensor and found.device.type == "cpu" and found.is_floating_point():
            assert not found.isnan().any()
        return found


def run_training(rank, wait, *, modes=nullcontext, steps=4, before=None, **options):
    """Train and return the parameters; with `wait`, after each step for all of them."""
    torch.manual_seed(3)
    model, optim = wrapped(Small(), **options)
    with modes():
        for step in range(steps):
            if before is not None:
                before(model, optim)
            one_step(model, optim, rank, seed=step)
            if wait:
                model.wait_for_parameters()
    return [param.detach().clone() for param in model.parameters()]


def switching(model, optim):
    """Set or clear the default device before every step."""
    torch.set_default_device(None if torch.get_default_device().type == "meta" else "cpu")


def compared(rank, size):
    def step_twice(model, optim):
        one_step(model, optim, rank)

    def with_modes(model, optim):
        with Looking(), torch.device("cpu"):
            one_step(model, optim, rank)

    def mode_left_between(model, optim):
        mode = Looking()
        mode.__enter__()
        one_step(model, optim, rank)
        mode.__exit__(None, None, None)

    variants = {
        "plain": {},
        "a mode around": {"modes": Looking},
        "a device around": {"modes": lambda: torch.device("cpu")},
        "modes in a step": {"before": with_modes},
        "a mode is left after the step": {"before": mode_left_between},
        "two steps": {"before": step_twice},
        "default device": {"before": switching},
        "masters": {"master_dtype": torch.float64},
        "one bucket": {"sync": "sharded"},
    }
    wrong = []
    for name, given in variants.items():
        expected = run_training(rank, True, **given)
        torch.set_default_device(None)
        with held_back():
            found = run_training(rank, False, **given)
        torch.set_default_device(None)
        if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
            wrong.append(name)
    paceline.DataParallel(Small())
    assert _len_torch_function_stack() == 0
    return wrong


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_training_is_the_same_as_with_waiting(pool, backend):
    assert pool(2, backend).run(compared) == [[], []]


def two_optimizers(rank, size):
    with held_back() as launched:
        model = paceline.DataParallel(Small(), sync=EACH_PARAMETER)
        weights = [param for param in model.parameters() if param.dim() > 1]
        rest = [param for param in model.parameters() if param.dim() == 1]
        muon = paceline.ShardedOptimizer(model, torch.optim.Muon, weights, lr=0.02)
        adamw = paceline.ShardedOptimizer(model, torch.optim.AdamW, rest, lr=0.02)
        for step in range(2):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step + 10 * rank))
            model(x).square().mean().backward()
            launched.clear()
            muon.step()
            of_muon = len(launched)
            adamw.step()
            assert pending(launched) == len(launched) > of_muon > 0
        assert model(x).isfinite().all()
        assert pending(launched) == 0


def test_the_step_of_a_second_optimizer_does_not_wait_for_the_first_ones_gathers(pool):
    pool(2).run(two_optimizers)


def with_closure(rank, size):
    with held_back():
        model, optim = wrapped(Small())

        def closure():
            optim.zero_grad()
            loss = model(X).square().mean()
            loss.backward()
            return loss

        losses = [optim.step(closure).item() for _ in range(4)]
    assert sorted(losses, reverse=True) == losses


def failing_forward(rank, size):
    """A forward raises in flight; training goes on."""
    with held_back() as launched:
        model, optim = wrapped(Small())
        one_step(model, optim, rank)
        broken = mock.patch.object(model.module.last, "forward", side_effect=ArithmeticError)
        with broken, pytest.raises(ArithmeticError):
            model(X)
        assert pending(launched) == 2
        one_step(model, optim, rank)
        assert model(X).isfinite().all()


class Failing(torch.optim.Muon):
    steps_until_failure = -1

    def step(self, closure=None):
        Failing.steps_until_failure -= 1
        if Failing.steps_until_failure == 0:
            raise ArithmeticError
        return super().step(closure)


def failing_update(rank, size):
    """The update of one part raises on all ranks; the parts that were sent are awaited where they are used."""
    with held_back() as launched, mock.patch.object(sharded_layout, "update_parts", _each_by_itself):
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)]  # three buckets of two matrices
        model = paceline.DataParallel(nn.Sequential(*layers), sync=EACH_PARAMETER)
        optim = paceline.ShardedOptimizer(model, Failing, lr=0.1)
        model(X).sum().backward()
        Failing.steps_until_failure = 3
        with pytest.raises(ArithmeticError):
            optim.step()
        assert pending(launched) == len(launched) == 1  # the last bucket's, right after the first was updated
        assert all(param.isfinite().all() for param in model.module.parameters())
        assert pending(launched) == 0


def _each_by_itself(sizes, *, accelerator):
    return [[index] for index in range(len(sizes))]


def scaled(rank, size):
    """GradScaler and a guard: steps that are skipped leave nothing in flight."""
    with held_back() as launched:
        model, optim = wrapped(Small())
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(4):
            loss = model(X).square().mean()
            if step == 2:
                loss = loss * float("inf")
            before = [param.detach().clone() for param in model.parameters()]
            scaler.scale(loss).backward()
            launched.clear()
            scaler.unscale_(optim)
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
            assert bool(launched) == (step != 2)
            unchanged = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            assert unchanged == (step == 2)


def guarded(rank, size):
    with held_back():
        model, optim = wrapped(Small())
        guard = paceline.NonFiniteGuard(model, optim)
        for step in range(3):
            loss = model(X).square().mean() * (float("nan") if step == 1 and rank == 0 else 1.0)
            model.backward(loss, samples=4)
            before = [param.detach().clone() for param in model.parameters()]
            optim.step()
            assert all(param.isfinite().all() for param in model.parameters())
            unchanged = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            assert unchanged == (step == 1)
        guard.remove()


def deleted(rank, size):
    """The wrapper and the optimizer are gone; the bare module is evaluated."""
    with held_back() as launched:
        net = Small()
        model, optim = wrapped(net)
        one_step(model, optim, rank)
        assert pending(launched) == 4
        del model, optim
        assert net(X).isfinite().all()
        assert pending(launched) == 0
        again, optim = wrapped(net)  # the module is wrapped again, in flight
        one_step(again, optim, rank)
        third, optim = wrapped(net)
        assert pending(launched) == 0
        one_step(third, optim, rank)
        del again, third, optim, net
        paceline.DataParallel(Small())
        assert _len_torch_function_stack() == 0


def checkpointed(rank, size, folder):
    with held_back() as launched:
        model, optim = wrapped(Small())
        one_step(model, optim, rank)
        assert pending(launched) == 4
        paceline.Checkpoint(folder, model, optim).save(wait=True)
        expected = [param.detach().clone() for param in model.parameters()]
        other, other_optim = wrapped(Small())
        assert paceline.Checkpoint(folder, other, other_optim).load()
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), expected, strict=True))


def test_a_checkpoint_right_after_a_step_has_whole_parameters(pool, tmp_path):
    pool(2).run(checkpointed, str(tmp_path))


def in_another_thread(rank, size):
    with held_back() as launched, ThreadPoolExecutor(1) as thread:
        model, optim = wrapped(Small())
        one_step(model, optim, rank)
        model.wait_for_parameters()
        assert pending(launched) == 0
        assert thread.submit(model.module, X).result().isfinite().all()
        thread.submit(one_step, model, optim, rank).result()  # a step in a thread, then one in this
        one_step(model, optim, rank)
        assert model(X).isfinite().all()
        assert _len_torch_function_stack() == 0
        assert thread.submit(lambda: model(X).isfinite().all()).result()


SCENES = [with_closure, failing_forward, failing_update, scaled, guarded, deleted, in_another_thread]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_in_flight(pool, scene):
    pool(2).run(scene)


def lost_rank(report, rank, size, folder, backend):
    """Rank 1 ends in its update, before it sends its part, and after the step of rank 0."""
    init, stepped = f"file://{folder}/world", Path(folder) / "stepped"
    dist.init_process_group(backend, init, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    model, optim = wrapped(Small())
    one_step(model, optim, rank)

    def end(*_):
        deadline = time.monotonic() + 20
        while not stepped.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os._exit(3)

    if rank == 1:
        optim.register_step_pre_hook(end)
    one_step(model, optim, rank)
    stepped.touch()
    started, errors = time.monotonic(), []
    for use in (lambda: model(X), lambda: saved(model.state_dict())):
        with pytest.raises(PacelineError) as raised:
            use()
        errors.append((type(raised.value).__name__, str(raised.value)))
    report((errors, time.monotonic() - started))
    os._exit(0)  # without a farewell to the lost rank


def lost_rank_scene(fork, folder, backend):
    ranks = [fork(lost_rank, rank, 2, folder, backend) for rank in range(2)]
    found = ranks[0].receive()
    assert ranks[1].wait() == 3
    return found


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_a_rank_that_ends_with_gathers_in_flight_is_an_error_at_every_use(killable, backend):
    errors, seconds = killable.run_ranks(lost_rank_scene, backend)
    kind, text = {
        "gloo": ("SyncError", "another rank ended or stopped answering"),
        "paceline": ("PeerLost", "rank 1 on host"),
    }[backend]
    assert [name for name, _ in errors] == [kind] * 2
    assert all(text in message for _, message in errors)
    assert seconds < 20


def compiled(rank, size, backend):
    """A compiled model, one that is compiled in flight, and a scripted layer."""
    expected = run_training(rank, True)
    found = []
    for kind in ("scripted", "late", "before"):
        torch.manual_seed(3)
        net = Small()
        if kind == "scripted":
            net.first = torch.jit.script(net.first)
        model, optim = wrapped(net)
        if kind == "before":
            model.compile(backend=backend)
        for step in range(4):
            one_step(model, optim, rank, seed=step)
            if kind == "late" and step == 1:
                model.module.compile(backend=backend)
        found.append(all(torch.equal(a, b) for a, b in zip(model.parameters(), expected, strict=True)))
        assert _len_torch_function_stack() == 0
    return found


def in_new_world(rank, size, path, case, *args):
    dist.init_process_group("gloo", f"file://{path}", rank=rank, world_size=size)
    try:
        return case(rank, size, *args)
    finally:
        dist.destroy_process_group()


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_train_alike(tmp_path, backend):
    from rank_pool import spawn

    found = spawn(in_new_world, 2, str(tmp_path / "world"), compiled, backend, timeout=240)
    assert found == [[True] * 3] * 2
