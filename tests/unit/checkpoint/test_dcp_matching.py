"""Names of other programs' checkpoints are matched with models, optimizers and schedulers, or refused by name."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import paceline
from paceline.errors import UsageError

FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.body, self.head = nn.Linear(3, width), nn.Linear(width, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def trained(net=None, make=torch.optim.AdamW, steps=2, **options):
    torch.manual_seed(1)
    net = net or Net()
    options = {"lr": 0.01} | options
    optimizer = make(net.parameters(), **options)
    for _ in range(steps):
        net(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def prefixed(prefix, state):
    return {f"{prefix}{name}": value for name, value in state.items()}


def same(one, other):
    """Whether two states have the same values, bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def load(path, *objects, **named):
    checkpoint = paceline.Checkpoint(path.parent / "own", *objects, **named)
    try:
        return checkpoint.load(path)
    finally:
        checkpoint.close()


def refused(path, words, *objects, **named):
    before = copy.deepcopy([each.state_dict() for each in (*objects, *named.values())])
    with pytest.raises(UsageError) as caught:
        load(path, *objects, **named)
    after = [each.state_dict() for each in (*objects, *named.values())]
    assert same(before, after), "nothing was changed"
    assert words in str(caught.value), str(caught.value)


# ------------------------------------------------------------------ models

FORMS = {
    "model": lambda state: {"model": state},
    "bare": lambda state: state,
    "app": lambda state: {"app": {"model": state}},
    "ddp": lambda state: {"model": prefixed("module.", state)},
    "bare-ddp": lambda state: prefixed("module.", state),
    "compiled": lambda state: {"model": prefixed("_orig_mod.", state)},
    "compiled-layer": lambda state: {
        "model": {n.replace("body.", "body._orig_mod."): t for n, t in state.items()}
    },
    "state_dict": lambda state: {"state_dict": state},
    "named": lambda state: {"model": {n: t + 1 for n, t in state.items()}, "net": state},
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_found_by_their_names(tmp_path, form):
    net, _ = trained()
    dcp.save(FORMS[form](net.state_dict()), checkpoint_id=tmp_path / "x")
    for other in (Net(), paceline.DataParallel(Net()), torch.compile(Net())):
        load(tmp_path / "x", net=other) if form == "named" else load(tmp_path / "x", other)
        bare = getattr(other, "module", getattr(other, "_orig_mod", other))
        assert same(dict(net.state_dict()), dict(bare.state_dict()))


def test_two_models_by_their_names(tmp_path):
    one, two = Net(4), Net(4)
    dcp.save({"one": one.state_dict(), "two": two.state_dict()}, checkpoint_id=tmp_path / "x")
    a, b = Net(4), Net(4)
    load(tmp_path / "x", one=a, two=b)
    assert same(dict(a.state_dict()), dict(one.state_dict()))
    assert same(dict(b.state_dict()), dict(two.state_dict()))
    refused(tmp_path / "x", "are not in the checkpoint", Net(4))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"model": nn.Linear(3, 4).state_dict()}, "are not in the checkpoint"),
        ({"model": Net(5).state_dict()}, "'body.weight' is float32 [5, 3], here float32 [4, 3]"),
        ({"model": Net().half().state_dict()}, "'body.weight' is float16 [4, 3], here float32 [4, 3]"),
        ({"model": {**Net().state_dict(), "tail.bias": torch.ones(1)}}, "'model.tail.bias' is not in 'model'"),
        ({**Net().state_dict(), "body.more": torch.ones(1)}, "'body.more' is not in 'model'"),
        ({"model": {"body.weight": torch.ones(4, 3)}}, "'body.bias' of 'model' is not in it under 'model.'"),
        ({"ema": Net().state_dict()}, "weights of its names are under 'ema.'"),
        (
            {"app": {"model": Net().state_dict()}, "best": {"model": Net().state_dict()}},
            "under 'app.model.' and 'best.model.'",
        ),
    ],
)  # fmt: skip
def test_another_model_is_refused_by_name(tmp_path, state, words):
    dcp.save(state, checkpoint_id=tmp_path / "x")
    refused(tmp_path / "x", words, Net())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(5, 3), nn.LayerNorm(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights(tmp_path):
    net = Tied()
    state = net.state_dict()
    dcp.save({"model": state}, checkpoint_id=tmp_path / "both")
    first = {name: tensor for name, tensor in state.items() if name != "head.weight"}
    dcp.save({"model": first}, checkpoint_id=tmp_path / "first")
    last = {name: tensor for name, tensor in state.items() if name != "embed.weight"}
    dcp.save({"model": last}, checkpoint_id=tmp_path / "last")
    for path in ("both", "first", "last"):
        other = Tied()
        load(tmp_path / path, other)
        assert same(dict(net.state_dict()), dict(other.state_dict()))
    dcp.save({"model": {**state, "head.weight": torch.ones(5, 3)}}, checkpoint_id=tmp_path / "two")
    refused(
        tmp_path / "two", "'embed.weight' and 'head.weight' are one weight of 'model', and differ", Tied()
    )


class Extra(Net):
    """A module with a state that is no tensor."""

    def __init__(self):
        super().__init__()
        self.extra = {"scales": [1, 2], "name": "a"}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_entries_of_a_model_that_are_no_tensors(tmp_path):
    net = Extra()
    net.extra = {"scales": [3, 4], "name": "b"}
    dcp.save({"model": net.state_dict()}, checkpoint_id=tmp_path / "x")
    other = Extra()
    load(tmp_path / "x", other)
    assert other.extra == net.extra


# ------------------------------------------------------------------ optimizers


def states_of(net, optimizer):
    """The forms in which programs save an optimizer."""
    return {
        "names": get_optimizer_state_dict(net, optimizer),
        "flattened": get_optimizer_state_dict(net, optimizer, options=FLATTENED),
        "numbers": optimizer.state_dict(),
    }


@pytest.mark.parametrize("form", ["names", "flattened", "numbers"])
@pytest.mark.parametrize("key", ["optimizer", "optim", "own"])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.AdamW, {"betas": (0.8, 0.9), "amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.Adafactor, {}),
        (torch.optim.Adam, {"lr": torch.tensor(0.02)}),
    ],
)
def test_optimizers_are_found_in_every_form(tmp_path, make, options, key, form):
    net, optimizer = trained(make=make, **options)
    dcp.save({"model": net.state_dict(), key: states_of(net, optimizer)[form]}, checkpoint_id=tmp_path / "x")
    other, mine = trained(make=make, steps=1, **(options | {"lr": 7.0}))
    load(tmp_path / "x", other, mine)
    assert same(optimizer.state_dict(), mine.state_dict())


