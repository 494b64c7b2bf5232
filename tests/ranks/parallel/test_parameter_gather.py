"""Parameters that a sharded step has left in flight: nobody sees them unfinished.

The gathers are held back: until it is waited for, what other ranks updated is NaN.
"""

from __future__ import annotations

import copy
import ctypes
import io
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, functionalize, grad, jacrev, jvp, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode, _len_torch_function_stack
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.errors import PacelineError
from paceline.parallel.engine import parameter_gather
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.sharding import zero

EACH_PARAMETER = paceline.Sync(bucket_mib=0, shard="optimizer")
WIDTH = 8


class HeldBack:
    """A gather whose result appears when it is waited for."""

    ended = None

    def __init__(self, comm, flat, pending):
        pending.wait()
        with torch._C.DisableTorchFunction():
            self.rows = flat.view(torch.uint8).numpy().reshape(comm.shards, -1)
        self.real = self.rows.copy()
        self.rows[[rank for rank in range(comm.shards) if rank != comm.shard]] = 0xFF  # NaN in every dtype
        self.waited = False

    def poll(self):
        pass

    def wait(self):
        if not self.waited:
            self.rows[:] = self.real
        self.waited = True


@contextmanager
def held_back():
    """Hold back all gathers of steps in this block; yield the list of them."""
    launched, real = [], Comm.all_gather

    def all_gather(comm, flat, posted=None):
        launched.append(HeldBack(comm, flat, real(comm, flat, posted)))
        return launched[-1]

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(Comm, "all_gather", all_gather))
        # An earlier case of this process may have compiled.
        patches.enter_context(mock.patch.object(parameter_gather._compiled, "may_run", return_value=False))
        yield launched


def pending(launched):
    return sum(not each.waited for each in launched)


def wrapped(net, sync=EACH_PARAMETER, **options):
    model = paceline.DataParallel(net, sync=sync)
    options = {"lr": 0.05, **options}
    return model, paceline.ShardedOptimizer(model, torch.optim.AdamW, **options)


def one_step(model, optim, rank, loss_of=lambda net, x: net(x).square().mean(), seed=0):
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * seed + rank))
    loss_of(model, x).backward()
    optim.step()
    optim.zero_grad()


# ---------------------------------------------------------------- models


