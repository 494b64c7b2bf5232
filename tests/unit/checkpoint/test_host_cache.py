"""Files of remote checkpoints on this host: kept after their upload, shared by ranks, never trusted."""

from __future__ import annotations

import os
import shutil
import stat
import time
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_digest

from checkpoint_places import Place, save
from forked_child import ended, start
from paceline.checkpoint.storage import host_cache
from paceline.checkpoint.storage.host_cache import BLOCK_NBYTES, BlockChecksums, HostCache
from paceline.errors import UsageError
from scripted_fs import script

DATA = os.urandom(1 << 20) * 9  # more than two blocks


@pytest.fixture
def scripted(memory) -> Place:
    return replace(memory, url=memory.url.replace("memory:", "scripted:"))


def read(store, path: str) -> bytes:
    file = store.files(store.names()[0]).open(path)
    data = bytearray(file.nbytes)
    file.read_into(0, memoryview(data))
    file.close()
    return bytes(data)


def downloads(store, path: str) -> int:
    """Return how many times reading a file reads the remote one."""
    calls = []
    with script(lambda operation, name: calls.append(name) if operation == "read" else None):
        assert read(store, path) == DATA
    return len(calls)


def cached(place: Place) -> list[Path]:
    return [path for path in place.cache.glob("*/step-*/*/*") if path.suffix != ".blocks"]


@given(st.lists(st.binary(max_size=60)), st.integers(1, 50))
def test_checksums_are_those_of_the_blocks(pieces, nbytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_cache, "BLOCK_NBYTES", nbytes)
        checksums, whole = BlockChecksums(), b"".join(pieces)
        for piece in pieces:
            checksums.update(piece)
        blocks = [whole[start : start + nbytes] for start in range(0, len(whole), nbytes)]
        assert checksums.finish() == b"".join(map(xxh3_64_digest, blocks))


def test_what_a_rank_has_uploaded_is_not_downloaded_again(scripted):
    store = scripted.owned()
    attempt = save(store, 1, {"model.safetensors": DATA})
    path = f"{attempt.prefix}model.safetensors"
    assert downloads(scripted.store(), path) == 0
    assert downloads(scripted.store(reads_cache=False), path) == 3
    shutil.rmtree(scripted.cache)
    assert downloads(scripted.store(), path) == 3
    assert downloads(scripted.store(), path) == 0


@pytest.mark.parametrize("damage", ["flipped", "short", "empty", "long", "no checksums", "short checksums"])
def test_damage_on_this_host_costs_a_download_and_nothing_else(scripted, damage):
    store = scripted.owned()
    attempt = save(store, 1, {"model.safetensors": DATA})
    [local] = cached(scripted)
    checksums = Path(f"{local}.blocks")
    if damage == "flipped":
        with open(local, "r+b") as file:
            file.seek(BLOCK_NBYTES + 5)
            file.write(bytes([DATA[BLOCK_NBYTES + 5] ^ 1]))
    elif damage == "no checksums":
        checksums.unlink()
    elif damage == "short checksums":
        os.truncate(checksums, 12)
    else:
        os.truncate(local, {"short": BLOCK_NBYTES + 1, "empty": 0, "long": len(DATA) + 1}[damage])
    path, expected = f"{attempt.prefix}model.safetensors", {"flipped": 1, "short": 2, "short checksums": 2}
    assert downloads(scripted.store(), path) == expected.get(damage, 0 if damage == "long" else 3)
    assert downloads(scripted.store(), path) == 0  # it is repaired


def test_a_file_that_was_written_anew_is_downloaded(scripted):
    store = scripted.owned()
    attempt = save(store, 1, {"model.safetensors": bytes(len(DATA))})
    store._files.write(f"step-00000001/{attempt.prefix}model.safetensors", DATA)
    assert downloads(scripted.store(), f"{attempt.prefix}model.safetensors") == 3


def test_a_file_that_is_missing_at_the_other_end_is_missing(scripted):
    store = scripted.owned()
    attempt = save(store, 1)
    store._files.remove(f"step-00000001/{attempt.prefix}model.safetensors")
    with pytest.raises(FileNotFoundError):
        store.files("step-00000001").open(f"{attempt.prefix}model.safetensors")


def test_the_newest_complete_checkpoint_is_kept_and_what_is_being_written(memory):
    store = memory.owned()
    for step in (1, 2, 3):
        save(store, step)
    assert {path.parts[-3] for path in cached(memory)} == {"step-00000002", "step-00000003"}
    attempt = store.begin(4, "mark")
    assert {path.parts[-3] for path in cached(memory)} == {"step-00000003"}
    assert [path.parent for path in memory.cache.glob("*/writing/*")] == [attempt.folder.parent]
    attempt.abandon()
    assert list(memory.cache.glob("*/writing/*")) == []


def test_a_disk_without_room_is_not_used(scripted, monkeypatch):
    store = scripted.owned()
    attempt = save(store, 1, {"model.safetensors": DATA})
    shutil.rmtree(scripted.cache)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, len(DATA)))
    for _ in range(2):
        assert downloads(scripted.store(), f"{attempt.prefix}model.safetensors") == 3
    assert cached(scripted) == []


