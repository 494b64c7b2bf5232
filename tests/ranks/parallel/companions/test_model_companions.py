"""Things that torch users put on a model (reparametrisations, LoRA, averaged copies) give the result of one process."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import model_zoo
import paceline
from engine_cases import ALL, REPLICATED, data, loss_on, same_on_all_ranks
from model_zoo import max_difference
from paceline.errors import UsageError
from single_process import SGD, same

EVERY = [*ALL, "auto"]
MOVED = [*REPLICATED, "sharded", "auto"]


def build(change):
    net = model_zoo.build("Plain")
    torch.manual_seed(4)
    return change(net) or net


def trained(rank, size, sync, change, steps=4):
    """Train a changed model; return the wrapped one and one of one process."""
    model, reference = paceline.DataParallel(build(change), sync=sync), build(change)
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, **SGD)
    trained_there = [param for param in reference.parameters() if param.requires_grad]
    other = torch.optim.SGD(trained_there, **SGD)
    for step in range(steps):
        model.backward(loss_on(model, rank, step), samples=6)
        optim.step()
        optim.zero_grad()
        (sum(loss_on(reference, r, step) for r in range(size)) / size).backward()
        other.step()
        other.zero_grad()
    return model, reference


# ------------------------------------------------------------------ reparametrisations


class Symmetric(torch.nn.Module):
    """A user's parametrisation."""

    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


def parametrized(net):
    net.layers[2] = torch.nn.Linear(9, 9).double()
    net.layers[4] = torch.nn.Linear(9, 1).double()
    parametrize.register_parametrization(net.layers[2], "weight", Symmetric())


def weight_norm(net):
    for layer in (0, 2, 4):
        parametrizations.weight_norm(net.layers[layer])


def orthogonal(net):
    parametrizations.orthogonal(net.layers[2])


def old_weight_norm(net):
    torch.nn.utils.weight_norm(net.layers[2])


CHANGES = {each.__name__: each for each in (parametrized, weight_norm, orthogonal, old_weight_norm)}


def changed(rank, size, sync, name):
    model, reference = trained(rank, size, sync, CHANGES[name])
    return max_difference(model.whole_parameters(), reference.parameters())


@pytest.mark.sweep
@pytest.mark.parametrize("sync", EVERY)
@pytest.mark.parametrize("name", CHANGES)
def test_reparametrised_weights_train_as_in_one_process(pool, name, sync):
    same(pool(2).run(changed, sync, name))


def spectral(net):
    parametrizations.spectral_norm(net.layers[0])
    parametrizations.spectral_norm(net.layers[2])


def spectral_norm(rank, size, sync):
    """Each forward in training advances the power iteration, so the reference runs one as well."""
    model, reference = paceline.DataParallel(build(spectral), sync=sync), build(spectral)
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, **SGD)
    other = torch.optim.SGD(reference.parameters(), **SGD)
    for step in range(4):
        loss_on(model, rank, step).backward()
        optim.step()
        optim.zero_grad()
        x, y = (torch.cat(part) for part in zip(*(data(r, step) for r in range(size)), strict=True))
        model_zoo.loss_of(reference, "", x, y).backward()
        other.step()
        other.zero_grad()
    equal = same_on_all_ranks(list(model.module.buffers()))
    return max_difference(model.whole_parameters(), reference.parameters()), equal


@pytest.mark.parametrize("sync", MOVED)
def test_spectral_norm_iterates_alike_on_all_ranks(pool, sync):
    results = pool(2).run(spectral_norm, sync)
    same([gap for gap, _ in results])
    assert all(equal for _, equal in results)


def spectral_norm_of_uneven_forwards(rank, size):
    """A rank that runs another forward in training has other buffers; copying them makes ranks equal again."""
    model = paceline.DataParallel(build(spectral))
    if rank == 1:
        loss_on(model, rank)
    before = same_on_all_ranks(list(model.module.buffers()))
    model.broadcast_buffers()
    return before, same_on_all_ranks(list(model.module.buffers()))