def test_sgd_without_state_and_an_unused_parameter(tmp_path):
    for name, make, options in (("a", torch.optim.SGD, {}), ("b", torch.optim.AdamW, {})):
        net, optimizer = trained(make=make, **options)
        if name == "b":  # as if the last bias had never been used
            del optimizer.state[net.head.bias]
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(state, checkpoint_id=tmp_path / name)
        other, mine = trained(make=make, steps=0, lr=5.0)
        load(tmp_path / name, other, mine)
        assert same(optimizer.state_dict(), mine.state_dict())


def test_files_of_torch_2_3(tmp_path, monkeypatch):
    """Before torch 2.4, lists and mappings without tensors were one item."""
    net, optimizer = trained()
    state = {"model": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer)}
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    monkeypatch.setattr(_version, "_derived_version", "2_3")
    dcp.save({**state, "scheduler": scheduler.state_dict()}, checkpoint_id=tmp_path / "x")
    monkeypatch.undo()
    other, mine = trained(steps=0)
    theirs = torch.optim.lr_scheduler.StepLR(mine, 1, gamma=0.9)
    load(tmp_path / "x", other, mine, theirs)
    assert same(optimizer.state_dict(), mine.state_dict())
    assert theirs.state_dict() == scheduler.state_dict()


def two_groups(net, **last):
    decayed = [param for param in net.parameters() if param.dim() == 2]
    rest = [param for param in net.parameters() if param.dim() < 2]
    return torch.optim.AdamW(
        [{"params": decayed, "lr": 0.5}, {"params": rest, "weight_decay": 0.0, **last}], lr=0.1
    )


