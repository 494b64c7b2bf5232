"""Checkpoints of torch.distributed.checkpoint: read and verified without running anything in them."""

from __future__ import annotations

import collections
import io
import os
import pickle
import random
import shutil
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from paceline.checkpoint.format.manifest import METADATA
from paceline.checkpoint.interop.dcp_index import DcpIndex
from paceline.checkpoint.interop.dcp_reader import DcpReader, is_plain_dcp
from paceline.checkpoint.newest_checkpoint import find_problem
from paceline.checkpoint.parts.boxes import Box
from paceline.checkpoint.parts.state_reader import Read
from paceline.checkpoint.storage.local_folder import LocalFiles
from paceline.errors import DamagedCheckpoint, UsageError

STATE = {
    "model": {
        "w": torch.arange(24.0).reshape(4, 6),
        "t": torch.arange(6.0).reshape(2, 3).t(),
        "half": torch.linspace(0, 1, 5, dtype=torch.bfloat16),
        "float8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        "complex": torch.tensor([1 + 2j, 3 - 4j]),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 3),
        "channels": torch.randn(1, 2, 3, 4).to(memory_format=torch.channels_last),
    },
    "values": {"lr": 0.1, "names": ["a", "b"], "pair": (1, None), "text": "α"},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint, written once; tests that change files copy it."""
    path = tmp_path_factory.mktemp("dcp") / "step-5"
    dcp.save(STATE, checkpoint_id=path)
    return path


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def change_metadata(path, change):
    """Rewrite `.metadata` after `change` was called with its contents."""
    metadata = pickle.loads((path / METADATA).read_bytes())
    change(metadata)
    (path / METADATA).write_bytes(pickle.dumps(metadata))


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


# ------------------------------------------------------------------ reading


def test_tensors_and_values_of_every_kind(saved):
    reader = DcpReader(LocalFiles(saved))
    for name, tensor in STATE["model"].items():
        found = reader.tensor(f"model.{name}")
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert bits(found) == bits(tensor)
    for name, value in STATE["values"].items():
        assert reader.load_value(f"values.{name}") == value
    assert reader.index.paths["values.lr"] == ("values", "lr")
    assert reader.index.writers == 1
    reader.verify()
    reader.close()


def test_boxes_are_read_into_place(saved):
    reader = DcpReader(LocalFiles(saved))
    into, pairs, real = torch.zeros(2, 3), torch.zeros(1, dtype=torch.complex64), torch.zeros(1, 2)
    reader.read(
        [
            Read("model.w", Box((1, 2), (2, 3)), into),
            Read("model.complex", Box((1,), (1,)), pairs),
            Read("model.complex", Box((0, 0), (1, 2)), real),
            Read("model.scalar", Box((), ()), None),
            Read("model.empty", Box((0, 0), (0, 3)), None),
        ]
    )
    assert torch.equal(into, STATE["model"]["w"][1:3, 2:5])
    assert pairs.tolist() == [3 - 4j]
    assert real.tolist() == [[1, 2]]
    with pytest.raises(KeyError):
        reader.tensor("model.nothing")
    reader.close()


def test_what_is_plain_dcp(saved, copy):
    assert is_plain_dcp(LocalFiles(saved))
    (copy / "rank-00000.json").write_text("{}")  # a checkpoint of Paceline's that lost its manifest
    assert not is_plain_dcp(LocalFiles(copy))
    (copy / "rank-00000.json").unlink()
    (copy / METADATA).unlink()
    assert not is_plain_dcp(LocalFiles(copy))


# ------------------------------------------------------------------ files that run code


class Runs:
    """Unpickled, it makes a folder."""

    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize(
    "call",
    [
        lambda path: Runs(os.mkdir, path),
        lambda path: Runs(eval, f"__import__('os').mkdir({path!r})"),
        lambda path: Runs(torch.load, path),
        lambda path: Metadata({}, Runs(os.mkdir, path)),
        lambda path: collections.Counter("ab"),
    ],
)
def test_a_hostile_metadata_file_is_refused_and_runs_nothing(copy, tmp_path, call):
    made = tmp_path / "made"
    (copy / METADATA).write_bytes(pickle.dumps(call(str(made))))
    with pytest.raises(UsageError, match=r"no part of the metadata of torch\.distributed\.checkpoint"):
        DcpReader(LocalFiles(copy))
    assert not made.exists()


def test_a_hostile_metadata_file_changes_no_class_of_this_process():
    opcodes = (
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n(NX\x0c\x00\x00\x00__setstate__N"  # slots of the class
        b"dctorch\nfloat32\ntb."
    )
    with pytest.raises((UsageError, DamagedCheckpoint)):
        DcpIndex.from_pickle(opcodes)
    evil = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}X\x04\x00\x00\x00evilK\x01stb."
    with pytest.raises(DamagedCheckpoint):
        DcpIndex.from_pickle(evil)
    assert not hasattr(Metadata, "evil")
    persistent = pickle.PROTO + b"\x02" + b"X\x01\x00\x00\x00a" + pickle.BINPERSID + b"."
    with pytest.raises(UsageError, match="refers to 'a'"):
        DcpIndex.from_pickle(persistent)


def test_a_hostile_value_is_refused_and_runs_nothing(tmp_path):
    made = tmp_path / "made"
    dcp.save({"a": torch.ones(1), "b": Runs(os.mkdir, str(made))}, checkpoint_id=tmp_path / "x")
    reader = DcpReader(LocalFiles(tmp_path / "x"))
    assert reader.tensor("a").tolist() == [1]
    with pytest.raises(UsageError, match=r"(?s)'b' holds posix.mkdir, which is not read.*save plain numbers"):
        reader.load_value("b")
    reader.close()
    assert not made.exists()


@pytest.mark.parametrize("file", ["/etc/passwd", "../outside", "a/../../b", "a\\b", "a\0b", ""])
def test_files_outside_of_the_folder_are_refused(copy, file):
    def change(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = file

    change_metadata(copy, change)
    with pytest.raises(DamagedCheckpoint, match=r"is not (in the folder|a file name)"):
        DcpReader(LocalFiles(copy))


# ------------------------------------------------------------------ damage


def verify(path):
    reader = DcpReader(LocalFiles(path))
    try:
        reader.verify()
    finally:
        reader.close()


def test_missing_truncated_and_foreign_files_are_named(copy):
    file = copy / "__0_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[:-1000])
    with pytest.raises(DamagedCheckpoint, match=r"__0_0.distcp has \d+ bytes, where '.*' ends at \d+"):
        verify(copy)
    assert "where" in find_problem(LocalFiles(copy))
    file.write_bytes(bytes(len(data)))
    with pytest.raises(DamagedCheckpoint, match=r"__0_0.distcp: '.*' is no record of torch.save"):
        verify(copy)
    file.unlink()
    with pytest.raises(DamagedCheckpoint, match=r"__0_0.distcp is missing"):
        verify(copy)
    (copy / METADATA).unlink()
    with pytest.raises(DamagedCheckpoint, match="metadata can't be read"):
        verify(copy)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.storage_data.popitem(), "no file has"),
        (lambda m: m.state_dict_metadata["model.w"].chunks.clear(), "do not cover its shape"),
        (
            lambda m: m.state_dict_metadata["model.w"].chunks.append(
                m.state_dict_metadata["model.half"].chunks[0]
            ),
            "do not cover",
        ),
        (lambda m: setattr(m.state_dict_metadata["model.w"], "size", torch.Size([5, 6])), "do not cover"),
        (lambda m: setattr(m.state_dict_metadata["model.w"], "size", torch.Size([6, 4])), "do not cover"),
        (
            lambda m: setattr(m.state_dict_metadata["model.w"].properties, "dtype", torch.int32),
            r"'model.w' is torch.float32 \[4, 6\] in place of torch.int32",
        ),
        (lambda m: setattr(m, "storage_data", None), "is invalid"),
        (lambda m: setattr(m, "state_dict_metadata", {1: None}), "is not a name"),
        (
            lambda m: [setattr(info, "offset", -1) for info in m.storage_data.values()],
            "are not sizes",
        ),
    ],
)
def test_inconsistent_metadata_is_damage(copy, change, words):
    change_metadata(copy, change)
    with pytest.raises(DamagedCheckpoint, match=words):
        verify(copy)


def test_items_written_through_an_extension_are_refused_by_name(copy):
    def change(metadata):
        for index, info in metadata.storage_data.items():
            if index.fqn == "model.w":
                info.transform_descriptors = ["zstd"]

    change_metadata(copy, change)
    reader = DcpReader(LocalFiles(copy))
    assert reader.tensor("model.scalar") == 3
    with pytest.raises(UsageError, match=r"'model.w' was written through zstd"):
        reader.tensor("model.w")
    reader.close()


def test_a_compressed_record_is_refused(copy):
    reader = DcpReader(LocalFiles(copy))
    item = reader.index.tensors["model.w"].chunks[0].item
    file = copy / item.file
    data = file.read_bytes()
    with zipfile.ZipFile(io.BytesIO(data[item.start : item.start + item.nbytes])) as whole:
        entries = {entry.filename: whole.read(entry) for entry in whole.infolist()}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    record = packed.getvalue()
    (copy / item.file).write_bytes(data + record)

    def change(metadata):
        for index, info in metadata.storage_data.items():
            if index.fqn == "model.w":
                info.offset, info.length = len(data), len(record)

    change_metadata(copy, change)
    reader.close()
    with pytest.raises(DamagedCheckpoint, match=r"'model.w' is compressed"):
        verify(copy)


def test_records_without_checksums_are_read_with_a_warning(tmp_path, caplog):
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save({"a": torch.ones(2), "b": torch.ones(3)}, checkpoint_id=tmp_path / "x")
    finally:
        torch.serialization.set_crc32_options(True)
    verify(tmp_path / "x")
    assert [record.message for record in caplog.records if "without checksums" in record.message] == [
        f"{tmp_path / 'x'} was written without checksums (torch.serialization.set_crc32_options): damage is not "
        "detected"
    ]


def contents(path):
    reader = DcpReader(LocalFiles(path))
    try:
        reader.verify()
        tensors = {name: (str(reader.info(name)), bits(reader.tensor(name))) for name in reader.names()}
        return tensors, {name: reader.load_value(name) for name in reader.index.values}
    finally:
        reader.close()


@pytest.mark.parametrize("file", ["__0_0.distcp", METADATA])
def test_flipped_bits_are_found_or_change_nothing(copy, file):
    """Some bytes belong to nothing: padding, times and versions of zip headers, ids of the save."""
    expected, path, chance = contents(copy), copy / file, random.Random(5)
    whole, found = path.read_bytes(), 0
    for _ in range(400):
        data = bytearray(whole)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        try:
            got = contents(copy)
        except (DamagedCheckpoint, UsageError):
            found += 1
            continue
        if file != METADATA:
            assert got == expected
        else:  # another name or path: nothing of the run's is found under it
            values = [*expected[0].values(), *expected[1].values()]
            got[0].pop("model.empty", None)  # of any shape
            assert all(value in values for value in [*got[0].values(), *got[1].values()])
    assert found > 50
