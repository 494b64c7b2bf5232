"""Checkpoints on a remote file system: errors, retries, late uploads of earlier runs, and the rate limit."""

from __future__ import annotations

import errno
import logging
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from checkpoint_places import Place, save, small_files
from forked_child import in_child
from paceline._core.units import MIB
from paceline.checkpoint.format.manifest import CHECKSUM, MANIFEST
from paceline.checkpoint.storage import file_system, paced_upload, remote_attempt, remote_folder
from paceline.checkpoint.storage.paced_upload import RateLimit, upload
from paceline.checkpoint.storage.remote_folder import RemoteFolder
from paceline.errors import UsageError
from scripted_fs import script


@pytest.fixture
def scripted(memory) -> Place:
    """A place in memory, whose calls run a script."""
    return replace(memory, url=memory.url.replace("memory:", "scripted:"))


@pytest.fixture
def impatient(monkeypatch):
    """Give up after a fraction of a second."""
    monkeypatch.setattr(file_system, "RETRY_SECONDS", 0.3)
    monkeypatch.setattr(file_system, "_FIRST_WAIT_SECONDS", 0.02)
    monkeypatch.setattr(remote_attempt, "RETRY_SECONDS", 0.3)
    monkeypatch.setattr(remote_attempt, "_ABANDON_SECONDS", 0.1)
    monkeypatch.setattr(remote_folder, "_PREPARE_SECONDS", 0.3)


def failing(error: Exception, operations: str, times: int = 10**9, within: str = ""):
    """Return a script that raises at calls of these operations."""
    left = [times]

    def before(operation, path):
        if operation in operations.split() and within in path and left[0] > 0:
            left[0] -= 1
            raise error

    return before


# ------------------------------------------------------------------ what is wrong with the place


@pytest.mark.parametrize(
    ("url", "reason", "remedy"),
    [
        ("s3:/bucket/run", "no URL of a folder", "s3://bucket/run"),
        ("memory://", "no URL of a folder", "s3://bucket/run"),
        ("simplecache::memory://run", "no protocol that fsspec knows", "s3://, gs://"),
        ("nothing://bucket/run", "no protocol that fsspec knows", "s3://, gs://"),
        ("dropbox://bucket/run", "needs a package that is not installed", "pip install dropboxdrivefs"),
    ],
)
def test_a_url_that_cant_be_opened_is_refused(url, reason, remedy):
    with pytest.raises(UsageError, match=reason) as caught:
        RemoteFolder(url)
    assert url in str(caught.value)
    assert remedy in caught.value.remedy


def test_a_password_is_not_shown():
    store = RemoteFolder("memory://me:secret@host/run")
    assert store.location == "memory://me:…@host/run"


@pytest.mark.parametrize("bandwidth", [0, -1.0, float("inf"), float("nan"), "0MB/s"])
def test_a_bandwidth_that_is_not_positive_is_refused(bandwidth):
    with pytest.raises(UsageError, match="bandwidth"):
        RemoteFolder("memory://host/run", bandwidth=bandwidth)


def test_a_bandwidth_is_a_number_or_a_rate(memory):
    assert RemoteFolder("memory://host/run", bandwidth="80Mbit/s")._limit._bucket.rate == 1e7
    assert RemoteFolder("memory://host/run", bandwidth=1e7)._limit._bucket.rate == 1e7
    assert memory.store()._limit._bucket is None
    with pytest.raises(UsageError, match="'50MB'"):
        RemoteFolder("memory://host/run", bandwidth="50MB")


class NoCredentialsError(Exception):
    """As botocore's."""


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (PermissionError("Access Denied"), "credentials"),
        (NoCredentialsError("Unable to locate credentials"), "credentials"),
        (FileNotFoundError("The specified bucket does not exist"), "make the bucket first"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "reaches the place"),
    ],
)
def test_a_place_that_cant_be_written_is_refused_before_the_run(scripted, impatient, error, remedy):
    store = scripted.store()
    for refused in (store.prepare, store.lock, lambda: store.put_probe("mark")):
        with (
            script(failing(error, "write create upload")),
            pytest.raises(UsageError, match=error.args[-1]) as caught,
        ):
            refused()
        assert store.location in str(caught.value)
        assert remedy in caught.value.remedy


def test_permanent_errors_are_not_retried(scripted):
    calls = []

    def before(operation, path):
        calls.append(operation)
        raise PermissionError("Access Denied")

    with script(before), pytest.raises(UsageError):
        scripted.store().prepare()
    assert calls == ["write"]