def test_buffers_of_spectral_norm_are_copied_on_request(pool):
    assert pool(2).run(spectral_norm_of_uneven_forwards) == [(False, True)] * 2


# ------------------------------------------------------------------ LoRA


def lora(net):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["layers.0", "layers.2"], modules_to_save=["layers.4"])
    adapted = peft.get_peft_model(net, config).double()
    for _, param in sorted(adapted.named_parameters()):
        if param.requires_grad:
            torch.nn.init.normal_(param, std=0.3)
    return adapted


def adapted(rank, size, sync):
    """Return gaps: of the adapters, of the frozen rest, and of the merged model's output."""
    model, reference = trained(rank, size, sync, lora)
    gap = max_difference(model.whole_parameters(), reference.parameters())
    frozen = [p for n, p in model.module.named_parameters() if "base_layer" in n and not p.requires_grad]
    start = [p for n, p in build(lora).named_parameters() if "base_layer" in n and not p.requires_grad]
    assert frozen
    moved = 0.0 if sync == "full-shard" else max_difference(frozen, start)
    if sync == "full-shard":
        return gap, moved, 0.0
    x, _ = data(0)
    merged = model.module.merge_and_unload()
    return gap, moved, max_difference([merged(x)], [reference.merge_and_unload()(x)])


@pytest.mark.sweep
@pytest.mark.parametrize("sync", EVERY)
def test_lora_by_peft_trains_as_in_one_process(pool, sync):
    pytest.importorskip("peft")
    for gap, moved, merged in pool(2).run(adapted, sync):
        assert gap < 1e-12
        assert moved == 0
        assert merged < 1e-12


# ------------------------------------------------------------------ averaged copies


