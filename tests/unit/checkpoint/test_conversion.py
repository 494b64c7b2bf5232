"""Conversions between Paceline's format, DCP and Hugging Face: everything that a run needs is kept, bit for bit."""

from __future__ import annotations

import contextlib
import tracemalloc
import weakref

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import paceline
from paceline.checkpoint.interop import conversion
from paceline.checkpoint.interop.convert import convert_checkpoint
from paceline.checkpoint.interop.weights_export import read_weights
from paceline.checkpoint.newest_checkpoint import find_problem
from paceline.checkpoint.storage.local_folder import LocalFiles
from paceline.errors import DamagedCheckpoint, UsageError


class Net(nn.Module):
    """Tied weights, a buffer, and an entry that is no tensor."""

    def __init__(self, width=6):
        super().__init__()
        self.embed, self.norm = nn.Linear(4, width), nn.BatchNorm1d(width)
        self.head, self.again = nn.Linear(width, 2), None
        self.again = self.head
        self.note = {"kept": [1]}

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.embed(x))))

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state


class Run:
    """The objects of a program."""

    def __init__(self, make=torch.optim.AdamW, **options):
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = make(self.model.parameters(), **({"lr": 0.01} | options))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.loader = paceline.Loader(list(range(20)), 2)

    @property
    def objects(self):
        return self.model, self.optimizer, self.scheduler, self.loader

    def train(self, steps=3):
        batches = iter(self.loader)
        for _ in range(steps):
            next(batches)
            self.model(torch.randn(5, 4)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        self.model.note = {"kept": [1, 2]}
        return self

    def save(self, folder, container="paceline"):
        with paceline.Checkpoint(folder, *self.objects, format=container, facts={"a": 1}) as checkpoint:
            checkpoint.step = 7
            checkpoint.save(wait=True)
        return folder / "step-00000007"

    def load(self, path):
        checkpoint = paceline.Checkpoint(path.parent / "own", *self.objects)
        try:
            return checkpoint.load(path)
        finally:
            checkpoint.close()

    def state(self):
        return [each.state_dict() for each in self.objects]


def same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def convert(source, target, to, **options):
    """Convert; return the notes, after checking that progress was shown to its end."""
    seen = []

    @contextlib.contextmanager
    def progress(total):
        seen.append(total)
        yield lambda: seen.append(None)

    notes = convert_checkpoint(source, target, to, progress, **options)
    assert len(seen) == seen[0] + 1
    return notes


# ------------------------------------------------------------------ Paceline's own


@pytest.mark.parametrize("first", ["paceline", "dcp"])
def test_a_runs_checkpoint_keeps_everything_through_every_format(tmp_path, first):
    run = Run().train()
    source = run.save(tmp_path / "run", first)
    drawn = torch.rand(3), np.random.rand(3)  # noqa: NPY002 — the state that checkpoints hold
    for number, to in enumerate(("dcp", "paceline", "paceline", "dcp", "dcp")):
        target = tmp_path / f"{number}"
        assert convert(source, target, to) == []
        assert (target / ".metadata").exists() == (to == "dcp")
        assert (target / "model.safetensors").exists() == (to == "paceline")
        assert find_problem(LocalFiles(target)) == ""
        other = Run(lr=9.0)
        found = other.load(target)
        assert (found.step, found.ranks, found.facts) == (7, 1, {"a": 1})
        assert same(run.state(), other.state())
        assert torch.equal(torch.rand(3), drawn[0])
        assert np.array_equal(np.random.rand(3), drawn[1])  # noqa: NPY002
        source = target
    assert {path.name for path in tmp_path.iterdir()} == {"run", "own", "0", "1", "2", "3", "4"}


def test_torch_loads_what_was_converted_to_dcp(tmp_path):
    run = Run().train()
    convert(run.save(tmp_path / "run"), tmp_path / "x", "dcp")
    other = Run().train(1)
    state = {
        "model": other.model.state_dict(), "optimizer": get_optimizer_state_dict(other.model, other.optimizer),
        "scheduler": other.scheduler.state_dict(),
    }  # fmt: skip
    dcp.load(state, checkpoint_id=tmp_path / "x")
    expected = get_optimizer_state_dict(run.model, run.optimizer)
    assert same(expected, state["optimizer"])
    assert same(run.scheduler.state_dict(), state["scheduler"])
    assert same(dict(run.model.state_dict()), dict(state["model"]))


class Shampoo(torch.optim.Optimizer):
    """Keeps nested state of a parameter."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state.setdefault("factors", {"left": [torch.ones(2), torch.ones(3)], "count": 0})
                state["factors"]["left"][0] += param.grad.sum()
                state["factors"]["count"] += 1


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)])
@pytest.mark.parametrize("make", [Shampoo, torch.optim.Adam, torch.optim.Adafactor])
@pytest.mark.parametrize("source", ["paceline", "plain"])
def test_nested_state_and_tensors_among_options(tmp_path, make, lr, source):
    run = Run(make, lr=lr).train()
    if source == "plain":
        path = tmp_path / "step-7"
        dcp.save(plain(run, "names"), checkpoint_id=path)
    else:
        path = run.save(tmp_path / "run")
    for to in ("paceline", "dcp"):
        convert(path, tmp_path / to, to)
        other = Run(make, lr=torch.tensor(9.0) if isinstance(lr, torch.Tensor) else 9.0)
        other.load(tmp_path / to)
        assert same(run.state()[:3], other.state()[:3])


def test_two_models_with_the_same_names_in_files_of_dcp(tmp_path):
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    with paceline.Checkpoint(tmp_path / "run", one=one, two=two, format="dcp") as checkpoint:
        checkpoint.save(wait=True)
    source = tmp_path / "run" / "step-00000000"
    for path, to in ((tmp_path / "a", "paceline"), (tmp_path / "b", "dcp")):
        convert(source, path, to)
        a, b = nn.Linear(2, 2), nn.Linear(2, 2)
        with paceline.Checkpoint(tmp_path / "own", one=a, two=b) as checkpoint:
            checkpoint.load(path)
        assert torch.equal(a.weight, one.weight)
        assert torch.equal(b.weight, two.weight)


# ------------------------------------------------------------------ plain DCP


def plain(run, form):
    """The state that a program of torch's saves."""
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flattened")
    optimizer = get_optimizer_state_dict(run.model, run.optimizer, options=options)
    rest = {
        "lr_scheduler": run.scheduler.state_dict(),
        "train_state": {"step": torch.tensor(7), "seen": [1, 2]},
    }
    if form == "flattened":
        return {**run.model.state_dict(), "optimizer": optimizer, **rest}
    if form == "app":
        return {"app": {"model": run.model.state_dict(), "optim": optimizer, **rest}}
    if form == "numbers":
        optimizer = run.optimizer.state_dict()
    return {
        "model": {f"module.{n}": t for n, t in run.model.state_dict().items()},
        "optimizer": optimizer,
        **rest,
    }


@pytest.mark.parametrize("to", ["paceline", "dcp"])
@pytest.mark.parametrize("form", ["names", "flattened", "app"])
def test_plain_dcp_becomes_a_checkpoint_that_a_run_resumes(tmp_path, caplog, form, to):
    run = Run().train()
    dcp.save(plain(run, form), checkpoint_id=tmp_path / "theirs")
    target = tmp_path / "folder" / "step-00000007"
    assert convert(tmp_path / "theirs", target, to) == []
    other = Run(lr=9.0)
    with paceline.Checkpoint(tmp_path / "folder", *other.objects) as checkpoint:
        found = checkpoint.load()
    assert (found.step, found.ranks) == (7, 1)
    kept = run.state()[:3]
    if form == "flattened":  # torch puts no entry of a model that is no tensor there
        other.model.note = run.model.note
    assert same(kept, other.state()[:3])
    assert any("has no state of loader, which begins anew" in record.message for record in caplog.records)
    if to == "paceline":
        stored = load_file(target / "model.safetensors")
        assert torch.equal(stored["embed.weight"], run.model.embed.weight)


def test_numbered_parameters_are_refused(tmp_path):
    run = Run().train()
    dcp.save(plain(run, "numbers"), checkpoint_id=tmp_path / "x")
    with pytest.raises(
        UsageError, match=r"(?s)'optimizer' in the checkpoint .* numbers its parameters.*load\(path\)"
    ):
        convert(tmp_path / "x", tmp_path / "y", "paceline")
    assert not (tmp_path / "y").exists()
    convert(tmp_path / "x", tmp_path / "hf", "hf")  # weights have names


class Custom:
    """An object that only a pickle holds."""


def test_what_is_no_plain_value_is_left_out_with_a_note(tmp_path):
    run = Run().train()
    state = plain(run, "names") | {
        "dataloader": {"sampler": Custom()},
        "ema": {"decay": 0.5, "w": torch.ones(3)},
    }
    dcp.save(state, checkpoint_id=tmp_path / "x")
    (note,) = convert(tmp_path / "x", tmp_path / "y", "dcp")
    assert note.startswith("left out 'dataloader': ")
    assert "test_conversion.Custom, which is not read" in note

    class Average:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            self.state = state

    ema, other = Average(), Run()
    with paceline.Checkpoint(tmp_path / "own", *other.objects, ema=ema) as checkpoint:
        checkpoint.load(tmp_path / "y")
    assert same(ema.state, {"decay": 0.5, "w": torch.ones(3)})


def test_weights_of_an_unclear_or_another_key(tmp_path):
    net = nn.Linear(2, 2)
    dcp.save(
        {"generator": net.state_dict(), "critic": nn.Linear(3, 3).state_dict()}, checkpoint_id=tmp_path / "x"
    )
    with pytest.raises(UsageError, match=r"(?s)no weights of a model 'model'.*under: critic, generator"):
        convert(tmp_path / "x", tmp_path / "y", "hf")
    notes = convert(tmp_path / "x", tmp_path / "y", "paceline", model="generator")
    assert "neither its name nor a value shows its step: it counts as step 0" in notes
    assert "the checkpoint has no optimizer state: the result has weights only" in notes
    assert torch.equal(read_weights(tmp_path / "y", model="generator")["weight"], net.weight)
    whole = {"a": {"model": net.state_dict()}, "b": {"model": net.state_dict()}}
    dcp.save(whole, checkpoint_id=tmp_path / "z")
    with pytest.raises(UsageError, match=r"has weights under 'a.model.' and 'b.model.'"):
        read_weights(tmp_path / "z")


def test_bare_names_that_begin_as_a_model_does(tmp_path):
    """Llama's weights are "model.layers…" and "lm_head.weight"."""
    state = {"model.layers.0.weight": torch.ones(2), "lm_head.weight": torch.ones(3)}
    dcp.save({**state, "train_state": {"step": torch.tensor(3)}}, checkpoint_id=tmp_path / "bare")
    dcp.save({"model": state}, checkpoint_id=tmp_path / "inside")
    for path in ("bare", "inside"):
        assert same(state, read_weights(tmp_path / path))


# ------------------------------------------------------------------ Hugging Face


@pytest.mark.parametrize("to", ["paceline", "dcp"])
@pytest.mark.parametrize("form", ["file", "folder"])
def test_safetensors_become_a_checkpoint_of_weights_only(tmp_path, form, to):
    net = Net()
    names = [name for name, _ in net.named_parameters()] + [name for name, _ in net.named_buffers()]
    state = {name: net.state_dict()[name].clone() for name in names}  # tied ones once
    path = tmp_path / "model.safetensors"
    if form == "folder":
        path = tmp_path / "hf"
        path.mkdir()
        save_file(state, path / "model.safetensors")
    else:
        save_file(state, path)
    (note,) = convert(path, tmp_path / "x", to)
    assert "weights only" in note
    assert find_problem(LocalFiles(tmp_path / "x")) == ""
    for load in (
        lambda other: paceline.import_weights(other, tmp_path / "x"),
        lambda other: whole(tmp_path, other),
    ):
        other = Net()
        with torch.no_grad():
            other.embed.weight.zero_()
        load(other)
        other.note = net.note
        assert same(dict(net.state_dict()), dict(other.state_dict()))
    run = Run()
    with pytest.raises(UsageError, match="optimizer 'optimizer' is not in the checkpoint"):
        run.load(tmp_path / "x")


def whole(tmp_path, net):
    with paceline.Checkpoint(tmp_path / "own", net) as checkpoint:
        checkpoint.load(tmp_path / "x")


@pytest.mark.parametrize("source", ["paceline", "dcp", "plain", "hf"])
def test_everything_becomes_a_folder_of_weights(tmp_path, source):
    run = Run().train()
    if source == "plain":
        path = tmp_path / "step-7"
        dcp.save(plain(run, "names"), checkpoint_id=path)
    elif source == "hf":
        path = paceline.export_weights(run.save(tmp_path / "run"), tmp_path / "first")
    else:
        path = run.save(tmp_path / "run", source)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text("{}")
    notes = convert(path, tmp_path / "x", "hf", config=tmp_path / "config")
    assert notes == ([] if source == "hf" else ["the result has weights only"])
    assert {file.name for file in (tmp_path / "x").iterdir()} == {"config.json", "model.safetensors"}
    found = load_file(tmp_path / "x" / "model.safetensors")
    state = {
        name: tensor for name, tensor in run.model.state_dict().items() if isinstance(tensor, torch.Tensor)
    }
    assert all(torch.equal(found[name], state[name]) for name in found)
    assert {"head.weight", "embed.bias", "norm.running_mean"} <= found.keys()


# ------------------------------------------------------------------ refused, damaged, large


def test_existing_targets_and_wrong_arguments_are_refused(tmp_path):
    source = Run().save(tmp_path / "run")
    (tmp_path / "there").mkdir()
    for target, to, options, words in (
        ("there", "dcp", {}, "exists already"),
        ("there", "hf", {}, "exists already"),
        ("new", "onnx", {}, "'onnx' is not a format"),
        ("new", "dcp", {"config": tmp_path}, "a configuration for 'dcp'"),
        ("new", "hf", {"config": tmp_path}, "has no config.json"),
        ("new", "hf", {"model": "other"}, "holds no model 'other'"),
    ):
        with pytest.raises(UsageError, match=words):
            convert(source, tmp_path / target, to, **options)
    with pytest.raises(UsageError, match="does not exist"):
        convert(tmp_path / "nowhere", tmp_path / "new", "dcp")
    with pytest.raises(UsageError, match="can't write"):
        convert(source, source / "manifest.json" / "x", "dcp")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "there"}


