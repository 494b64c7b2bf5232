"""Folder of checkpoints: complete ones, removal of old ones, its lock, and requirements on the file system."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys

import pytest

from paceline.checkpoint.retention import Retention, remove_old
from paceline.checkpoint.storage import local_folder as module
from paceline.checkpoint.storage.local_folder import LocalFiles, LocalFolder, checkpoint_name, step_of
from paceline.errors import CheckpointError, UsageError


def complete(folder, step, keep=2):
    folder.begin(step, "mark").complete([("last", b"text")], {})
    remove_old(folder, Retention(keep), {})


def names(folder):
    return sorted(path.name for path in folder.path.iterdir())


def test_only_the_newest_are_kept(tmp_path):
    folder = LocalFolder(tmp_path / "run")
    for step in (5, 10, 15, 100):
        complete(folder, step)
    assert folder.names() == [checkpoint_name(100), checkpoint_name(15)]
    assert names(folder) == [checkpoint_name(15), checkpoint_name(100)]


def test_an_existing_step_is_set_aside(tmp_path):
    folder = LocalFolder(tmp_path)
    complete(folder, 5)
    complete(folder, 7)
    folder.set_aside(folder.names()[0])
    assert names(folder) == [checkpoint_name(5), f"{checkpoint_name(7)}.damaged"]
    complete(folder, 6)
    complete(folder, 7)
    assert names(folder) == [checkpoint_name(6), checkpoint_name(7), f"{checkpoint_name(7)}.damaged"]
    complete(folder, 8)
    complete(folder, 9)
    assert names(folder) == [checkpoint_name(8), checkpoint_name(9)]


def test_incomplete_checkpoints_are_ignored_and_removed(tmp_path):
    folder = LocalFolder(tmp_path)
    for name in ("step-00000003.tmp-ab", "step-x", "step-00000004.damaged", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000009").touch()
    assert folder.names() == []
    folder.remove_incomplete()
    assert names(folder) == ["other", "step-00000004.damaged", "step-00000009", "step-x"]


def test_steps_are_compared_as_numbers(tmp_path):
    """A name grows by a digit after step 99,999,999."""
    folder = LocalFolder(tmp_path)
    for step in (99_999_998, 99_999_999, 100_000_000, 100_000_001):
        complete(folder, step, keep=3)
    assert [step_of(name) for name in folder.names()] == [100_000_001, 100_000_000, 99_999_999]
    folder.set_aside(checkpoint_name(100_000_000))
    complete(folder, 100_000_002, keep=3)
    left = [checkpoint_name(step) for step in (99_999_999, 100_000_001, 100_000_002)]
    assert names(folder) == sorted([*left, "step-100000000.damaged"])
    complete(folder, 100_000_003, keep=3)
    assert names(folder) == [checkpoint_name(step) for step in (100_000_001, 100_000_002, 100_000_003)]


@pytest.mark.parametrize("nbytes", [1, 3])
def test_a_file_of_the_wrong_size_completes_no_checkpoint(tmp_path, nbytes):
    folder = LocalFolder(tmp_path)
    attempt = folder.begin(1, "mark")
    (attempt.folder / "model.safetensors").write_bytes(b"12")
    with pytest.raises(OSError, match="shorter or longer"):
        attempt.complete([("last", b"text")], {"model.safetensors": nbytes})
    with pytest.raises(FileNotFoundError):
        attempt.complete([("last", b"text")], {"other.safetensors": 0})
    assert folder.names() == []
    assert not (attempt.folder / "last").exists()
    attempt.abandon()
    assert names(folder) == []


def test_an_attempt_is_complete_with_its_last_file(tmp_path, monkeypatch):
    """What is written last is flushed in this order; a rename after all of it makes the checkpoint."""
    done = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(
        os, "fsync", lambda file: done.append(os.readlink(f"/proc/self/fd/{file}")) or fsync(file)
    )
    monkeypatch.setattr(os, "rename", lambda *names: done.append("rename") or rename(*names))
    folder = LocalFolder(tmp_path)
    attempt = folder.begin(4, "mark")
    attempt.complete([("first", b"1"), ("second", b"22")], {})
    where = str(attempt.folder)
    assert done == [f"{where}/first", f"{where}/second", where, "rename", str(tmp_path)]
    assert folder.files(checkpoint_name(4)).read("second") == b"22"


def test_ranks_report_to_each_other(tmp_path):
    """Attempts of two ranks at the same step use the same place, those of another run another one."""
    folder = LocalFolder(tmp_path)
    one, two, other = folder.begin(3, "a"), folder.begin(3, "a"), folder.begin(3, "b")
    assert two.reported("rank-00000.json") is None
    one.report("rank-00000.json", b"{}")
    assert two.reported("rank-00000.json") == b"{}"
    assert other.reported("rank-00000.json") is None
    assert os.stat(one.folder / "rank-00000.json").st_mode & 0o777 == 0o600


def test_a_report_is_over_once_another_rank_can_see_it(tmp_path, monkeypatch):
    """Rank 0 may complete the checkpoint, and so rename its folder, at that moment."""
    folder = LocalFolder(tmp_path)
    one, two = folder.begin(3, "a"), folder.begin(3, "a")
    replace = os.replace

    def replace_and_complete(old, new):
        replace(old, new)
        one.complete([("last", b"")], {})

    monkeypatch.setattr(os, "replace", replace_and_complete)
    two.report("rank-00001.json", b"{}")
    assert sorted(os.listdir(tmp_path / checkpoint_name(3))) == ["last", "rank-00001.json"]


def test_files_are_read_in_pieces_until_they_end(tmp_path):
    folder = LocalFolder(tmp_path)
    attempt = folder.begin(3, "a")
    (attempt.folder / "data").write_bytes(bytes(range(200)))
    attempt.complete([], {"data": 200})
    file = folder.files(checkpoint_name(3)).open("data")
    target = bytearray(50)
    file.read_into(120, memoryview(target))
    assert (file.nbytes, bytes(target)) == (200, bytes(range(120, 170)))
    folder.remove([checkpoint_name(3)])
    file.read_into(0, memoryview(target))  # it is open
    assert bytes(target) == bytes(range(50))
    with pytest.raises(EOFError):
        file.read_into(151, memoryview(target))
    file.close()
    file.close()
    for missing in (lambda files: files.open("data"), lambda files: files.read("data")):
        with pytest.raises(FileNotFoundError):
            missing(folder.files(checkpoint_name(3)))


def test_marks_show_whether_a_folder_is_the_same(tmp_path):
    folder, other = LocalFolder(tmp_path / "a"), LocalFolder(tmp_path / "b")
    for each in (folder, other):
        each.prepare()
    folder.put_probe("x")
    assert (folder.sees_probe("x"), folder.sees_probe("y"), other.sees_probe("x")) == (True, False, False)
    folder.remove_probe("x")
    assert not folder.sees_probe("x")
    assert names(folder) == []


def test_the_lock_names_its_holder(tmp_path):
    code = (
        "import sys\n"
        "from paceline.checkpoint.storage.local_folder import LocalFolder\n"
        "lock = LocalFolder(sys.argv[1]).lock(); print('locked', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(CheckpointError, match=rf"in use by another run: process {other.pid} on "):
            LocalFolder(tmp_path).lock(seconds=0.0)
    finally:
        other.kill()
        other.wait()
        other.stdin.close()
        other.stdout.close()
    lock = LocalFolder(tmp_path).lock()  # the other process has ended
    with pytest.raises(CheckpointError, match=r"(?s)in use by this run: .* close it first"):
        LocalFolder(tmp_path).lock()
    lock.close()
    lock.close()
    LocalFolder(tmp_path).lock().close()


def test_a_folder_that_can_not_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="can't write checkpoints"):
        LocalFolder(tmp_path / "file" / "run").prepare()


def test_prepare_leaves_no_files(tmp_path):
    complete(LocalFolder(tmp_path), 1)
    LocalFolder(tmp_path).prepare()
    assert names(LocalFolder(tmp_path)) == [checkpoint_name(1)]


def test_a_file_system_that_copies_is_refused_by_type(tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\ns3fs {tmp_path}/bucket fuse.s3fs rw 0 0\n")
    file_system_of = module._file_system_of
    monkeypatch.setattr(module, "_file_system_of", lambda path, _: file_system_of(path, mounts))
    LocalFolder(tmp_path / "disk").prepare()
    with pytest.raises(
        UsageError, match=r"(?s)does not rename folders atomically: fuse.s3fs.*local disk, NFS"
    ):
        LocalFolder(tmp_path / "bucket" / "run").prepare()


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
        LocalFolder(tmp_path).prepare()
    monkeypatch.undo()
    assert names(LocalFolder(tmp_path)) == []


def test_a_lock_that_can_not_be_taken_raises(tmp_path, monkeypatch):
    (tmp_path / "lock").mkdir()
    with pytest.raises(UsageError, match=r"can't be locked: Is a directory"):
        LocalFolder(tmp_path).lock()
    (tmp_path / "lock").rmdir()

    def refuse(file, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UsageError, match=r"can't be locked: No locks available"):
        LocalFolder(tmp_path).lock()


def test_threads_read_a_file_to_its_end_that_was_removed(tmp_path):
    path = tmp_path / "step-00000001" / "data"
    path.parent.mkdir()
    path.write_bytes(bytes(range(200)))
    file = LocalFiles(path.parent).open("data")
    path.unlink()
    memory = bytearray(100)
    with file.for_thread() as mine:
        mine.read_into(100, memoryview(memory))
    assert memory == bytes(range(100, 200))
    with file.for_thread() as mine, pytest.raises(EOFError):
        mine.read_into(150, memoryview(memory))
    file.read_into(0, memoryview(memory))  # as before
    assert memory == bytes(range(100))
    file.close()