def test_a_rank_that_cant_look_says_why(scripted, impatient, caplog):
    store = scripted.owned()
    store.put_probe("mark")
    with script(failing(PermissionError("Access Denied"), "info")), caplog.at_level(logging.WARNING):
        assert not store.sees_probe("mark")
    assert "Access Denied" in caplog.text


# ------------------------------------------------------------------ a place that is down


@pytest.mark.parametrize("operations", ["write create", "upload", "read", "info", "list", "remove"])
@pytest.mark.parametrize(
    "error", [ConnectionResetError(), EOFError("lost"), OSError(errno.EBUSY, "SlowDown")]
)
def test_a_save_survives_errors_that_pass(scripted, monkeypatch, operations, error):
    monkeypatch.setattr(file_system, "_FIRST_WAIT_SECONDS", 0.001)
    store = scripted.owned()
    save(store, 1)
    with script(failing(error, operations, times=3)):
        save(store, 2)
        store.remove(["step-00000001"])
    assert store.names() == ["step-00000002"]


@pytest.mark.parametrize("operations", ["write create", "upload", "read", "info"])
def test_a_save_that_fails_for_good_leaves_what_is_complete(scripted, impatient, operations):
    store = scripted.owned()
    save(store, 1)
    with script(failing(ConnectionResetError("reset"), operations)), pytest.raises(OSError, match="reset"):
        save(store, 2)
    assert store.names() == ["step-00000001"]
    save(store, 2)
    assert store.names() == ["step-00000002", "step-00000001"]


@pytest.mark.parametrize("name", [MANIFEST, CHECKSUM])
@pytest.mark.parametrize("arrives", [False, True])
def test_an_abandoned_checkpoint_never_counts_whether_its_last_file_arrived_or_not(
    scripted, impatient, name, arrives
):
    store = scripted.owned()
    save(store, 1)
    attempt = store.begin(2, "mark")

    def before(operation, path):
        if operation == "create" and path.endswith(f"/{name}"):
            if arrives:  # and only the answer is lost
                memory = scripted.store(url=scripted.url.replace("scripted:", "memory:"))
                content = dict(small_files("2"))[name]
                memory._files.write(f"step-00000002/{name}", content)
            raise ConnectionResetError("reset")

    with script(before), pytest.raises(OSError, match="reset"):
        attempt.complete(small_files("2"), {})
    attempt.abandon()
    assert store.names() == ["step-00000001"]
    assert [name for name in store._files.list() if name.startswith("step")] == ["step-00000001"]


def test_data_stay_while_it_is_unknown_whether_the_checkpoint_is_complete(scripted, impatient):
    store = scripted.owned()
    attempt = store.begin(2, "mark")
    (attempt.folder / "model.safetensors").write_bytes(b"123")
    attempt.publish(["model.safetensors"])

    def before(operation, path):
        if operation in ("create", "read", "remove") and "step" in path:
            raise ConnectionResetError("reset")

    with script(before):
        with pytest.raises(OSError, match="reset"):
            attempt.complete(small_files("2"), {"model.safetensors": 3})
        attempt.abandon()
    assert store.files("step-00000002").open("mark/model.safetensors").nbytes == 3


def test_reports_are_awaited_while_the_place_is_down_but_not_for_ever(scripted, impatient, monkeypatch):
    monkeypatch.setattr(remote_attempt, "_LISTING_SECONDS", 0.0)
    attempt = scripted.owned().begin(1, "mark")
    attempt.report("piece-0", b"text")
    with script(failing(ConnectionResetError("reset"), "list")):
        assert attempt.reported("piece-0") is None
    assert attempt.reported("piece-0") == b"text"

    def wait() -> None:
        while attempt.reported("piece-0") is None:
            pass

    with script(failing(ConnectionResetError("reset"), "read list")), pytest.raises(OSError, match="reset"):
        wait()


def test_listing_reports_is_limited(scripted):
    attempt, lists = scripted.owned().begin(1, "mark"), []
    with script(lambda operation, path: lists.append(path) if operation == "list" else None):
        for _ in range(1000):
            assert attempt.reported("piece-0") is None
    assert len(lists) < 10


