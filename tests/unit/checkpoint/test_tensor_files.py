"""Files of tensors: what other programs read of them, and disks that are full."""

from __future__ import annotations

import hashlib
import io

import pytest
import torch
from safetensors.torch import load_file
from xxhash import xxh3_64_hexdigest

from paceline.checkpoint.format.checkpoint_reader import CheckpointReader
from paceline.checkpoint.format.dcp_files import write_dcp
from paceline.checkpoint.format.manifest import StoredFile
from paceline.checkpoint.format.tensor_files import ChecksummedFile, write_parts, write_safetensors
from paceline.checkpoint.parts.boxes import Box
from paceline.checkpoint.parts.state_parts import TensorPart
from paceline.checkpoint.storage.local_folder import LocalFolder
from paceline.testing import fault_injection
from written_checkpoints import DTYPES, small_blocks, state_of, tensor_bytes, write_checkpoint

TENSORS = {
    "weight": torch.arange(12.0).view(3, 4), "half": torch.arange(5, dtype=torch.bfloat16), "flag": torch.tensor(True),
    "none": torch.empty(0, 3), "wave": torch.tensor([1 + 2j], dtype=torch.complex128),
    "8 bits": torch.ones(3, dtype=torch.uint8), "few bits": torch.ones(7).to(torch.float8_e4m3fn),
}  # fmt: skip


def parts_of(tensors):
    return {name: TensorPart.whole(name, tensor) for name, tensor in tensors.items()}


def equal(one, two):
    return one.dtype is two.dtype and one.shape == two.shape and tensor_bytes(one) == tensor_bytes(two)


@pytest.mark.parametrize("container", ["safetensors", "dcp"])
def test_tensors_round_trip_and_other_programs_read_them(tmp_path, container):
    files = write_checkpoint(
        LocalFolder(tmp_path), 1, [state_of(TENSORS, file="model.safetensors")], container=container
    )
    reader = CheckpointReader(files)
    for name, tensor in TENSORS.items():
        assert equal(reader.tensor(name), tensor)
    if container == "safetensors":
        loaded = load_file(files.path / "model.safetensors")
        assert loaded.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            if tensor.dtype is torch.complex128:  # which safetensors lacks
                assert tensor_bytes(loaded[name]) == tensor_bytes(tensor)
            else:
                assert equal(loaded[name], tensor)
        return
    for chunk in reader.piece(0).files["__0_0.distcp"].chunks.values():  # each record is a file of torch.save
        start, length = chunk.item
        record = (files.path / "__0_0.distcp").read_bytes()[start : start + length]
        assert equal(torch.load(io.BytesIO(record), weights_only=True), TENSORS[chunk.tensor])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_round_trips_with_and_without_dimensions(tmp_path, dtype):
    numbers = torch.arange(6).to(dtype)
    tensors = {"row": numbers, "number": numbers[1].clone(), "grid": numbers.view(2, 3), "none": numbers[:0]}
    for step, container in enumerate(("safetensors", "dcp")):
        reader = CheckpointReader(
            write_checkpoint(LocalFolder(tmp_path), step, [state_of(tensors)], container=container)
        )
        for name, tensor in tensors.items():
            assert equal(reader.tensor(name), tensor)


def test_writing_to_a_tensor_changes_no_file(tmp_path):
    files = write_checkpoint(LocalFolder(tmp_path), 1, [state_of(TENSORS)])
    reader = CheckpointReader(files)
    reader.tensor("weight").zero_()
    assert equal(reader.tensor("weight"), TENSORS["weight"])
    assert equal(CheckpointReader(files).tensor("weight"), TENSORS["weight"])


@pytest.mark.parametrize("length", range(1, 17))
def test_tensors_in_safetensors_files_are_aligned(tmp_path, length):
    """Copying complex numbers from an unaligned address of a mapped file would end the process."""
    wave = torch.ones(4, dtype=torch.complex128)
    parts = parts_of({"w" * length: wave, "b": torch.ones(3), "c": torch.ones(1).bool()})
    described = write_parts(tmp_path / "a.safetensors", parts)
    assert all(
        chunk.start % parts[label].data.element_size() == 0 for label, chunk in described.chunks.items()
    )
    assert described.chunks["w" * length].start % 16 == 0


def test_what_is_written_is_described(tmp_path):
    """Blocks, and the bytes around tensors, have the checksums of what is in the file."""
    path = tmp_path / "a"
    with small_blocks(16, 8), ChecksummedFile(path) as file:
        file.write(b"head")
        file.add(
            "w", TensorPart.whole("w", torch.arange(5.0)), file.write_tensor(memoryview(bytes(range(20))))
        )
        file.write(b"end")
        found = file.finish()
    data = path.read_bytes()
    assert data == b"head" + bytes(range(20)) + b"end"
    assert (found.nbytes, found.chunks["w"].start) == (27, 4)
    assert found.chunks["w"].checksums == xxh3_64_hexdigest(data[4:20]) + xxh3_64_hexdigest(data[20:24])
    assert found.gaps() == [(0, 4), (24, 27)]
    assert found.rest == xxh3_64_hexdigest(b"headend")


def test_parts_have_their_names_in_files(tmp_path):
    box = Box((2, 0), (1, 3))
    described = write_parts(tmp_path / "a", {"label": TensorPart("w", (4, 3), box, torch.ones(1, 3))})
    chunk = described.chunks["label"]
    assert (chunk.tensor, chunk.shape, chunk.offsets, chunk.sizes) == ("w", (4, 3), (2, 0), (1, 3))
    assert load_file(tmp_path / "a")["label"].shape == (1, 3)


def test_a_file_is_never_overwritten(tmp_path):
    (tmp_path / "a").write_text("mine")
    for write in (
        lambda path: write_parts(path, {}),
        lambda path: write_dcp(path, {}, {}),
        lambda path: write_safetensors(path, {}, {}),
    ):
        with pytest.raises(FileExistsError):
            write(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "mine"


def test_exported_tensors_have_the_texts_of_their_header(tmp_path):
    write_safetensors(tmp_path / "a", TENSORS, {"step": "7"})
    text = (tmp_path / "a").read_bytes()
    assert b'"__metadata__":{"format":"pt","step":"7"}' in text
    assert equal(load_file(tmp_path / "a")["half"], TENSORS["half"])


@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
@pytest.mark.parametrize("nbytes", [0, 100, 2000])
def test_a_full_disk_raises(tmp_path, kind, nbytes):
    parts = parts_of({**TENSORS, "large": torch.ones(3000)})
    fault_injection.disk_full(after_nbytes=nbytes)
    try:
        with pytest.raises(OSError, match="No space left"):
            write_parts(tmp_path / "a", parts) if kind == "safetensors" else write_dcp(
                tmp_path / "a", parts, {}
            )
    finally:
        fault_injection.disarm()


def test_equal_contents_give_equal_files(tmp_path):
    """No time, path or random number is in a file, so backups need not keep it twice."""
    digests = {
        hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        for name in ("a", "b")
        if isinstance(write_parts(tmp_path / name, parts_of(TENSORS)), StoredFile)
    }
    assert len(digests) == 1