@pytest.mark.parametrize("form", ["names", "flattened", "numbers"])
def test_groups(tmp_path, form):
    net, _ = trained()
    optimizer = two_groups(net)
    net(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    dcp.save(
        {"model": net.state_dict(), "optimizer": states_of(net, optimizer)[form]},
        checkpoint_id=tmp_path / "x",
    )
    other = Net()
    mine = two_groups(other, lr=9.0)
    load(tmp_path / "x", other, mine)
    assert same(optimizer.state_dict(), mine.state_dict())
    one = torch.optim.AdamW(other.parameters())
    numbered = "'optimizer' has groups of [4] parameters, in the checkpoint of [2, 2]"
    named = "'body.weight' and 'body.bias' are in one group of 'optimizer', and in the checkpoint in two with different"
    refused(tmp_path / "x", numbered if form == "numbers" else named, other, one)


def test_two_optimizers_that_were_saved_as_one(tmp_path):
    """As torchtitan saves several: one flattened state."""
    net, _ = trained()
    both = [torch.optim.AdamW(part.parameters(), lr=lr) for part, lr in ((net.body, 0.1), (net.head, 0.2))]
    net(torch.randn(5, 3)).sum().backward()
    for each in both:
        each.step()
    state = {}
    for each in both:
        state |= get_optimizer_state_dict(net, each, options=FLATTENED)
    dcp.save({**net.state_dict(), "optimizer": state}, checkpoint_id=tmp_path / "x")
    other = Net()
    one, two = (torch.optim.AdamW(part.parameters(), lr=9.0) for part in (other.body, other.head))
    load(tmp_path / "x", other, one=one, two=two)
    assert same([each.state_dict() for each in both], [one.state_dict(), two.state_dict()])
    refused(tmp_path / "x", "parameter 'head.weight' of 'optimizer'", other, one=one)


class Shampoo(torch.optim.Optimizer):
    """Keeps nested state, with lists, of a parameter."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if param.grad is not None:
                    state.setdefault("factors", {"left": [torch.ones(2), torch.ones(3)], "count": 0})
                    state["factors"]["left"][0] += param.grad.sum()
                    state["factors"]["count"] += 1


def test_nested_state_of_an_optimizer(tmp_path):
    net, optimizer = trained(make=Shampoo)
    dcp.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "x")
    other, mine = trained(make=Shampoo, steps=0)
    load(tmp_path / "x", other, mine)
    assert same(optimizer.state_dict(), mine.state_dict())


@pytest.mark.parametrize("form", ["names", "flattened"])
def test_another_optimizer_is_refused(tmp_path, form):
    net, optimizer = trained(make=torch.optim.SGD, momentum=0.9)
    dcp.save(
        {"model": net.state_dict(), "optimizer": states_of(net, optimizer)[form]},
        checkpoint_id=tmp_path / "x",
    )
    other, mine = trained()
    refused(
        tmp_path / "x",
        "group 0 of 'optimizer' has 'amsgrad', in the checkpoint 'dampening' instead",
        other,
        mine,
    )
    frozen = torch.optim.SGD(other.body.parameters(), lr=0.1)
    refused(tmp_path / "x", "parameter 'head.weight' of 'optimizer' in the checkpoint", other, frozen)


def test_an_optimizer_of_more_parameters_is_refused(tmp_path):
    net, _ = trained()
    part = torch.optim.AdamW(net.body.parameters())
    net(torch.randn(5, 3)).sum().backward()
    part.step()
    dcp.save(
        {"model": net.state_dict(), "optimizer": get_optimizer_state_dict(net, part)},
        checkpoint_id=tmp_path / "x",
    )
    other, mine = trained()
    refused(
        tmp_path / "x", "parameter 'head.weight' of 'optimizer' is in no group of 'optimizer'", other, mine
    )


def test_numbers_of_other_shapes_are_refused(tmp_path):
    net, optimizer = trained()
    shuffled = torch.optim.AdamW([net.head.weight, net.head.bias, net.body.weight, net.body.bias])
    shuffled.load_state_dict(optimizer.state_dict())
    dcp.save({"model": net.state_dict(), "optimizer": shuffled.state_dict()}, checkpoint_id=tmp_path / "x")
    other = Net()
    mine = torch.optim.AdamW([other.head.weight, other.head.bias, other.body.weight, other.body.bias])
    refused(tmp_path / "x", "has shape [4, 3], parameter 'head.weight' [2, 4]", other, mine)


def test_weights_alone_and_unclear_optimizers_are_refused(tmp_path):
    net, optimizer = trained()
    dcp.save({"model": net.state_dict()}, checkpoint_id=tmp_path / "x")
    refused(tmp_path / "x", "has no state of an optimizer for 'optimizer'", *trained())
    two = {name: get_optimizer_state_dict(net, optimizer) for name in ("a", "b")}
    dcp.save({"model": net.state_dict(), **two}, checkpoint_id=tmp_path / "y")
    refused(tmp_path / "y", "it is unclear which optimizer of the checkpoint", *trained())
    other, mine = trained(steps=0)
    load(tmp_path / "y", other, b=mine)
    assert same(optimizer.state_dict(), mine.state_dict())


# ------------------------------------------------------------------ what else


class Counter:
    """An object of the program's own, with nested state."""

    def __init__(self):
        self.state = {"seen": 0, "history": []}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_schedulers_and_objects_are_restored_and_the_rest_is_logged(tmp_path, caplog):
    net, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.3)
    scheduler.step()
    counted = {"seen": 5, "history": [{"loss": torch.tensor(1.5)}, {"loss": torch.tensor(2.5)}]}
    state = {
        "model": net.state_dict(), "optimizer": optimizer.state_dict(), "lr_scheduler": scheduler.state_dict(),
        "counter": counted, "dataloader": {"at": b"123"}, "train_state": {"step": torch.tensor(17)},
    }  # fmt: skip
    dcp.save(state, checkpoint_id=tmp_path / "last")
    other, mine = trained(steps=0)
    theirs, counter = torch.optim.lr_scheduler.StepLR(mine, 1), Counter()
    loader = paceline.Loader(list(range(9)), 2)
    caplog.set_level(logging.INFO, "paceline.checkpoint")
    found = load(tmp_path / "last", other, mine, theirs, loader, counter=counter)
    assert (found.step, found.facts, found.ranks) == (17, {}, 1)
    assert theirs.state_dict() == scheduler.state_dict()
    assert same(counter.state, counted)
    lines = [record.message for record in caplog.records]
    assert f"{tmp_path / 'last'} has no state of loader, which begins anew" in lines
    assert f"{tmp_path / 'last'} has more than this run; ignored: dataloader, train_state" in lines


