"""Parameters that a sharded step has left in flight: nobody sees them unfinished.

The gathers are held back: until it is waited for, what other ranks updated is NaN.
"""

from __future__ import annotations

import copy
import ctypes
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, functionalize, grad, jacrev, jvp, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel
from torch.overrides import _len_torch_function_stack
from torch.utils.checkpoint import checkpoint

from held_back_gathers import WIDTH, Small, X, held_back, one_step, pending, saved, wrapped

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


class TwiceDouble(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return torch.from_numpy(weight.detach().numpy() * 2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


# ---------------------------------------------------------------- uses


def params_of(model):
    return dict(model.module.named_parameters())


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
