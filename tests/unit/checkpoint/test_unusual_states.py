"""States of every kind that programs have, saved and loaded to the bit by one process, in both formats."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import paceline
from paceline.checkpoint.newest_checkpoint import find_problem
from paceline.checkpoint.storage.local_folder import LocalFolder
from same_states import difference

WAYS = [("paceline", True), ("paceline", False), ("dcp", True), ("dcp", False)]
ways = pytest.mark.parametrize(("format", "asynchronous"), WAYS)


class ListState(torch.optim.Optimizer):
    """Keeps values of every kind per parameter, in lists and dicts, and changes them in every step."""

    def __init__(self, params, lr=1.0, **options):
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    rows = param.shape[0] if param.dim() else 1
                    state |= {
                        "step": 0, "worst": -math.inf, "unknown": math.nan, "nothing": None,
                        "factors": [torch.eye(rows), {"inverse": torch.ones(rows), "kinds": (1, 2.5, True)}],
                        "same": torch.zeros_like(param), "count": torch.tensor(0), "empty": torch.empty(0, 2),
                        "flags": torch.zeros(3, dtype=torch.bool), "history": [],
                    }  # fmt: skip
                state["step"] += 1
                state["count"] += 1
                state["factors"][0] += 1
                state["factors"][1]["inverse"] *= 0.5
                state["same"] += param
                state["history"].append(float(state["step"]))
                state["flags"][0] = True
                param.sub_(0.125)


class Everything(nn.Module):
    """Weights of many dtypes and layouts, some without elements, frozen or under two names; buffers; an extra state."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, 5)
        self.tied = self.first
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(2, 2))
        self.image = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.number = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.wave = nn.Parameter(torch.randn(2, 3, dtype=torch.complex64))
        self.low = nn.Parameter(torch.randn(5).bfloat16())
        self.strided = nn.Parameter(torch.randn(6, 4).t())
        self.register_buffer("bits", torch.randint(0, 256, (7,), dtype=torch.uint8))
        self.register_buffer("flag", torch.tensor(bool(seed)))
        self.register_buffer("hollow", torch.empty(3, 0))
        self.register_buffer("scratch", torch.randn(3), persistent=False)
        self.register_buffer("again", self.bits)
        self.extra = {"seed": seed}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def steps(optimizer, count=1):
    """Update with gradients of random numbers; parameters named unused have none."""
    for _ in range(count):
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.shape != (2, 2) and param.requires_grad:
                    param.grad = torch.randn_like(param)
        optimizer.step(*([lambda: 1.0] if isinstance(optimizer, torch.optim.LBFGS) else []))


def simple(params):
    return [param for param in params if not param.is_complex() and param.numel()]


ODD = {"cap": math.inf, "floors": (-math.inf, math.nan)}

OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.125, amsgrad=True),
    "a tensor as lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.125), capturable=False, foreach=False),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.125, momentum=0.9),
    "no state": lambda params: torch.optim.SGD(params, lr=0.125),
    "Adafactor": lambda params: torch.optim.Adafactor(simple(params), lr=0.125),
    "lists": lambda params: ListState([p for p in params if not p.is_complex()]),
    "NaN in options": lambda params: torch.optim.SGD([{"params": params, **ODD}]),
}  # fmt: skip


def built(name, seed=0):
    model = Everything(seed)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    return model, optimizer


def state(*objects):
    return copy.deepcopy([each.state_dict() for each in objects])


@ways
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_states_are_the_same_to_the_bit(tmp_path, name, format, asynchronous):
    model, optimizer = built(name)
    steps(optimizer, 2)
    with paceline.Checkpoint(
        tmp_path, model, optimizer, format=format, asynchronous=asynchronous
    ) as checkpoint:
        checkpoint.save()
        expected = state(model, optimizer)
        if asynchronous:
            steps(optimizer)  # while it is being written
    other, loaded = built(name, seed=1)
    steps(loaded)
    with paceline.Checkpoint(tmp_path, other, loaded) as checkpoint:
        assert checkpoint.load() is not None
    twin = built(name, seed=2)
    for each, saved in zip(twin, expected, strict=True):
        each.load_state_dict(saved)  # which casts some states to the dtype of their parameter
    assert difference(state(other, loaded), state(*twin)) == ""
    if name != "lists":
        assert difference(state(*twin), expected) == ""
    assert find_problem(LocalFolder(tmp_path).files("step-00000000")) == ""
    steps(loaded)


@ways
def test_parameters_without_a_state_have_none_afterwards(tmp_path, format, asynchronous):
    """Saved before some of them had a gradient; loaded into an optimizer that has states."""
    model, optimizer = built("AdamW")
    model.first.weight.grad = torch.ones(5, 3)
    optimizer.step()
    with paceline.Checkpoint(
        tmp_path, model, optimizer, format=format, asynchronous=asynchronous
    ) as checkpoint:
        checkpoint.save(wait=True)
    other, loaded = built("AdamW", seed=1)
    steps(loaded)
    with paceline.Checkpoint(tmp_path, other, loaded) as checkpoint:
        checkpoint.load()
    assert list(loaded.state_dict()["state"]) == list(optimizer.state_dict()["state"]) != []
    assert difference(state(other, loaded), state(model, optimizer)) == ""