def test_an_upload_goes_on_while_it_gets_further(scripted, monkeypatch, tmp_path):
    monkeypatch.setattr(file_system, "RETRY_SECONDS", 1e-9)
    monkeypatch.setattr(file_system, "_FIRST_WAIT_SECONDS", 0.001)
    data = bytes(range(256)) * 10_000
    (tmp_path / "local").write_bytes(data)
    files = scripted.store()._files
    reach, attempts = [0], []

    class Failing(RateLimit):
        def wait(self, nbytes):
            reach[0] += 1
            if reach[0] > len(attempts) + 1:
                attempts.append(reach[0])
                reach[0] = 0
                raise ConnectionResetError("one stride further each time")

    upload(files, tmp_path / "local", "file", Failing(None))
    assert files.read("file") == data
    assert len(attempts) == -(-len(data) // (256 << 10)) - 1

    class Stuck(RateLimit):
        def wait(self, nbytes):
            attempts.append(0)
            raise ConnectionResetError("no further")

    attempts.clear()
    with pytest.raises(OSError, match="no further"):
        upload(files, tmp_path / "local", "file", Stuck(None))
    assert len(attempts) == 1


def test_a_file_that_arrives_short_is_uploaded_again(scripted, monkeypatch):
    from scripted_fs import ScriptedFileSystem

    monkeypatch.setattr(file_system, "_FIRST_WAIT_SECONDS", 0.001)
    store, lies = scripted.owned(), [b"short", b"shorter"]
    genuine = ScriptedFileSystem.info

    def info(self, path, **kwargs):
        if path.endswith("model.safetensors") and lies:
            self.store[path].seek(0)
            self.store[path].truncate(len(lies.pop()))
        return genuine(self, path)

    monkeypatch.setattr(ScriptedFileSystem, "info", info)
    attempt = save(store, 1, {"model.safetensors": b"whole weights"})
    file = store.files("step-00000001").open(f"{attempt.prefix}model.safetensors")
    assert (file.nbytes, lies) == (13, [])
    file.close()


@pytest.mark.parametrize("cached", [True, False])
def test_threads_that_read_at_any_boundary_download_each_block_once(memory, tmp_path, monkeypatch, cached):
    data = random.Random(5).randbytes(21 * MIB + 5)
    attempt = save(memory.owned(), 1, {"model.safetensors": data})
    path, downloaded = f"{attempt.prefix}model.safetensors", list[tuple[int, int]]()
    genuine = file_system.FileSystem.read_range

    def read_range(self, path, start, stop):
        downloaded.append((start, stop))
        return genuine(self, path, start, stop)

    monkeypatch.setattr(file_system.FileSystem, "read_range", read_range)
    store = memory.store(reads_cache=cached, cache=tmp_path / "other")
    file = store.files("step-00000001").open(path)

    def read(start):
        target = bytearray(min(3 * MIB, len(data) - start))
        file.read_into(start, memoryview(target))
        return target == data[start : start + len(target)]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(0, len(data), 3 * MIB)))
    file.close()
    assert sorted(downloaded) == [(at, min(at + 4 * MIB, len(data))) for at in range(0, len(data), 4 * MIB)]


def test_a_block_that_cant_be_read_is_read_anew_by_the_next_call(scripted, impatient):
    attempt = save(scripted.owned(), 1)
    file = scripted.store(reads_cache=False).files("step-00000001").open(f"{attempt.prefix}model.safetensors")
    target = bytearray(7)
    with script(failing(ConnectionResetError("reset"), "read")), pytest.raises(OSError, match="reset"):
        file.read_into(0, memoryview(target))
    file.read_into(0, memoryview(target))
    assert target == b"weights"
    file.close()


def test_a_file_that_became_shorter_ends_early(scripted):
    store = scripted.owned()
    attempt = save(store, 1)
    path = f"{attempt.prefix}model.safetensors"
    file = scripted.store(reads_cache=False).files("step-00000001").open(path)
    store._files.write(f"step-00000001/{path}", b"wei")
    with pytest.raises(EOFError, match="it ends before byte 7"):
        file.read_into(0, memoryview(bytearray(5)))


def test_an_interrupted_upload_is_not_completed_with_what_there_is(scripted, impatient, tmp_path):
    closed = []

    class Target:
        def write(self, data):
            raise ConnectionResetError("reset")

        def discard(self):
            closed.append("discarded")

        def close(self):
            closed.append("closed" if not getattr(self, "closed", False) else "no more")

    with pytest.raises(ConnectionResetError), paced_upload._completed_or_discarded(Target()) as target:
        target.write(b"")
    assert closed == ["discarded", "no more"]


# ------------------------------------------------------------------ other runs


