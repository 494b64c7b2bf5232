"""Hugging Face folders: exported in files of limited size, loaded by transformers, read back through their index."""

from __future__ import annotations

import json
import os
import tracemalloc
import weakref

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

import paceline
from hugging_face import build
from paceline.checkpoint.interop import weights_export
from paceline.checkpoint.interop.weights_export import read_weights
from paceline.errors import DamagedCheckpoint, UsageError

INDEX = "model.safetensors.index.json"


def saved(folder, net, container="paceline"):
    """Save a model as a checkpoint of Paceline's, or of plain DCP; return the checkpoint."""
    if container == "plain":
        dcp.save(
            {"model": net.state_dict(), "train_state": {"x": torch.ones(3)}}, checkpoint_id=folder / "step-1"
        )
        return folder / "step-1"
    with paceline.Checkpoint(folder, net, format=container) as checkpoint:
        checkpoint.step = 1
        checkpoint.save(wait=True)
    return folder / "step-00000001"


def equal(one, other):
    return one.keys() == other.keys() and all(
        one[name].dtype is other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def from_pretrained(folder, capfd):
    """Return what transformers loads, after checking that it had nothing to say."""
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_warning()
    logging.disable_progress_bar()
    capfd.readouterr()
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    written = capfd.readouterr()
    assert (written.out, written.err) == ("", "")
    assert not any(info.values()), info
    return model


# ------------------------------------------------------------------ export


@pytest.mark.parametrize("container", ["paceline", "dcp", "plain"])
@pytest.mark.parametrize("max_shard", ["5GB", "2kB"])
def test_transformers_loads_an_exported_folder_to_the_bit(tmp_path, capfd, container, max_shard):
    net = build()
    net.config.update({"bos_token_id": 0, "eos_token_id": 0})
    checkpoint = saved(tmp_path / "run", net, container)
    out = paceline.export_weights(checkpoint, tmp_path / "out", max_shard=max_shard, config=net.config)
    names = sorted(path.name for path in out.iterdir())
    if max_shard == "5GB":
        assert names == ["config.json", "model.safetensors"]
    else:
        files = [name for name in names if name.endswith(".safetensors")]
        assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
        index = json.loads((out / INDEX).read_text())
        stored = {name: file for file in files for name in load_file(out / file)}
        assert index["weight_map"] == stored
        assert index["metadata"]["total_size"] == sum(
            tensor.nbytes for file in files for tensor in load_file(out / file).values()
        )
        for file in files:
            tensors = load_file(out / file)
            assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 2000
        assert ("lm_head.weight" in stored) == (container == "plain")  # tied: once, where that is known
    loaded = from_pretrained(out, capfd)
    assert equal(dict(loaded.state_dict()), dict(net.state_dict()))


def test_weights_are_cast(tmp_path, capfd):
    net = build()
    net.config.update({"bos_token_id": 0, "eos_token_id": 0})
    net.register_buffer("count", torch.tensor([7]))
    checkpoint = saved(tmp_path / "run", net)
    paceline.export_weights(checkpoint, tmp_path / "a.safetensors", dtype=torch.bfloat16)
    found = load_file(tmp_path / "a.safetensors")
    assert found.pop("count").tolist() == [7]
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    with pytest.raises(UsageError, match=r"dtype=torch\.int8"):
        paceline.export_weights(checkpoint, tmp_path / "b", dtype=torch.int8)
    del net.count
    checkpoint = saved(tmp_path / "more", net)
    out = paceline.export_weights(checkpoint, tmp_path / "out", dtype=torch.bfloat16, config=net.config)
    loaded = from_pretrained(out, capfd)
    assert equal(dict(loaded.state_dict()), dict(net.bfloat16().state_dict()))


def test_configuration_and_tokenizer_files_are_copied(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "merges.txt",
        "model.safetensors",
        "x.py",
    ):
        (source / name).write_text("{}")
    checkpoint = saved(tmp_path / "run", nn.Linear(2, 2))
    out = paceline.export_weights(checkpoint, tmp_path / "out", config=source)
    names = {"config.json", "tokenizer.json", "tokenizer_config.json", "merges.txt", "model.safetensors"}
    assert {path.name for path in out.iterdir()} == names
    assert load_file(out / "model.safetensors")["weight"].shape == (2, 2)
    for wrong, words in (
        (tmp_path, "has no config.json"),
        (build(), "GPT2LMHeadModel, which does not describe"),
    ):
        with pytest.raises(UsageError, match=words):
            paceline.export_weights(checkpoint, tmp_path / "other", config=wrong)
    with pytest.raises(UsageError, match="config= with a single file"):
        paceline.export_weights(checkpoint, tmp_path / "a.safetensors", config=source)


def test_a_folder_with_weights_is_not_written_and_one_without_is_kept(tmp_path):
    net = nn.Linear(2, 2)
    checkpoint = saved(tmp_path / "run", net)
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    paceline.export_weights(checkpoint, out)
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors"}
    with pytest.raises(UsageError, match=r"has weights: model.safetensors"):
        paceline.export_weights(checkpoint, out, max_shard=8)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        paceline.export_weights(checkpoint, tmp_path / "file")
    for size in (0, "-1", "many"):
        with pytest.raises(UsageError):
            paceline.export_weights(checkpoint, tmp_path / "new", max_shard=size)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("existing", [False, True])
def test_an_interrupted_export_never_looks_complete(tmp_path, monkeypatch, existing):
    net = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    checkpoint = saved(tmp_path / "run", net)
    out = tmp_path / "out"
    if existing:
        out.mkdir()
    write, replace, left = weights_export.write_safetensors, os.replace, [2]

    def fail_third(*arguments):
        if not left[0]:
            raise OSError(28, "No space left on device")
        left[0] -= 1
        write(*arguments)

    monkeypatch.setattr(weights_export, "write_safetensors", fail_third)
    with pytest.raises(UsageError, match="No space left on device"):
        paceline.export_weights(checkpoint, out, max_shard=256)
    assert not out.exists() or list(out.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} <= {"run", "out"}
    monkeypatch.undo()
    if existing:  # killed while files are moved: the index is the last
        moved = []

        def move(source, target):
            moved.append(os.path.basename(target))
            replace(source, target)

        monkeypatch.setattr(os, "replace", move)
        paceline.export_weights(checkpoint, out, max_shard=256)
        assert moved[-1] == INDEX


@pytest.mark.parametrize("container", ["paceline", "dcp", "plain"])
def test_export_holds_one_weight_in_memory(tmp_path, monkeypatch, container):
    net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(16)))  # 1 MiB each
    checkpoint = saved(tmp_path / "run", net, container)
    read, held, most = weights_export.WeightsSource.tensor, [], []

    def tensor(self, name):
        found = read(self, name)
        held.append(name)
        most.append(len(held))
        weakref.finalize(found, held.pop)
        return found

    monkeypatch.setattr(weights_export.WeightsSource, "tensor", tensor)
    tracemalloc.start()
    try:
        paceline.export_weights(checkpoint, tmp_path / "out", max_shard="4MiB")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(most) == 16
    assert max(most) <= 2  # the next is read before the one before is released
    assert peak < 8 << 20


