"""Checkpoints on disk: files that other programs read, and damage that is always detected."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from paceline.checkpoint.format.checkpoint_folder import CheckpointFolder
from paceline.checkpoint.format.manifest import CHECKSUM, MANIFEST, Manifest, StoredWeights
from paceline.checkpoint.format.tensor_files import VerifiedReader, write_safetensors
from paceline.checkpoint.newest_checkpoint import find_problem, find_resume_point
from paceline.errors import CheckpointError, DamagedCheckpoint, UsageError
from paceline.testing import fault_injection

TENSORS = {
    "weight": torch.arange(12.0).view(3, 4), "half": torch.arange(5, dtype=torch.bfloat16), "flag": torch.tensor(True),
    "none": torch.empty(0, 3), "wave": torch.tensor([1 + 2j], dtype=torch.complex128),
    "8 bits": torch.ones(3, dtype=torch.uint8), "few bits": torch.ones(7).to(torch.float8_e4m3fn),
}  # fmt: skip


def alone(text):
    return [text]


def write(folder, step, tensors=TENSORS):
    """Write a checkpoint of one rank."""
    checkpoints = CheckpointFolder(folder)
    staging = checkpoints.staging(step, "x")
    staging.mkdir(parents=True)
    files = {
        name: write_safetensors(staging / name, tensors)
        for name in ("model.safetensors", "state-rank0.safetensors")
    }
    weights = {"model": StoredWeights(["model.safetensors"], {"tied": "weight"})}
    manifest = Manifest(
        step=step,
        facts={"windows": 32},
        files=files,
        weights=weights,
        states=[{"a": {"$tensor": "flag"}}],
        written={"at": "now"},
    )
    return checkpoints.complete_with(staging, manifest)


# ------------------------------------------------------------------ files


@pytest.mark.parametrize("kept", [False, True])
def test_tensors_round_trip_and_safetensors_reads_them(tmp_path, kept):
    described = write_safetensors(tmp_path / "a.safetensors", TENSORS)
    reader = VerifiedReader(tmp_path, {"a.safetensors": described})
    reader.verify(["a.safetensors"], keep=["a.safetensors"] if kept else [])
    loaded = load_file(tmp_path / "a.safetensors")
    assert loaded.keys() == TENSORS.keys()
    for label, tensor in TENSORS.items():
        found = reader.tensor("a.safetensors", label)
        assert found.dtype is tensor.dtype
        assert torch.equal(
            found.view(torch.uint8) if found.dim() else found,
            tensor.view(torch.uint8) if tensor.dim() else tensor,
        )
        if tensor.dtype is not torch.complex128:
            assert loaded[label].dtype is tensor.dtype


def test_writing_to_a_tensor_changes_no_file(tmp_path):
    described = write_safetensors(tmp_path / "a.safetensors", TENSORS)
    reader = VerifiedReader(tmp_path, {"a.safetensors": described})
    reader.tensor("a.safetensors", "weight").zero_()
    reader.verify(["a.safetensors"])


def test_mapped_tensors_are_aligned(tmp_path):
    """Copying complex numbers from an unaligned address would end the process."""
    for length in range(1, 17):
        described = write_safetensors(
            tmp_path / f"{length}.safetensors", {"w" * length: torch.ones(4, dtype=torch.complex128)}
        )
        found = VerifiedReader(tmp_path, {f"{length}.safetensors": described}).tensor(
            f"{length}.safetensors", "w" * length
        )
        assert found.data_ptr() % 16 == 0


def test_a_full_disk_raises(tmp_path):
    fault_injection.disk_full(after_nbytes=100)
    try:
        with pytest.raises(OSError, match="No space left"):
            write_safetensors(tmp_path / "a.safetensors", TENSORS)
    finally:
        fault_injection.disarm()


# ------------------------------------------------------------------ damage


def test_manifest_round_trip(tmp_path):
    path = write(tmp_path, 7)
    found = Manifest.read(path)
    assert (found.step, found.ranks, found.facts) == (7, 1, {"windows": 32})
    assert found.files["model.safetensors"].tensors["weight"].shape == [3, 4]
    assert Manifest.from_json(found.to_json()) == found
    assert find_problem(path) == ""


@pytest.mark.thorough
def test_300_damages_are_detected_and_the_newest_intact_checkpoint_is_used(tmp_path):
    """Files cut short at random, bits flipped at random, files removed: in the newest checkpoint, or in both newest."""
    rng = random.Random(5)
    pristine = tmp_path / "pristine"
    for step in (10, 20, 30):
        write(pristine, step)
    for number in range(300):
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(pristine, folder)
        damaged = [30] if number % 3 else [20, 30]
        for step in damaged:
            chosen = rng.choice(sorted((folder / f"step-{step:08d}").iterdir()))
            damage(chosen, ("cut", "flip", "remove")[number // 3 % 3], rng)
            assert find_problem(chosen.parent), chosen
        found = find_resume_point(CheckpointFolder(folder), 0, 1, alone)
        assert found is not None
        assert found.manifest.step == (10 if len(damaged) == 2 else 20)
        assert [each.path.name[-2:] for each in found.skipped] == [str(step) for step in reversed(damaged)]


def damage(path, how, rng):
    if how == "remove":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    if how == "cut":
        del data[rng.randrange(len(data)) :]
    else:
        at = rng.randrange(8 * len(data))
        data[at // 8] ^= 1 << at % 8
    path.write_bytes(data)


def test_an_unreadable_file_is_named(tmp_path, monkeypatch):
    path = write(tmp_path, 1)

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    assert find_problem(path) == "model.safetensors can't be read: Input/output error"
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    assert find_problem(path) == "model.safetensors ended while it was read"


def test_if_no_checkpoint_is_intact_all_are_named(tmp_path):
    assert find_resume_point(CheckpointFolder(tmp_path), 0, 1, alone) is None
    for step in (1, 2):
        (write(tmp_path, step) / "model.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"none of the 2 .* step-00000002: model.safetensors is missing; step-0"
    ):
        find_resume_point(CheckpointFolder(tmp_path), 0, 1, alone)


def test_a_newer_format_is_not_skipped(tmp_path):
    write(tmp_path, 1)
    path = write(tmp_path, 2)
    text = (path / MANIFEST).read_bytes().replace(b'"format": 1', b'"format": 2')
    (path / MANIFEST).write_bytes(text)
    (path / CHECKSUM).write_bytes(Manifest.checksum_line(text))
    with pytest.raises(UsageError, match=r"step-00000002' is a checkpoint of format 2; .* up to 1"):
        find_resume_point(CheckpointFolder(tmp_path), 0, 1, alone)


def test_damage_that_one_rank_finds_is_skipped_on_all(tmp_path):
    """Files are divided among ranks: the rank that reads the damaged one reports it to the others."""
    for step in (1, 2):
        path = write(tmp_path, step)
    damage(path / "state-rank0.safetensors", "flip", random.Random(0))
    names = '["step-00000002", "step-00000001"]'
    gathered = iter([[names, ""], ["", "state-rank0.safetensors: …"], ["", ""]])
    found = find_resume_point(CheckpointFolder(tmp_path), 0, 2, lambda text: next(gathered))
    assert found is not None
    assert found.path.name == "step-00000001"
    assert [each.why for each in found.skipped] == ["state-rank0.safetensors: …"]


# ------------------------------------------------------------------ invalid manifests


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A manifest, for reading without its checksum, which would refuse nearly all of the following."""
    return (write(tmp_path_factory.mktemp("fuzz"), 1) / MANIFEST).read_bytes()


