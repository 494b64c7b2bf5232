"""A program's own hooks on parameters and modules see, and may change, this rank's gradient before it is sent."""

from __future__ import annotations

import pytest
import torch

import model_zoo
import paceline
from engine_cases import ALL, loss_on
from model_zoo import max_difference
from paceline.errors import UsageError
from single_process import SGD, same

EVERY = [*ALL, "auto"]
SHOWN = [sync for sync in EVERY if sync != "full-shard"]
LIMIT = 0.01

# Each registers hooks on a bare model.


def clamp_as_it_arrives(net):
    for param in net.parameters():
        param.register_hook(lambda grad: grad.clamp(-LIMIT, LIMIT))


def clamp_in_place(net):
    def clamp(param):
        param.grad.clamp_(-LIMIT, LIMIT)

    for param in net.parameters():
        param.register_post_accumulate_grad_hook(clamp)


def replace_the_gradient(net):
    def replace(param):
        param.grad = param.grad.clamp(-LIMIT, LIMIT)

    for param in net.parameters():
        param.register_post_accumulate_grad_hook(replace)


def clamp_between_modules(net):
    def clamp(_module, _inputs, outputs):
        return tuple(each.clamp(-LIMIT, LIMIT) for each in outputs)

    for module in net.layers:
        module.register_full_backward_pre_hook(lambda _module, outputs: clamp(_module, None, outputs))
    net.layers[2].register_full_backward_hook(
        lambda _module, inputs, outputs: clamp(_module, outputs, inputs)
    )


def all_at_once(net):
    params = list(net.parameters())

    def clamp(grads):
        seen.append(sum(grad is not None for grad in grads))

    seen = net.seen = []
    torch.autograd.graph.register_multi_grad_hook(params, clamp)


HOOKS = {
    each.__name__: each
    for each in (
        clamp_as_it_arrives,
        clamp_in_place,
        replace_the_gradient,
        clamp_between_modules,
        all_at_once,
    )
}
OF_PARAMETERS = [name for name in HOOKS if name != "clamp_between_modules"]


def hooked(rank, size, sync, name, when):
    """Return the gap to one process whose hooks saw the gradients of one rank after another."""
    net, reference = model_zoo.build("Plain"), model_zoo.build("Plain")
    if when == "before":
        HOOKS[name](net)
    model = paceline.DataParallel(net, sync=sync)
    if when == "after":
        HOOKS[name](net)
    HOOKS[name](reference)
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, **SGD)
    other = torch.optim.SGD(reference.parameters(), **SGD)
    for step in range(4):
        loss_on(model, rank, step).backward()
        optim.step()
        optim.zero_grad()
        total = [torch.zeros_like(param) for param in reference.parameters()]
        for r in range(size):
            loss_on(reference, r, step).backward()
            for summed, param in zip(total, reference.parameters(), strict=True):
                summed += param.grad / size
            reference.zero_grad()
        for summed, param in zip(total, reference.parameters(), strict=True):
            param.grad = summed
        other.step()
        other.zero_grad()
    if name == "all_at_once":
        assert net.seen == [7] * 4
    return max_difference(model.whole_parameters(), reference.parameters())


CASES = [
    *[(sync, name) for sync in SHOWN for name in OF_PARAMETERS],
    *[(sync, "clamp_between_modules") for sync in EVERY],
]


@pytest.mark.sweep
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("sync", "name"), CASES)
def test_hooks_change_the_gradient_of_their_rank(pool, sync, name, when):
    same(pool(2).run(hooked, sync, name, when))


def optimizer_in_backward(rank, size, sync):
    """Step each parameter as its gradient arrives, as ``_apply_optimizer_in_backward`` does."""
    net = model_zoo.build("Plain")
    model = paceline.DataParallel(net, sync=sync)
    optims = {param: torch.optim.SGD([param], lr=0.1) for param in net.parameters()}

    def step(param):
        optims[param].step()
        param.grad = None

    for param in net.parameters():
        param.register_post_accumulate_grad_hook(step)
    match = "ShardedOptimizer" if sync == "sharded" else "inside backward"
    with pytest.raises(UsageError, match=match):
        loss_on(model, rank).backward()


@pytest.mark.parametrize("sync", ["naive", "bucketed", "sharded", "auto"])
def test_an_optimizer_that_steps_inside_backward_is_refused(pool, sync):
    pool(2).run(optimizer_in_backward, sync)