def test_a_late_upload_of_an_earlier_run_does_not_mix_into_the_new_one(memory):
    zombie_store = memory.store()
    zombie_store.prepare()
    lock = zombie_store.lock()
    zombie = zombie_store.begin(5, "old")
    (zombie.folder / "model.safetensors").write_bytes(b"old weights")
    lock.close()
    store = memory.owned()
    store.remove_incomplete()
    attempt = store.begin(5, "new")
    (attempt.folder / "model.safetensors").write_bytes(b"new")
    attempt.publish(["model.safetensors"])
    zombie.publish(["model.safetensors"])  # before …
    zombie.report("piece-1", b"old")
    assert attempt.reported("piece-1") is None
    attempt.complete(small_files("new"), {"model.safetensors": 3})
    zombie.publish([])
    zombie.report("piece-2", b"old")  # … and after the new one is complete
    with pytest.raises(OSError, match="another run has taken over"):
        zombie.complete(small_files("old"), {"model.safetensors": 11})
    zombie.abandon()
    files = store.files("step-00000005")
    assert files.read(MANIFEST) == b"new"
    data = bytearray(3)
    files.open("new/model.safetensors").read_into(0, memoryview(data))
    assert data == b"new"


@pytest.mark.parametrize("late", [MANIFEST, CHECKSUM])
@pytest.mark.parametrize("during", [MANIFEST, CHECKSUM])
def test_a_run_that_is_stopped_within_complete_spoils_nothing(scripted, late, during):
    """It has verified its ownership, sleeps, and writes once the new run is in the midst of the same step."""
    store = scripted.owned()
    attempt = store.begin(5, "new")
    old, new = dict(small_files("old")), dict(small_files("new"))

    def before(operation, path):
        if operation == "create" and path.endswith(f"/{during}") and not done:
            done.append(path)
            store._files.create(f"step-00000005/{late}", old[late])

    done: list[str] = []
    with script(before):
        attempt.complete(small_files("new"), {})
    assert done
    files = store.files("step-00000005")
    assert {name: files.read(name) for name in new} == new
    with pytest.raises(FileExistsError):  # later it writes nothing
        store._files.create(f"step-00000005/{late}", old[late])


def test_only_the_owner_completes_a_checkpoint(memory):
    memory.owned()
    with pytest.raises(OSError, match="does not own"):
        save(memory.store(), 1)
    assert memory.store().names() == []


def test_a_checkpoint_that_is_set_aside_twice_keeps_its_files(memory):
    store = memory.owned()
    attempt = save(store, 3)
    for _ in range(2):
        store.set_aside("step-00000003")
    assert store.files("step-00000003.damaged").read(CHECKSUM)
    assert store.files("step-00000003").open(f"{attempt.prefix}model.safetensors").nbytes == 7


# ------------------------------------------------------------------ the rate limit


class VirtualClock:
    """A clock that only sleeping moves, and the bytes written by its time."""

    def __init__(self):
        self.time, self.written = 0.0, []

    def sleep(self, seconds):
        assert seconds > 0
        self.time += seconds

    def limit(self, rate):
        clock = self

        class Recorded(RateLimit):
            def wait(self, nbytes):
                super().wait(nbytes)
                clock.written.append((clock.time, nbytes))

        return Recorded(rate, lambda: clock.time, clock.sleep)


def test_uploads_keep_to_the_rate(memory, tmp_path):
    (tmp_path / "local").write_bytes(bytes(20 * MIB + 5))
    clock, rate = VirtualClock(), 3.0 * MIB
    limit, files = clock.limit(rate), memory.store()._files
    for name in ("a", "b"):
        upload(files, tmp_path / "local", name, limit)
    total = 0
    for time, nbytes in clock.written:
        total += nbytes
        assert total <= rate * time + (256 << 10) + 1
    assert total == 2 * (20 * MIB + 5)
    assert clock.time == pytest.approx(total / rate, rel=0.02)  # and does not wait longer


def test_threads_share_the_rate():
    clock = VirtualClock()
    limit = clock.limit(1e6)
    threads = [threading.Thread(target=lambda: [limit.wait(1000) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clock.time == pytest.approx((2e6 - (256 << 10)) / 1e6, rel=1e-3)


def test_a_store_uploads_at_its_bandwidth(memory, monkeypatch):
    clock = VirtualClock()
    store = memory.owned(bandwidth=1e5)
    store._limit = clock.limit(1e5)
    save(store, 1, {"a": bytes(10**6), "b": bytes(10**6)})
    assert clock.time == pytest.approx((2e6 - (256 << 10)) / 1e5, rel=1e-3)


# ------------------------------------------------------------------ forks


def test_a_forked_process_uses_the_place_too(make_place):
    for kind in ("memory", "sftp"):
        place = make_place(kind)
        store = place.owned()
        save(store, 1)

        def reads(store=store) -> bool:
            return store.names() == ["step-00000001"]

        assert in_child(reads) == 0
        save(store, 2)
        assert store.names() == ["step-00000002", "step-00000001"]


def test_a_forked_process_does_not_give_up_the_place(memory):
    store = memory.store()
    store.prepare()
    lock = store.lock()
    assert in_child(lambda: lock.close() is None) == 0
    lock.verify()
    lock.close()