def read(text):
    """Read a manifest: it is valid or refused, and takes memory in proportion to its size."""
    tracemalloc.start()
    try:
        found = Manifest.from_json(text)
    except (DamagedCheckpoint, UsageError) as error:
        found = error
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 100 * len(text) + 200_000
    return found


@pytest.mark.thorough
def test_10_000_manifests_with_random_changes(text):
    rng = random.Random(7)
    refused = 0
    for _ in range(10_000):
        data = bytearray(text)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            kind = rng.randrange(4)
            if kind == 0:
                data[at] = rng.randrange(256)
            elif kind == 1:
                del data[at : at + rng.randrange(1, 40)]
            elif kind == 2:
                data[at:at] = rng.choice(
                    [b"9" * 30, b"-", b"[" * 50, b'"', b"null", b"{}", b"1e999", b"NaN", b"\x00"]
                )
            else:
                start = rng.randrange(len(data))
                data[at : at + 20] = data[start : start + 20]
        refused += isinstance(read(bytes(data)), Exception)
    assert refused > 5000


JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-5, 2**80), st.floats(allow_nan=False), st.text(max_size=6)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=10,
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_manifests_with_one_changed_value(text, data):
    plain = json.loads(text)
    place, key = plain, data.draw(st.sampled_from(sorted(plain)))
    while data.draw(st.booleans()) and isinstance(place[key], dict) and place[key]:
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place)))
    place[key] = data.draw(JSON)
    read(json.dumps(plain).encode())


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000, b"9" * 100_000,
        b'{"format": "1"}', b'{"format": true}', b'{"format": -1}', b'{"format": 1}', b'{"format": NaN}',
    ],
)  # fmt: skip
def test_files_that_are_no_manifest(text):
    assert isinstance(read(text), Exception)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"model.safetensors": {', b'"../model.safetensors": {'),
        (b'"nbytes": ', b'"nbytes": 1'),
        (b'"start": ', b'"start": 1'),
        (b'"dtype": "float32"', b'"dtype": "object"'),
        (b"     3,\n", b"     3000000000000000000000000,\n"),
        (b"     3,\n", b"     -3,\n"),
        (b"     3,\n", b"     true,\n"),
        (b'"tied": "weight"', b'"tied": "nothing"'),
        (b'"files": [\n    "model.safetensors"', b'"files": [\n    "other.safetensors"'),
        (b'"states": [', b'"states": {}, "more": ['),
    ],
)
def test_contradictory_manifests(text, old, new):
    assert old in text
    with pytest.raises(DamagedCheckpoint, match="is invalid"):
        Manifest.from_json(text.replace(old, new, 1))