def test_another_scheduler_and_local_sgd_are_refused(tmp_path):
    net, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state = {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }
    dcp.save(state, checkpoint_id=tmp_path / "x")
    other, mine = trained(steps=0)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(mine, 9)
    refused(tmp_path / "x", "'scheduler' has 'T_max', in the checkpoint 'gamma' instead", other, mine, cosine)
    model = paceline.DataParallel(Net())
    inner = torch.optim.AdamW(model.parameters())
    local = paceline.LocalSGD(model, inner, every=4)
    with pytest.raises(UsageError, match="'localsgd' is not in the checkpoint"):
        load(tmp_path / "x", model, inner, local)


@pytest.mark.parametrize(
    ("name", "values", "step"),
    [
        ("step-120", {"step": 7}, 120),
        ("step_00000120", {}, 120),
        ("iter_0000120", {}, 120),
        ("global_step120", {}, 120),
        ("checkpoint-120", {}, 120),
        ("120", {}, 120),
        ("epoch-3", {"global_step": 7}, 7),
        ("last", {"state": {"step": torch.tensor(7)}}, 7),
        ("last", {"step": 7, "iteration": 9}, 2),
        ("last", {}, 2),
    ],
)
def test_the_step_is_that_of_the_name_or_of_a_value(tmp_path, name, values, step):
    net, optimizer = trained()
    state = {"model": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer), **values}
    dcp.save(state, checkpoint_id=tmp_path / name)
    assert load(tmp_path / name, *trained()).step == step


def test_a_checkpoint_without_a_step_counts_as_step_0(tmp_path, caplog):
    net, _ = trained()
    dcp.save({"model": net.state_dict()}, checkpoint_id=tmp_path / "last")
    assert load(tmp_path / "last", Net()).step == 0
    assert any("neither its name nor a value shows its step" in record.message for record in caplog.records)


def test_a_path_without_checkpoints_is_refused(tmp_path):
    with pytest.raises(UsageError, match="holds no checkpoint"):
        load(tmp_path / "nowhere", Net())