def test_a_damaged_checkpoint_leaves_no_export(tmp_path):
    checkpoint = saved(tmp_path / "run", nn.Linear(4, 4))
    file = checkpoint / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for target in ("out", "out.safetensors"):
        with pytest.raises(DamagedCheckpoint, match="wrong checksum"):
            paceline.export_weights(checkpoint, tmp_path / target)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# ------------------------------------------------------------------ import


@pytest.fixture
def folder(tmp_path):
    """A folder of transformers' in several files, and its model."""
    net = build()
    net.save_pretrained(tmp_path / "hf", max_shard_size="2KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    return tmp_path / "hf", net


def zeroed(net):
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    return net


def test_a_folder_of_transformers_is_imported(folder):
    path, net = folder
    for other in (zeroed(build()), paceline.DataParallel(zeroed(build()))):
        paceline.import_weights(other, path)
        assert equal(dict(net.state_dict()), dict(getattr(other, "module", other).state_dict()))
    assert read_weights(path)["transformer.wte.weight"].shape == (19, 8)


def test_files_of_the_base_model_and_of_the_whole_fit_each_other(folder, tmp_path, caplog):
    path, net = folder
    net.transformer.save_pretrained(tmp_path / "base")  # names without "transformer."
    other = zeroed(build())
    paceline.import_weights(other, tmp_path / "base")
    assert equal(dict(net.state_dict()), dict(other.state_dict()))
    base = zeroed(build()).transformer
    state = read_weights(path) | {"lm_head.bias": torch.ones(19)}
    save_file(state, tmp_path / "more.safetensors")
    paceline.import_weights(base, tmp_path / "more.safetensors")
    assert equal(dict(net.transformer.state_dict()), dict(base.state_dict()))
    assert [record.message for record in caplog.records] == ["not in this model, and ignored: lm_head.bias"]


def test_buffers_of_old_files_are_ignored_as_transformers_does(folder, tmp_path):
    path, net = folder
    state = read_weights(path) | {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4)}
    save_file(state, tmp_path / "old.safetensors")
    other = zeroed(build())
    paceline.import_weights(other, tmp_path / "old.safetensors")
    assert equal(dict(net.state_dict()), dict(other.state_dict()))
    plain = nn.Linear(1, 1)
    with pytest.raises(UsageError, match=r"'attn.bias' is float32 \[1\], here missing"):
        paceline.import_weights(plain, dict(plain.state_dict()) | {"attn.bias": torch.ones(1)})