@ways
def test_before_the_first_step_there_is_no_state(tmp_path, format, asynchronous):
    for kind in ("AdamW", "lists"):
        folder = tmp_path / kind
        model, optimizer = built(kind)
        with paceline.Checkpoint(
            folder, model, optimizer, format=format, asynchronous=asynchronous
        ) as checkpoint:
            checkpoint.save(wait=True)
        other, loaded = built(kind, seed=1)
        with paceline.Checkpoint(folder, other, loaded) as checkpoint:
            checkpoint.load()
        assert difference(state(other, loaded), state(model, optimizer)) == ""


def several(seed):
    """Two models with the same names of weights, one weight of both, and two optimizers, one of weights of both."""
    one, two = Everything(seed), Everything(seed + 10)
    two.first.bias = one.first.bias
    mixed = torch.optim.AdamW([*one.first.parameters(), two.unused, two.number], lr=0.125)
    rest = torch.optim.SGD(two.norm.parameters(), lr=0.5, momentum=0.5)
    return {"one": one, "two": two, "mixed": mixed, "rest": rest}


@ways
def test_several_models_and_optimizers(tmp_path, format, asynchronous):
    objects = several(0)
    for name in ("mixed", "rest"):
        steps(objects[name])
    with paceline.Checkpoint(tmp_path, format=format, asynchronous=asynchronous, **objects) as checkpoint:
        checkpoint.save()
        expected = state(*objects.values())
        for name in ("mixed", "rest"):
            steps(objects[name])
    others = several(5)
    with paceline.Checkpoint(tmp_path, **others) as checkpoint:
        checkpoint.load()
    assert difference(state(*others.values()), expected) == ""
    assert others["two"].first.bias is others["one"].first.bias


class Counter:
    """An object with a state of every kind, which it changes in its place."""

    def __init__(self):
        self.values = {
            "list": [1],
            "tensor": torch.zeros(2),
            7: {"nan": math.nan},
            "set": {1, 2},
            "bytes": b"\0\xff",
        }

    def count(self):
        self.values["list"].append(len(self.values["list"]) + 1)
        self.values["tensor"] += 1

    def state_dict(self):
        return self.values

    def load_state_dict(self, state):
        self.values = state


@ways
def test_states_that_training_changes_in_their_place_are_those_of_the_save(
    tmp_path, monkeypatch, format, asynchronous
):
    """The state_dict of an object may be what it works with: it is copied before `save` returns."""
    import threading

    from paceline.checkpoint.background_saver import BackgroundSave

    counter, changed = Counter(), threading.Event()
    write = BackgroundSave._write
    monkeypatch.setattr(BackgroundSave, "_write", lambda *args: changed.wait(10) and write(*args))
    checkpoint = paceline.Checkpoint(tmp_path, counter=counter, format=format, asynchronous=asynchronous)
    if not asynchronous:
        changed.set()
    checkpoint.save()
    counter.count()
    changed.set()
    checkpoint.close()
    loaded = Counter()
    with paceline.Checkpoint(tmp_path, counter=loaded) as checkpoint:
        checkpoint.load()
    assert difference(loaded.values, Counter().values) == ""
    if format == "dcp":
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        dcp_to_torch_save(tmp_path / "step-00000000", tmp_path / "all.pt")
        found = torch.load(tmp_path / "all.pt", weights_only=False)["counter"]
        assert difference({key: found[key] for key in ("list", "tensor", "set", "bytes")}, {
            key: Counter().values[key] for key in ("list", "tensor", "set", "bytes")
        }) == ""  # fmt: skip


@ways
def test_a_model_of_many_files(tmp_path, monkeypatch, format, asynchronous):
    """Of several ranks each writes a file of a large model; one rank writes one."""
    from paceline.checkpoint.parts import model_weights

    monkeypatch.setattr(model_weights, "_MIN_PART_NBYTES", 16)
    model, other = Everything(0), Everything(1)
    with paceline.Checkpoint(tmp_path, model, format=format, asynchronous=asynchronous) as checkpoint:
        checkpoint.save(wait=True)
    with paceline.Checkpoint(tmp_path, other) as checkpoint:
        checkpoint.load()
    assert difference(state(other), state(model)) == ""


@pytest.mark.parametrize("name", ["rank", "a/b", "..", "a.b", "nul\0"])
def test_names_that_can_not_be_used_are_refused(tmp_path, name):
    with pytest.raises(paceline.errors.UsageError, match="an object of the checkpoint is called"):
        paceline.Checkpoint(tmp_path / "run", **{name: nn.Linear(1, 1)})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "name", ["ranks", "state", "manifest", "state-rank0", "model-shard-00001-of-00001", "µ"]
)
def test_names_that_look_like_those_of_files_can_be_used(tmp_path, name):
    net, other = nn.Linear(1, 1), nn.Linear(1, 1)
    with paceline.Checkpoint(tmp_path, **{name: net}) as checkpoint:
        checkpoint.save(wait=True)
    with paceline.Checkpoint(tmp_path, **{name: other}) as checkpoint:
        checkpoint.load()
    assert difference(state(other), state(net)) == ""