@pytest.mark.parametrize("to", ["paceline", "dcp", "hf"])
def test_damage_is_found_and_an_older_checkpoint_is_used(tmp_path, to):
    run = Run()
    with paceline.Checkpoint(tmp_path / "run", *run.objects) as checkpoint:
        for checkpoint.step in (1, 2):
            checkpoint.save(wait=True)
    file = tmp_path / "run" / "step-00000002" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=r"model.safetensors: wrong checksum"):
        convert_checkpoint(tmp_path / "run" / "step-00000002", tmp_path / "x", to, silent)
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    convert_checkpoint(tmp_path / "run", tmp_path / "x", to, silent)
    if to != "hf":
        assert run.load(tmp_path / "x").step == 1


@contextlib.contextmanager
def silent(total):
    yield lambda: None


@pytest.mark.parametrize("source", ["paceline", "dcp", "plain"])
@pytest.mark.parametrize("to", ["paceline", "dcp"])
def test_one_tensor_is_in_memory_at_a_time(tmp_path, monkeypatch, source, to):
    net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))  # 1 MiB each
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    path = tmp_path / "step-1"
    if source == "plain":
        state = {"model": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer)}
        dcp.save(state, checkpoint_id=path)
    else:
        with paceline.Checkpoint(tmp_path / "run", net, optimizer, format=source) as checkpoint:
            checkpoint.save(wait=True)
        path = tmp_path / "run" / "step-00000000"
    make, held, most = conversion.LazyPart.of.__func__, [], []

    def of(kind, name, dtype, shape, box, read):
        def counted():
            found = read()
            held.append(name)
            most.append(len(held))
            weakref.finalize(found, held.pop)
            return found

        return make(kind, name, dtype, shape, box, counted)

    monkeypatch.setattr(conversion.LazyPart, "of", classmethod(of))
    tracemalloc.start()
    try:
        convert_checkpoint(path, tmp_path / "x", to, silent)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(most) >= 8 * 4  # a weight, two moments and a count
    assert max(most) <= 2
    assert peak < 12 << 20


def test_a_checkpoint_by_its_url(tmp_path, monkeypatch):
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    run = Run().train()
    run.save(tmp_path / "run")
    for url in (f"file://{tmp_path}/run", f"file://{tmp_path}/run/step-00000007"):
        number = len(list(tmp_path.iterdir()))
        convert(url, tmp_path / f"dcp{number}", "dcp")
        other = Run(lr=9.0)
        other.load(tmp_path / f"dcp{number}")
        assert same(run.state(), other.state())
        paceline.export_weights(url, tmp_path / f"hf{number}")
        paceline.import_weights(fresh := Net(), url)
        fresh.note = run.model.note
        assert same(dict(fresh.state_dict()), dict(run.model.state_dict()))
    with pytest.raises(UsageError, match=r"'file://.*nowhere' holds no checkpoint"):
        paceline.import_weights(Net(), f"file://{tmp_path}/nowhere")