def averaged(rank, size, sync, of_wrapper):
    """Keep an exponential moving average; swap it in to evaluate and back out; train on."""
    model, reference = paceline.DataParallel(build(normed), sync=sync), build(normed)
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, **SGD)
    other = torch.optim.SGD(reference.parameters(), **SGD)
    ours = AveragedModel(model if of_wrapper else model.module, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    theirs = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    x, _ = data(0, 99)
    for step in range(4):
        loss_on(model, 0, step).backward()  # the same batch: BatchNorm's statistics are per rank
        optim.step()
        optim.zero_grad()
        loss_on(reference, 0, step).backward()
        other.step()
        other.zero_grad()
        ours.update_parameters(model if of_wrapper else model.module)
        theirs.update_parameters(reference)
        if step == 1:
            for each, average in ((model.module, ours), (reference, theirs)):
                swapped_in(each, average)
    inner = ours.module.module if of_wrapper else ours.module
    gaps = [max_difference(inner.parameters(), theirs.module.parameters())]
    for each in (ours, theirs):
        update_bn([data(0, step)[0] for step in range(3)], each)
    gaps.append(max_difference([ours(x)], [theirs(x)]))
    gaps.append(max_difference(model.whole_parameters(), reference.parameters()))
    return max(gaps)


def normed(net):
    net.layers.insert(1, torch.nn.BatchNorm1d(9).double())


def swapped_in(net, average):
    """Evaluate with the averaged weights and return to the trained ones, as most EMA code does."""
    held = list(average.module.parameters())
    kept = [param.detach().clone() for param in net.parameters()]
    with torch.no_grad():
        for param, mean in zip(net.parameters(), held, strict=True):
            param.copy_(mean)
        net.eval()
        net(data(0, 99)[0])
        net.train()
        for param, before in zip(net.parameters(), kept, strict=True):
            param.copy_(before)


@pytest.mark.sweep
@pytest.mark.parametrize("of_wrapper", [False, True])
@pytest.mark.parametrize("sync", MOVED)
def test_a_moving_average_of_the_weights(pool, sync, of_wrapper):
    same(pool(2).run(averaged, sync, of_wrapper))


# ------------------------------------------------------------------ copies


def copied(rank, size, sync):
    """Copy a model in mid-training and train both on, each as one process would; return the gaps."""
    model, reference = trained(rank, size, sync, lambda net: None, steps=2)
    pairs = [(model, reference), (copy.deepcopy(model), copy.deepcopy(reference))]
    gaps = [max_difference(ours.whole_parameters(), theirs.parameters()) for ours, theirs in pairs]
    optims = [
        (
            paceline.ShardedOptimizer(ours, torch.optim.SGD, lr=0.1),
            torch.optim.SGD(theirs.parameters(), lr=0.1),
        )
        for ours, theirs in pairs
    ]
    for step in range(3):
        for number, ((ours, theirs), (optim, other)) in enumerate(zip(pairs, optims, strict=True)):
            ours.backward(loss_on(ours, rank, 10 * step + number), samples=6)
            optim.step()
            optim.zero_grad()
            (sum(loss_on(theirs, r, 10 * step + number) for r in range(size)) / size).backward()
            other.step()
            other.zero_grad()
    gaps += [max_difference(ours.whole_parameters(), theirs.parameters()) for ours, theirs in pairs]
    return max(gaps)


@pytest.mark.parametrize("sync", MOVED)
def test_a_deep_copy_trains_on_its_own(pool, sync):
    same(pool(2).run(copied, sync))


def not_copied(rank, size, sync):
    model, _ = trained(rank, size, sync, lambda net: None, steps=2)
    for write in (pickle.dumps, partial(torch.save, f=io.BytesIO()), copy.copy):
        with pytest.raises(UsageError, match=r"model\.module, or its state_dict\(\)"):
            write(model)
    if sync == "full-shard":
        with pytest.raises(UsageError, match=r"copy the bare module before wrapping"):
            copy.deepcopy(model)
        return
    file = io.BytesIO()
    torch.save(model.module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert max_difference(loaded.parameters(), model.parameters()) == 0


@pytest.mark.parametrize("sync", EVERY)
def test_a_wrapped_model_is_not_pickled_and_its_module_is(pool, sync):
    pool(2).run(not_copied, sync)


# ------------------------------------------------------------------ functional calls


def functional(rank, size, sync):
    """Take a step of MAML: the inner parameters are functions of the model's, so their gradients reach it."""
    model, reference = trained(rank, size, sync, lambda net: None, steps=2)
    model.zero_grad()
    meta_loss(model, rank).backward()
    (sum(meta_loss(reference, r) for r in range(size)) / size).backward()
    if sync == "sharded":
        optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        optim.step()
        torch.optim.SGD(reference.parameters(), lr=0.1).step()
        return max_difference(model.parameters(), reference.parameters())
    return max_difference([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])


def meta_loss(model, rank):
    x, y = data(rank, 50)
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(model_zoo.loss_of(model, "", x, y), named.values(), create_graph=True)
    inner = {name: param - 0.1 * grad for (name, param), grad in zip(named.items(), grads, strict=True)}
    return (torch.func.functional_call(model, inner, x) - y).square().mean()


@pytest.mark.parametrize("sync", MOVED)
def test_a_functional_call_of_a_wrapped_model_is_synchronised(pool, sync):
    same(pool(2).run(functional, sync))


def foreign_parameters(rank, size):
    """Call a wrapped model with tensors that are not its own: nobody synchronises those."""
    model, _ = trained(rank, size, "bucketed", lambda net: None, steps=2)
    others = {name: param.detach().clone().requires_grad_() for name, param in model.named_parameters()}
    torch.func.functional_call(model, others, data(rank)[0]).sum().backward()
    unused = all(param.grad is None for param in model.parameters())
    return unused, same_on_all_ranks([other.grad for other in others.values()])


def test_gradients_of_foreign_tensors_stay_those_of_the_rank(pool):
    assert pool(2).run(foreign_parameters) == [(True, False)] * 2
