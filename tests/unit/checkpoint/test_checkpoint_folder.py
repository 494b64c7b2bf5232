"""Folder of checkpoints: complete ones, removal of old ones, its lock, and requirements on the file system."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys

import pytest

from paceline.checkpoint.format import checkpoint_folder as module
from paceline.checkpoint.format.checkpoint_folder import CheckpointFolder, checkpoint_name
from paceline.checkpoint.format.manifest import Manifest
from paceline.errors import CheckpointError, UsageError


def complete(folder, step, keep=2):
    staging = folder.staging(step, "mark")
    staging.mkdir(parents=True)
    final = folder.complete_with(staging, Manifest(step=step, facts={}, files={}, weights={}, states=[{}]))
    folder.remove_old(keep)
    return final


def names(folder):
    return sorted(path.name for path in folder.path.iterdir())


def test_only_the_newest_are_kept(tmp_path):
    folder = CheckpointFolder(tmp_path / "run")
    for step in (5, 10, 15, 100):
        complete(folder, step)
    assert [path.name for path in folder.complete()] == [checkpoint_name(100), checkpoint_name(15)]
    assert names(folder) == [checkpoint_name(15), checkpoint_name(100)]


def test_an_existing_step_is_set_aside(tmp_path):
    folder = CheckpointFolder(tmp_path)
    complete(folder, 5)
    complete(folder, 7)
    folder.set_aside(folder.complete()[0])
    assert names(folder) == [checkpoint_name(5), f"{checkpoint_name(7)}.damaged"]
    complete(folder, 6)
    complete(folder, 7)
    assert names(folder) == [checkpoint_name(6), checkpoint_name(7), f"{checkpoint_name(7)}.damaged"]
    complete(folder, 8)
    complete(folder, 9)
    assert names(folder) == [checkpoint_name(8), checkpoint_name(9)]


def test_incomplete_checkpoints_are_ignored_and_removed(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for name in ("step-00000003.tmp-ab", "step-x", "step-00000004.damaged", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000009").touch()
    assert folder.complete() == []
    folder.remove_incomplete()
    assert names(folder) == ["other", "step-00000004.damaged", "step-00000009", "step-x"]


def test_a_file_of_the_wrong_size_completes_no_checkpoint(tmp_path):
    from paceline.checkpoint.format.manifest import TensorFile

    folder = CheckpointFolder(tmp_path)
    staging = folder.staging(1, "mark")
    staging.mkdir()
    (staging / "model.safetensors").write_bytes(b"12")
    files = {"model.safetensors": TensorFile(3, 3, "", {})}
    manifest = Manifest(step=1, facts={}, files=files, weights={}, states=[{}])
    with pytest.raises(OSError, match="shorter or longer"):
        folder.complete_with(staging, manifest)
    assert folder.complete() == []


def test_the_lock_names_its_holder(tmp_path):
    code = (
        "import sys\n"
        "from paceline.checkpoint.format.checkpoint_folder import CheckpointFolder\n"
        "lock = CheckpointFolder(sys.argv[1]).lock(); print('locked', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(CheckpointError, match=rf"in use by another run: process {other.pid} on "):
            CheckpointFolder(tmp_path).lock(seconds=0.0)
    finally:
        other.kill()
        other.wait()
        other.stdin.close()
        other.stdout.close()
    lock = CheckpointFolder(tmp_path).lock()  # the other process has ended
    with pytest.raises(CheckpointError, match=r"(?s)in use by this run: .* close it first"):
        CheckpointFolder(tmp_path).lock()
    lock.close()
    lock.close()
    CheckpointFolder(tmp_path).lock().close()


def test_a_folder_that_can_not_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="can't write checkpoints"):
        CheckpointFolder(tmp_path / "file" / "run").prepare()


def test_prepare_leaves_no_files(tmp_path):
    complete(CheckpointFolder(tmp_path), 1)
    CheckpointFolder(tmp_path).prepare()
    assert names(CheckpointFolder(tmp_path)) == [checkpoint_name(1)]


def test_a_file_system_that_copies_is_refused_by_type(tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\ns3fs {tmp_path}/bucket fuse.s3fs rw 0 0\n")
    file_system_of = module._file_system_of
    monkeypatch.setattr(module, "_file_system_of", lambda path, _: file_system_of(path, mounts))
    CheckpointFolder(tmp_path / "disk").prepare()
    with pytest.raises(
        UsageError, match=r"(?s)does not rename folders atomically: fuse.s3fs.*local disk, NFS"
    ):
        CheckpointFolder(tmp_path / "bucket" / "run").prepare()


@pytest.mark.parametrize("how", ["fails", "copies", "leaves the old one"])
def test_a_file_system_without_atomic_rename_is_detected(tmp_path, monkeypatch, how):
    import shutil

    def rename(old, new):
        if how == "fails":
            raise OSError(95, "Operation not supported")
        shutil.copytree(old, new)
        if how == "copies":
            shutil.rmtree(old)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(UsageError, match="does not rename folders atomically"):
        CheckpointFolder(tmp_path).prepare()
    monkeypatch.undo()
    assert names(CheckpointFolder(tmp_path)) == []


def test_a_lock_that_can_not_be_taken_raises(tmp_path, monkeypatch):
    (tmp_path / "lock").mkdir()
    with pytest.raises(UsageError, match=r"can't be locked: Is a directory"):
        CheckpointFolder(tmp_path).lock()
    (tmp_path / "lock").rmdir()

    def refuse(file, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UsageError, match=r"can't be locked: No locks available"):
        CheckpointFolder(tmp_path).lock()
