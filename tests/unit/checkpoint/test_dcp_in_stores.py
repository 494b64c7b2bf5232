"""Checkpoints of torch.distributed.checkpoint, and files of others, in a remote place where a run saves."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import paceline
from paceline.checkpoint.format.manifest import CHECKSUM, MANIFEST, METADATA
from paceline.errors import CheckpointError

pytestmark = pytest.mark.sweep


@pytest.fixture(params=["memory", "file", "sftp", "s3"])
def place(request, make_place):
    return make_place(request.param)


def put(place, folder, path, *names):
    """Copy files of a local folder."""
    for name in names or [file.name for file in path.iterdir()]:
        place.store()._files.write(f"{folder}/{name}", (path / name).read_bytes())


@pytest.fixture
def theirs(place, tmp_path):
    """A model that torch has saved there as step-100."""
    net = nn.Linear(3, 2)
    dcp.save({"model": net.state_dict()}, checkpoint_id=tmp_path / "step-100", no_dist=True)
    put(place, "step-100", tmp_path / "step-100")
    return net


def there(place, folder):
    return sorted(place.store()._files.list(folder))


def test_a_run_begins_from_it_and_never_removes_it(place, theirs):
    net = nn.Linear(3, 2)
    with paceline.Checkpoint(place.store(), net, keep=1) as checkpoint:
        found = checkpoint.load()
        assert found.step == 100
        assert found.path == f"{place.store().location}/step-100"
        assert torch.equal(net.weight, theirs.weight)
        for checkpoint.step in (101, 102):
            checkpoint.save(wait=True)
    assert place.store().names() == ["step-00000102", "step-100"]
    assert there(place, "step-100") == [METADATA, "__0_0.distcp"]


def test_a_damaged_one_is_skipped_and_keeps_its_data(place, theirs, caplog):
    with paceline.Checkpoint(place.store(), nn.Linear(3, 2)) as checkpoint:
        checkpoint.step = 99
        checkpoint.save(wait=True)
    files = place.store()._files
    files.write("step-100/__0_0.distcp", files.read("step-100/__0_0.distcp")[:-1])
    with paceline.Checkpoint(place.store(), nn.Linear(3, 2)) as checkpoint:
        assert checkpoint.load().step == 99
        assert [each.path.rpartition("/")[2] for each in checkpoint.resumed.passed_over] == ["step-100"]
    with paceline.Checkpoint(place.store(), nn.Linear(3, 2)) as checkpoint:
        assert checkpoint.load().passed_over == ()
    assert there(place, "step-100") == ["__0_0.distcp"]
    assert there(place, "step-100.damaged") == [METADATA]


def test_what_is_no_checkpoint_stays_and_is_named(place, theirs, tmp_path, caplog):
    """Torch writes METADATA last; and there may be files of anything else."""
    (tmp_path / "weights.bin").write_bytes(b"123")
    put(place, "step-7", tmp_path / "step-100", "__0_0.distcp")
    put(place, "step-8", tmp_path, "weights.bin")
    with caplog.at_level(logging.WARNING):
        paceline.Checkpoint(place.store(), nn.Linear(3, 2)).close()
    assert place.store().names() == ["step-100"]
    assert there(place, "step-7") == ["__0_0.distcp"]
    assert there(place, "step-8") == ["weights.bin"]
    for name in ("step-7", "step-8"):
        assert f"{place.store().location}/{name} is no checkpoint, and stays" in caplog.text


@pytest.mark.parametrize("missing", [CHECKSUM, MANIFEST])
def test_an_incomplete_checkpoint_in_torchs_format_is_none_of_torchs(place, missing):
    with paceline.Checkpoint(place.store(), nn.Linear(3, 2), format="dcp") as checkpoint:
        checkpoint.save(wait=True)
    files = place.store()._files
    assert METADATA in there(place, "step-00000000")
    files.remove(f"step-00000000/{CHECKSUM}")
    files.remove(f"step-00000000/{missing}")
    assert place.store().names() == []
    paceline.Checkpoint(place.store(), nn.Linear(3, 2)).close()
    assert there(place, "step-00000000") == []


def test_if_none_is_intact_nothing_is_removed(place, theirs):
    place.store()._files.write(f"step-100/{METADATA}", b"")
    with (
        paceline.Checkpoint(place.store(), nn.Linear(3, 2)) as checkpoint,
        pytest.raises(CheckpointError, match="none of the 1 checkpoints"),
    ):
        checkpoint.load()
    assert there(place, "step-100") == [METADATA, "__0_0.distcp"]