class Layers(nn.Module):
    """Layers whose children's parameters are used without calling them, tied ones, lists of weights."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.first.weight
        self.normed = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0, batch_first=True), 1
        )
        self.bag = nn.EmbeddingBag(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.normed(torch.tanh(self.tied(torch.tanh(self.first(x)))))
        x = self.lstm(x.unsqueeze(1))[0]
        x = self.attention(x, x, x)[0]
        x = self.encoder(x)[:, 0]
        x = x + self.bag(torch.zeros(1, 1, dtype=torch.long))
        return F.linear(x, self.last.weight, self.last.bias)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class TwiceDouble(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return torch.from_numpy(weight.detach().numpy() * 2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


# ---------------------------------------------------------------- uses

X = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


def params_of(model):
    return dict(model.module.named_parameters())


def saved(value):
    with io.BytesIO() as file:
        torch.save(value, file)
        file.seek(0)
        return torch.load(file)


def by_address(tensor):
    numbers = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    return torch.tensor(list(numbers))


def swa(model, aliases):
    average = AveragedModel(model.module)
    average.update_parameters(model.module)
    return list(average.parameters())


def ema(model, aliases):
    averages = [torch.zeros_like(alias) for alias in aliases]
    torch._foreach_lerp_(averages, aliases, 0.5)
    return averages


def ema_loop(model, aliases):
    averages = [torch.zeros(alias.shape) for alias in aliases]
    for average, param in zip(averages, model.parameters(), strict=True):
        average.mul_(0.5).add_(param.detach(), alpha=0.5)
    return averages


def with_graph(model, aliases):
    x = X.clone().requires_grad_()
    return torch.autograd.grad(checkpoint(model.module, x, use_reentrant=False).sum(), [x])


def reentrant(model, aliases):
    return [checkpoint(model.module, X.clone().requires_grad_(), use_reentrant=True).detach()]


def functional(model, x, params):
    return functional_call(model.module, params, (x,))


def all_reduced(model, aliases):
    for alias in aliases:
        dist.all_reduce(alias, dist.ReduceOp.MAX)  # equal on all ranks
    return aliases


def broadcast(model, aliases):
    with torch.no_grad():
        for param in model.parameters():
            dist.broadcast(param, 0)
    return aliases


def gathered(model, aliases):
    into = [torch.empty_like(aliases[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(into, aliases[0])
    return into


FORWARDS = {
    "forward": lambda m, a: [m(X)],
    "bare module": lambda m, a: [m.module(X)],
    "inference mode": torch.inference_mode()(lambda m, a: [m(X).clone()]),
    "no grad": torch.no_grad()(lambda m, a: [m(X)]),
    "evaluation": torch.no_grad()(lambda m, a: [m.eval()(X), m.train()(X)]),
    "autocast": torch.autocast("cpu", torch.bfloat16)(lambda m, a: [m(X).float()]),
    "checkpoint": with_graph,
    "reentrant checkpoint": reentrant,
    "functional_call": lambda m, a: [functional(m, X, params_of(m))],
}

USES = {
    **FORWARDS,
    "part": lambda m, a: [m.module.last(X)],
    "F.linear": lambda m, a: [F.linear(X, m.module.last.weight)],
    "matmul": lambda m, a: [X @ m.module.last.weight],
    "aten": lambda m, a: [torch.ops.aten.mm(X, m.module.last.weight)],
    "Function": lambda m, a: [TwiceDouble.apply(m.module.first.weight)],
    "foreach": ema,
    "loop": ema_loop,
    "AveragedModel": swa,
    "state_dict": lambda m, a: list(saved(m.state_dict()).values()),
    "save": lambda m, a: saved(a),
    "save parameters": lambda m, a: saved(list(m.parameters())),
    "pickle": lambda m, a: pickle.loads(pickle.dumps(a)),
    "deepcopy": lambda m, a: list(copy.deepcopy(m.module).parameters()),
    "copy of the wrapper": lambda m, a: list(copy.deepcopy(m).parameters()),
    "numpy": lambda m, a: [torch.tensor(np.asarray(a[0]))],
    "dlpack": lambda m, a: [torch.from_dlpack(a[0]).clone()],
    "tolist": lambda m, a: [torch.tensor(each.tolist()) for each in a],
    "item": lambda m, a: [torch.tensor(float(a[1][-1]))],
    "data_ptr": lambda m, a: [by_address(a[0])],
    "print": lambda m, a: [torch.tensor("nan" not in repr(list(m.parameters())))],
    "whole_parameters": lambda m, a: m.whole_parameters(),
    "as a vector": lambda m, a: [nn.utils.parameters_to_vector(m.parameters())],
    "vmap": lambda m, a: [vmap(m.module)(X)],
    "vmap over parameters": lambda m, a: [vmap(lambda row: X @ row)(m.module.last.weight)],
    "grad": lambda m, a: list(grad(lambda p: functional(m, X, p).sum())(params_of(m)).values()),
    "grad of inputs": lambda m, a: [grad(lambda x: m.module(x).sum())(X)],
    "gradient per sample": lambda m, a: list(
        vmap(grad(lambda p, x: functional(m, x, p).sum()), in_dims=(None, 0))(params_of(m), X).values()
    ),
    "jvp": lambda m, a: list(jvp(lambda p: functional(m, X, p), (params_of(m),), (params_of(m),))),
    "jacrev": lambda m, a: list(jacrev(lambda p: functional(m, X, p))(params_of(m)).values()),
    "functionalize": lambda m, a: [functionalize(lambda w: X @ w)(m.module.last.weight)],
    "autograd.grad": lambda m, a: list(torch.autograd.grad(m.module(X).sum(), list(m.parameters()))),
    "all_reduce": all_reduced,
    "broadcast": broadcast,
    "all_gather": gathered,
}


def used(rank, size, names, net):
    """Return the uses that saw something else in flight than after all gathers."""
    wrong = []
    with held_back() as launched:
        for name in names:
            torch.manual_seed(5)
            model, optim = wrapped(net())
            one_step(model, optim, rank, seed=1)
            aliases = [param.data for param in model.parameters()]
            model.wait_for_parameters()
            launched.clear()
            one_step(model, optim, rank, seed=2)
            assert pending(launched) == len(launched) > 1, name
            seen = [each.detach().clone() for each in USES[name](model, aliases)]
            waited = len(launched) - pending(launched)
            model.wait_for_parameters()
            again = [each.detach().clone() for each in USES[name](model, aliases)]
            same = all(
                torch.allclose(a, b, atol=1e-5) for a, b in zip(seen, again, strict=True)
            )  # not where NaN
            if not (same and waited):
                wrong.append(name)
            assert _len_torch_function_stack() == 0, name
    return wrong


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_every_use_of_a_parameter_waits_for_it(pool, backend):
    names = list(USES) if backend == "gloo" else list(FORWARDS)
    assert pool(2, backend).run(used, names, Small) == [[], []]


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_layers_that_use_the_parameters_of_their_children_wait(pool, backend):
    names = ["forward", "evaluation", "inference mode", "checkpoint", "functional_call", "state_dict"]
    assert pool(3, backend).run(used, names, Layers) == [[], [], []]


def layer_by_layer(rank, size):
    """Only what is used is waited for, and what concerns no values waits for nothing."""
    with held_back() as launched:
        model, optim = wrapped(Small())
        one_step(model, optim, rank)
        launched.clear()
        one_step(model, optim, rank)
        everything = pending(launched)
        for param in model.parameters():
            assert param.grad is None
            param.grad = None
        optim.zero_grad()
        model.zero_grad()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert [param.shape for param in model.parameters()]
        assert pending(launched) == everything == 4
        model.module.last(X)
        assert pending(launched) == 2
        model(X)
        assert pending(launched) == 0
        assert _len_torch_function_stack() == 0


def test_only_what_is_used_is_waited_for(pool):
    pool(2).run(layer_by_layer)


WRITES = {
    "copy_": lambda m, v: [p.data.copy_(t) for p, t in zip(m.parameters(), v, strict=True)],
    "replace": lambda m, v: [setattr(p, "data", t.clone()) for p, t in zip(m.parameters(), v, strict=True)],
    "load_state_dict": lambda m, v: m.load_state_dict(
        {name: t for (name, _), t in zip(m.state_dict().items(), v, strict=True)}
    ),
    "out": torch.no_grad()(
        lambda m, v: [torch.add(t, 0, out=p) for p, t in zip(m.parameters(), v, strict=True)]
    ),
    "init": lambda m, v: [nn.init.constant_(p, 0.5) for p in m.parameters()],
    "vector": lambda m, v: nn.utils.vector_to_parameters(
        torch.cat([t.reshape(-1) for t in v]), m.parameters()
    ),
}


def written(rank, size):
    wrong = []
    for name, write in WRITES.items():
        with held_back() as launched:
            model, optim = wrapped(Small())
            one_step(model, optim, rank)
            values = [torch.full_like(param, 0.5) for param in model.parameters()]
            launched.clear()
            one_step(model, optim, rank)
            write(model, values)
            model.wait_for_parameters()
            if not all((param == 0.5).all() for param in model.parameters()):
                wrong.append(name)
            one_step(model, optim, rank)  # goes on from what was written
            if not all(param.isfinite().all() for param in model.parameters()):
                wrong.append(name)
    return wrong


def test_what_is_written_after_a_step_stays(pool):
    assert pool(2).run(written) == [[], []]


# ---------------------------------------------------------------- training


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
    with held_back() as launched, mock.patch.object(zero, "update_parts", _each_by_itself):
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
    """Rank 1 ends in its update, before it has sent its part."""
    init = f"file://{folder}/world"
    dist.init_process_group(backend, init, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    model, optim = wrapped(Small())
    one_step(model, optim, rank)
    optim.register_step_pre_hook(lambda *_: os._exit(3) if rank == 1 else None)
    started = time.monotonic()
    errors = []
    for use in (lambda: one_step(model, optim, rank), lambda: model(X), lambda: saved(model.state_dict())):
        try:
            use()
        except PacelineError as error:
            errors.append((type(error).__name__, str(error).partition("\n")[0]))
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
    assert [name for name, _ in errors] == [kind] * 2  # the step itself has nothing to wait for
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
