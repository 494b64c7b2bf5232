"""Ownership of a place without locks: who may take over from whom, and when a run finds out that it lost it."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest

from checkpoint_places import save, small_files
from forked_child import start
from paceline.checkpoint.storage import run_ownership
from paceline.checkpoint.storage.run_ownership import HEARTBEAT, OWNER, RunOwnership
from paceline.errors import CheckpointError, UsageError
from scripted_fs import script


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    seconds = {"_BEAT_SECONDS": 0.05, "_STALE_SECONDS": 5.0, "_WAIT_SECONDS": 0.5, "_POLL_SECONDS": 0.05}
    for name, value in seconds.items():
        monkeypatch.setattr(run_ownership, name, value)


@pytest.fixture
def soon_stale(monkeypatch):
    """A heartbeat that stands still is given up soon, for tests in which none beats."""
    monkeypatch.setattr(run_ownership, "_STALE_SECONDS", 0.3)


@pytest.fixture
def on_host(monkeypatch):
    """`with on_host("a"):` is on another host; what runs there is not seen from others."""

    @contextmanager
    def on(host):
        with monkeypatch.context() as patch:
            patch.setattr(run_ownership, "host_key", lambda: host)
            yield

    return on


def owners(store):
    return sorted(name for name in store._files.list() if name == OWNER or name.startswith(HEARTBEAT))


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "paceline-checkpoint-owner"]


def test_a_run_that_ends_leaves_nothing(memory):
    store = memory.store()
    lock = store.lock()
    assert owners(store) == sorted([OWNER, lock.heartbeat])
    lock.close()
    assert owners(store) == []
    assert threads() == []
    with pytest.raises(OSError, match=r"another run has taken over .*: unknown"):
        lock.verify()


def test_a_run_that_is_forgotten_gives_up_the_place(memory):
    store = memory.store()
    lock = store.lock()
    [thread] = threads()
    del lock
    store._ownership = None
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()
    assert owners(store) == []


def test_a_live_run_on_another_host_is_named(memory, on_host):
    with on_host("a"):
        lock = memory.store().lock()
    began = time.monotonic()
    with (
        on_host("b"),
        pytest.raises(CheckpointError, match=r"in use by another run: process \d+ on .*, since 2") as caught,
    ):
        memory.store().lock()
    assert time.monotonic() - began >= run_ownership._WAIT_SECONDS
    assert "end that run first" in caught.value.remedy
    assert owners(memory.store()) == sorted([OWNER, lock.heartbeat])
    lock.verify()
    lock.close()


def test_a_live_run_on_another_host_that_ends_meanwhile_is_followed(memory, on_host):
    with on_host("a"):
        lock = memory.store().lock()
    timer = threading.Timer(0.3, lock.close)
    timer.start()
    with on_host("b"):
        following = memory.store().lock()
    timer.join()
    following.verify()
    following.close()


def test_a_run_whose_heartbeat_stands_still_loses_the_place(memory, on_host, soon_stale, monkeypatch):
    with on_host("a"):
        old_store = memory.store()
        with monkeypatch.context() as patch:
            patch.setattr(run_ownership, "_BEAT_SECONDS", 1e6)
            old = old_store.lock()
    began = time.monotonic()
    with on_host("b"):
        store = memory.store()
        new = store.lock()
    assert time.monotonic() - began >= run_ownership._STALE_SECONDS
    new.verify()
    with pytest.raises(OSError, match=r"another run has taken over .*: process \d+ on"):
        save(old_store, 1)
    save(store, 1)
    old.close()  # does not remove the new owner
    new.verify()
    store.remove_incomplete()
    assert owners(store) == sorted([OWNER, new.heartbeat])
    new.close()


def test_a_run_that_lost_the_place_stops_its_heartbeat(memory, on_host):
    with on_host("a"):
        old = memory.store().lock()
    store = memory.store()
    store._files.remove(OWNER)
    old._thread.join(20)
    assert not old._thread.is_alive()
    assert owners(store) == []


def test_a_store_that_is_down_for_a_moment_costs_no_ownership(memory, on_host):
    place = memory.url.replace("memory:", "scripted:")
    with on_host("a"):
        lock = memory.store(url=place).lock()
    beats = []

    def before(operation, path):
        if operation == "write" and HEARTBEAT in path and len(beats) < 2:
            beats.append(path)
            raise ConnectionResetError

    with script(before), on_host("b"), pytest.raises(CheckpointError, match="in use by another run"):
        memory.store().lock()
    assert len(beats) == 2
    lock.verify()
    lock.close()


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"id": 1}'])
def test_an_owner_that_cant_be_read_is_no_obstacle_for_ever(memory, soon_stale, text):
    store = memory.store()
    store._files.write(OWNER, text)
    lock = store.lock()
    lock.verify()
    lock.close()


def test_of_runs_that_begin_at_the_same_time_one_owns_the_place(memory, on_host, monkeypatch):
    hosts = threading.local()
    monkeypatch.setattr(run_ownership, "host_key", lambda: getattr(hosts, "name", "here"))
    barrier, locks, refused = threading.Barrier(4), list[RunOwnership](), list[str]()

    def begin(name):
        hosts.name = name
        barrier.wait()
        try:
            locks.append(memory.store().lock())
        except CheckpointError as error:
            refused.append(str(error))

    workers = [threading.Thread(target=begin, args=(name,)) for name in "abcd"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert (len(locks), len(refused)) == (1, 3)
    locks[0].verify()
    assert owners(memory.store()) == sorted([OWNER, locks[0].heartbeat])
    locks[0].close()


def test_another_run_that_takes_over_between_writing_and_reading_wins(memory, soon_stale):
    place = memory.url.replace("memory:", "scripted:")
    store, other = memory.store(url=place), memory.store()
    overwritten = []

    def before(operation, path):
        if operation == "read" and path.endswith(OWNER) and not overwritten and other._files.exists(OWNER):
            overwritten.append(path)
            other._files.write(OWNER, b"another")

    with script(before):
        lock = store.lock()  # once that other one stood still
    assert overwritten
    lock.verify()
    lock.close()


def test_a_place_that_cant_be_written_has_no_owner(memory, monkeypatch):
    def before(operation, path):
        if operation == "create":
            raise PermissionError("Access Denied")

    store = memory.store(url=memory.url.replace("memory:", "scripted:"))
    with script(before), pytest.raises(UsageError, match="Access Denied"):
        store.lock()
    assert owners(store) == []


# ------------------------------------------------------------------ processes


@pytest.fixture
def owning_process(make_place, tmp_path):
    """A process that owns a place, and its number."""
    place = make_place("file")
    place.store().prepare()
    sign = tmp_path / "owns"

    def own() -> bool:
        lock = place.store().lock()
        sign.touch()
        time.sleep(100)
        return lock is not None

    pid = start(own)
    deadline = time.monotonic() + 30
    while not sign.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield place, pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_run_that_was_killed_on_this_host_is_followed_at_once(owning_process, monkeypatch):
    place, pid = owning_process
    monkeypatch.setattr(run_ownership, "_STALE_SECONDS", 1e6)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # a zombie: its parent has not asked yet
    store = place.owned()
    save(store, 1)
    assert store.names() == ["step-00000001"]


def test_a_run_that_lives_on_this_host_is_not_robbed(owning_process):
    place, pid = owning_process
    with pytest.raises(CheckpointError, match=f"in use by another run: process {pid} on"):
        place.store().lock()


def test_a_run_that_is_stopped_and_continues_completes_nothing(make_place, monkeypatch):
    """Its process sleeps within a save, another host's run takes over, then it wakes up."""
    place = make_place("file")
    place.store().prepare()

    def run() -> bool:
        run_ownership.host_key = lambda: "another host"
        store = place.store()
        store.lock()
        save(store, 1)
        attempt = store.begin(2, "old")
        (attempt.folder / "model.safetensors").write_bytes(b"old")
        attempt.publish(["model.safetensors"])
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            attempt.complete(small_files("old"), {"model.safetensors": 3})
        except OSError as error:
            return "another run has taken over" in str(error)
        return False

    pid = start(run)
    _, status = os.waitpid(pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    monkeypatch.setattr(run_ownership, "_STALE_SECONDS", 0.3)
    store = place.owned()
    store.remove_incomplete()
    attempt = save(store, 2, {"model.safetensors": b"new"})
    os.kill(pid, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert store.names() == ["step-00000002", "step-00000001"]
    assert store.files("step-00000002").read("manifest.json") == f"step 2 {attempt.prefix}".encode()