def test_a_disk_that_becomes_full_is_no_reason_to_fail(scripted, monkeypatch):
    store = scripted.owned()
    attempt = save(store, 1, {"model.safetensors": DATA})
    shutil.rmtree(scripted.cache)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        assert downloads(scripted.store(), f"{attempt.prefix}model.safetensors") == 3


def test_files_are_private(memory):
    attempt = save(memory.owned(), 1)
    assert stat.S_IMODE(attempt.folder.stat().st_mode) == 0o700
    found = [path for path in memory.cache.rglob("*") if "step-" in str(path)]
    assert found
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in found if path.is_dir()} == {0}


@pytest.mark.parametrize("given", [True, False])
def test_a_relative_folder_stays_where_it_is_when_the_program_changes_its_directory(
    tmp_path, monkeypatch, given
):
    monkeypatch.setenv("TMPDIR", ".")
    monkeypatch.chdir(tmp_path)
    cache = HostCache("s3://bucket/run", "cache" if given else None)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir("other")
    assert cache.new_folder().is_relative_to(tmp_path)
    assert list((tmp_path / "other").iterdir()) == []


def test_a_default_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    cache = HostCache("memory://host/run")
    assert cache.new_folder().is_relative_to(tmp_path / f"paceline-{os.getuid()}")
    monkeypatch.setattr(os, "getuid", lambda: 123456)
    (tmp_path / "paceline-123456").mkdir()
    with pytest.raises(UsageError, match="another user's"):
        HostCache("memory://host/run")._make(tmp_path / "paceline-123456")


def test_folders_of_processes_that_have_ended_are_removed(make_place):
    place = make_place("file")
    store = place.owned()

    def die() -> bool:
        attempt = place.store().begin(1, "mark")
        (attempt.folder / "model.safetensors").write_bytes(DATA)
        return True

    assert ended(start(die)) == 0
    own = HostCache(place.url, place.cache)
    mine = own.new_folder()
    assert len(list(place.cache.glob("*/writing/*"))) == 2
    store.begin(1, "mark").abandon()
    assert list(place.cache.glob("*/writing/*")) == [mine]


def test_what_no_run_has_used_for_a_week_is_removed(memory):
    cache = HostCache(memory.url, memory.cache)
    unknown, step = cache.path / "writing" / "of-another-container", memory.cache / "other" / "step-00000001"
    used = memory.cache / "other" / "step-00000002"
    for folder in (unknown, step, used):
        folder.mkdir(parents=True)
    cache.remove_stale()
    assert unknown.exists()
    assert step.exists()
    for folder in (unknown, step):
        os.utime(folder, (0, time.time() - 8 * 24 * 3600))
    cache.remove_stale()
    assert [folder.exists() for folder in (unknown, step, used)] == [False, False, True]


# ------------------------------------------------------------------ ranks of one host


class CountedFileSystem(LocalFileSystem):
    """Notes each read in a file."""

    protocol = "counted"
    log = ""

    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(str(path).replace("counted://", "file://"))

    def cat_file(self, path, start=None, end=None, **kwargs):
        if start is not None:
            handle = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(handle, f"{start}\n".encode())
            os.close(handle)
            time.sleep(0.02)  # others ask for it meanwhile
        return super().cat_file(path, start=start, end=end, **kwargs)


fsspec.register_implementation("counted", CountedFileSystem, clobber=True)


def test_ranks_of_a_host_download_each_block_once(make_place, tmp_path, monkeypatch):
    place = make_place("file")
    attempt = save(place.owned(), 1, {"model.safetensors": DATA})
    shutil.rmtree(place.cache)
    monkeypatch.setattr(CountedFileSystem, "log", str(tmp_path / "reads"))

    def rank() -> bool:
        store = place.store(url=place.url.replace("file:", "counted:"))
        return read(store, f"{attempt.prefix}model.safetensors") == DATA

    ranks = [start(rank) for _ in range(4)]
    assert [ended(pid) for pid in ranks] == [0] * 4
    assert sorted((tmp_path / "reads").read_text().split(), key=int) == [
        "0",
        str(BLOCK_NBYTES),
        str(2 * BLOCK_NBYTES),
    ]


def test_a_rank_that_dies_within_a_download_holds_up_no_other(make_place, tmp_path):
    place = make_place("file")
    attempt = save(place.owned(), 1, {"model.safetensors": DATA})
    shutil.rmtree(place.cache)
    path, sign = f"{attempt.prefix}model.safetensors", tmp_path / "holds"

    def dies() -> bool:
        file = place.store().files("step-00000001").open(path)
        with file._cached.downloading(0):
            sign.touch()
            time.sleep(0.5)
            os._exit(9)

    pid = start(dies)
    deadline = time.monotonic() + 30
    while not sign.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert read(place.store(), path) == DATA
    assert ended(pid) == 9