def change_index(path, change):
    index = json.loads((path / INDEX).read_text())
    change(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda names: names.update(x="model-00009-of-00009.safetensors"),
            "lists 'model-00009-of-00009.safetensors', ",
        ),
        (lambda names: names.update(x="../../outside.safetensors"), "which is not in its folder"),
        (lambda names: names.update(x="/etc/passwd"), "which is not in its folder"),
        (lambda names: names.update(x=""), "which is not in its folder"),
        (
            lambda names: names.update(x=next(iter(names.values()))),
            "has no tensor 'x', which the index lists",
        ),
        (lambda names: names.pop("transformer.h.0.ln_1.weight"), "'transformer.h.0.ln_1.weight' is missing"),
        (lambda names: names.update(x=3), "is not an index of safetensors files"),
    ],
)
def test_an_index_that_is_wrong_is_refused(folder, change, words):
    path, _ = folder
    change_index(path, change)
    other = build()
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(UsageError) as caught:
        paceline.import_weights(other, path)
    assert words in str(caught.value)
    assert equal(before, dict(other.state_dict()))


def test_a_missing_file_and_two_indexes_are_refused(folder):
    path, _ = folder
    first = sorted(path.glob("model-*.safetensors"))[0]
    moved = first.rename(path / "elsewhere")
    with pytest.raises(UsageError, match=rf"lists '{first.name}', which is missing"):
        paceline.import_weights(build(), path)
    moved.rename(first)
    (path / "other.safetensors.index.json").write_text((path / INDEX).read_text())
    with pytest.raises(UsageError, match=r"has several indexes: model\.\S+, other\.\S+"):
        read_weights(path)
    for name in (INDEX, "other.safetensors.index.json"):
        (path / name).unlink()
    save_file({"transformer.wte.weight": torch.ones(1)}, path / "zzz.safetensors")
    with pytest.raises(UsageError, match=r"have a tensor 'transformer.wte.weight'"):
        read_weights(path)


def test_a_model_without_memory_is_refused(folder):
    path, _ = folder
    with torch.device("meta"):
        empty = build()
    with pytest.raises(UsageError, match="is on the device meta"):
        paceline.import_weights(empty, path)
