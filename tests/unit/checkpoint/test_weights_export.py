"""Exported and imported weights: files that torch and safetensors alone load, and damaged files."""

from __future__ import annotations

import random
import tracemalloc

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import paceline
from paceline.checkpoint.interop.weights_export import read_weights
from paceline.errors import DamagedCheckpoint, UsageError


class Tied(nn.Module):
    """Two names for one weight."""

    def __init__(self, width=3):
        super().__init__()
        self.first, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.again = self.first


def saved(folder, steps=(1,), **models):
    models = models or {"model": Tied()}
    checkpoint = paceline.Checkpoint(folder, keep=9, **models)
    for step in steps:
        checkpoint.step = step
        checkpoint.save(wait=True)
    checkpoint.close()
    return models


def same(one, other):
    theirs = other.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())


def test_an_exported_file_loads_with_torch_alone(tmp_path):
    net = saved(tmp_path / "run", steps=(1, 2))["model"]
    paceline.export_weights(tmp_path / "run", tmp_path / "out.safetensors")
    other = Tied()
    other.load_state_dict(load_file(tmp_path / "out.safetensors"))
    assert same(net, other)


@pytest.mark.parametrize("form", ["checkpoint", "run", "file", "folder", "dict"])
def test_weights_are_imported_from_any_source(tmp_path, form):
    net = saved(tmp_path / "run" / "checkpoint")["model"]
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    save_file(state, tmp_path / "all.safetensors")
    (tmp_path / "parts").mkdir()
    for number, name in enumerate(state):
        save_file({name: state[name]}, tmp_path / "parts" / f"model-{number}.safetensors")
    sources = {
        "checkpoint": tmp_path / "run" / "checkpoint" / "step-00000001", "run": tmp_path / "run",
        "file": tmp_path / "all.safetensors", "folder": tmp_path / "parts", "dict": state,
    }  # fmt: skip
    for other in (Tied(), paceline.DataParallel(Tied())):
        paceline.import_weights(other, sources[form])
        assert same(net, getattr(other, "module", other))


def test_floating_point_weights_are_cast(tmp_path):
    net = nn.Linear(2, 1).half()
    paceline.import_weights(net, {"weight": torch.ones(1, 2), "bias": torch.zeros(1, dtype=torch.float64)})
    assert net.weight.dtype is torch.float16
    assert net.weight.tolist() == [[1, 1]]


def test_one_of_several_models(tmp_path):
    models = saved(tmp_path, one=nn.Linear(1, 1), two=nn.Linear(2, 2))
    assert torch.equal(read_weights(tmp_path, model="two")["weight"], models["two"].weight)
    with pytest.raises(UsageError, match=r"(?s)holds no model 'model'.*one, two"):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"weight": torch.ones(1, 2)}, "'bias' is missing, here float32 [1]"),
        (
            {"weight": torch.ones(2, 2), "bias": torch.ones(1)},
            "'weight' is float32 [2, 2], here float32 [1, 2]",
        ),
        (
            {"weight": torch.ones(1, 2), "bias": torch.ones(1), "x": torch.ones(1)},
            "'x' is float32 [1], here missing",
        ),
        (
            {"weight": torch.ones(1, 2), "bias": torch.ones(1, dtype=torch.int64)},
            "'bias' is int64 [1], here float32",
        ),
        ("nowhere", "'nowhere' does not exist"),
        ({"weight": [[1.0, 2.0]]}, "'weight' of the state_dict is a list, not a tensor"),
    ],
)
def test_weights_of_another_model_are_refused(source, words):
    net = nn.Linear(2, 1)
    before = [param.clone() for param in net.parameters()]
    with pytest.raises(UsageError) as caught:
        paceline.import_weights(net, source)
    assert words in str(caught.value)
    assert all(map(torch.equal, before, net.parameters()))


def test_unreadable_and_unwritable_files_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="neither checkpoints nor safetensors"):
        read_weights(tmp_path / "empty")
    torch.save({"weight": torch.ones(1)}, tmp_path / "pickle.pt")
    with pytest.raises(UsageError, match="can't be read as safetensors"):
        read_weights(tmp_path / "pickle.pt")
    saved(tmp_path / "run")
    for name, words in (
        ("a.pt", "not the name of a safetensors file"),
        ("no/where/a.safetensors", "can't write"),
    ):
        with pytest.raises(UsageError, match=words):
            paceline.export_weights(tmp_path / "run", tmp_path / name)
    with pytest.raises(UsageError, match="not the name of a safetensors file"):  # before anything is read
        paceline.export_weights(tmp_path / "nowhere", tmp_path / "a.pt")


def test_damaged_checkpoints_are_skipped_or_named(tmp_path):
    saved(tmp_path, steps=(1, 2))
    file = tmp_path / "step-00000002" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert read_weights(tmp_path)
    with pytest.raises(DamagedCheckpoint, match=r"model.safetensors: wrong checksum of tensor"):
        read_weights(tmp_path / "step-00000002")
    (tmp_path / "step-00000001" / "model.safetensors").unlink()
    with pytest.raises(
        DamagedCheckpoint, match=r"step-00000002: .*; step-00000001: model.safetensors is missing"
    ):
        read_weights(tmp_path)


@pytest.mark.thorough
def test_10_000_damaged_safetensors_files(tmp_path):
    """Headers changed at random: read or refused, with memory in proportion to the file."""
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(3, 4), "b": torch.ones(2, dtype=torch.int64)}, path)
    whole, chance, refused = path.read_bytes(), random.Random(11), 0
    header = 8 + int.from_bytes(whole[:8], "little")
    tracemalloc.start()
    for _ in range(10_000):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            at, kind = chance.randrange(max(1, min(header, len(data)))), chance.randrange(4)
            if kind == 0:
                data[at : at + 1] = [chance.randrange(256)]
            elif kind == 1:
                del data[at : at + chance.randrange(1, 30)]
            elif kind == 2:
                data[at:at] = chance.choice(
                    [b"9" * 20, b"[" * 40, b"{}", b"-1", b'"', b"18446744073709551615"]
                )
            else:
                del data[chance.randrange(len(data) + 1) :]
        path.write_bytes(data)
        try:
            read_weights(path)
        except UsageError:
            refused += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > 8000
    assert peak < 1_000_000
