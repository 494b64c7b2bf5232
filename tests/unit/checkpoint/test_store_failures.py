"""Stores that fail while a checkpoint is written: S3 behind a proxy, an SFTP server that is killed, ranks that are.

Whatever happens, each checkpoint that is listed is intact, the newest one from before is listed, and once the store is
back, saving works.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from checkpoint_places import Place, save, small_files
from faulty_proxy import FaultyProxy
from forked_child import start
from paceline._core.units import MIB
from paceline.checkpoint.format.manifest import MANIFEST
from paceline.checkpoint.storage import file_system, remote_attempt, remote_folder
from paceline.checkpoint.storage.paced_upload import RateLimit
from paceline.errors import UsageError
from s3_server import S3Server
from sftp_server import SftpServer

NBYTES = 9 * MIB  # two parts of an upload, three blocks of a read
PATTERN = os.urandom(NBYTES)


def content(step: int) -> bytes:
    return step.to_bytes(8, "little") + PATTERN[8:]


def save_step(store, step: int, mark: str = "mark") -> None:
    save(store, step, {"model.safetensors": content(step), "state.safetensors": b"%d" % step}, mark)


def intact_steps(place: Place) -> list[int]:
    """Return the steps of all checkpoints, once each is found to be intact."""
    store, steps = place.store(reads_cache=False), list[int]()
    for name in store.names():
        step, files = int(name.removeprefix("step-")), store.files(name)
        mark = files.read(MANIFEST).decode().removeprefix(f"step {step} ").rstrip("/")
        assert files.read(MANIFEST) == small_files(f"step {step} {mark}/")[0][1]
        assert files.read(f"{mark}/state.safetensors") == b"%d" % step
        found = bytearray(NBYTES)
        file = files.open(f"{mark}/model.safetensors")
        file.read_into(0, memoryview(found))
        file.close()
        assert found == content(step)
        steps.append(step)
    return steps


class AtByte(RateLimit):
    """Calls `act` once, after this many bytes."""

    def __init__(self, nbytes: int, act: Callable[[], object]) -> None:
        super().__init__(None)
        self._left, self._act = nbytes, act

    def wait(self, nbytes: int) -> None:
        before, self._left = self._left, self._left - nbytes
        if before > 0 >= self._left:
            self._act()


@pytest.fixture
def quick_retries(monkeypatch):
    monkeypatch.setattr(file_system, "_FIRST_WAIT_SECONDS", 0.1)


@contextmanager
def giving_up() -> Iterator[None]:
    """Give up after a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_system, "RETRY_SECONDS", 1.0)
        patch.setattr(file_system, "_FIRST_WAIT_SECONDS", 0.05)
        patch.setattr(remote_attempt, "_ABANDON_SECONDS", 0.5)
        patch.setattr(remote_folder, "_PREPARE_SECONDS", 0.5)
        yield


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3.port) as made:
        yield made


@pytest.fixture
def behind(s3: S3Server, proxy: FaultyProxy, make_place, monkeypatch) -> Place:
    """A place on S3, behind the proxy; botocore waits for an answer for 2 s."""
    monkeypatch.setattr(file_system, "_CALL_SECONDS", 5.0)
    place = make_place("s3")
    config = {"read_timeout": 2, "connect_timeout": 2}
    through = replace(place, options={**s3.options(proxy.port), "config_kwargs": config})
    place.closers = through.closers
    return through


def direct(place: Place, s3: S3Server) -> Place:
    return replace(place, options=s3.options())


def refuse(proxy):
    proxy.refuse()


def cut(proxy):
    proxy.cut()


def answer_503(proxy):
    proxy.status = 503
    proxy.cut()


def answer_500(proxy):
    proxy.status = 500
    proxy.cut()


def stall(proxy):
    proxy.is_stalled = True


def slow(proxy):
    proxy.seconds_per_chunk = 0.01


def mend(proxy):
    proxy.status, proxy.is_stalled, proxy.seconds_per_chunk, proxy.cut_after = 0, False, 0.0, None
    proxy.accept()


FAULTS = [refuse, cut, answer_503, answer_500, stall, slow]


def test_large_files_are_uploaded_in_parts(make_place):
    place = make_place("s3")
    store = place.owned()
    save_step(store, 1)
    assert store._files.info("step-00000001/mark/model.safetensors").version.split('"')[1].endswith("-2")
    assert intact_steps(place) == [1]


@pytest.mark.sweep
@pytest.mark.parametrize("fault", FAULTS)
def test_a_save_survives_a_store_that_fails_for_a_moment(behind, s3, proxy, quick_retries, fault):
    store = behind.owned()
    save_step(store, 1)
    timers = []

    def fail():
        fault(proxy)
        timers.append(threading.Timer(4, mend, [proxy]))
        timers[0].start()

    store._limit = AtByte(NBYTES - MIB // 2, fail)  # the first part is there
    numbers = random.getstate()
    save_step(store, 2)
    assert random.getstate() == numbers  # of the program, which saves them
    timers[0].join()
    assert intact_steps(direct(behind, s3)) == [2, 1]


@pytest.mark.sweep
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in (cut, slow)])
def test_a_save_to_a_store_that_stays_away_fails_and_a_later_one_succeeds(behind, s3, proxy, fault):
    store = behind.owned()
    save_step(store, 1)
    store._limit = AtByte(NBYTES - MIB // 2, lambda: fault(proxy))
    with giving_up():
        with pytest.raises(OSError, match=r"s3://.*/step-00000002/"):
            save_step(store, 2)
        store._attempt.abandon()
    assert intact_steps(direct(behind, s3)) == [1]
    mend(proxy)
    save_step(store, 3)
    assert intact_steps(direct(behind, s3)) == [3, 1]
    save_step(store, 2)
    store.remove_incomplete()
    assert intact_steps(direct(behind, s3)) == [3, 2, 1]


@pytest.mark.sweep
@pytest.mark.parametrize("place_of_cut", range(8))
def test_connections_cut_at_any_byte_damage_nothing(behind, s3, proxy, monkeypatch, place_of_cut):
    """Every call fails at its first error, also those that complete the checkpoint; half are left as they are."""
    store = behind.owned()
    began = proxy.sent
    save_step(store, 1)
    nbytes = proxy.sent - began
    monkeypatch.setattr(file_system, "RETRY_SECONDS", 0.0)
    generator = random.Random(place_of_cut)
    for _ in range(3):
        # Half of the cuts are among the last bytes, which complete it.
        proxy.cut_after = generator.choice(
            [generator.randrange(nbytes), nbytes - generator.randrange(20_000)]
        )
        before = intact_steps(direct(behind, s3))
        step = before[0] + 1
        try:
            save_step(store, step)
        except OSError:
            proxy.cut_after = None
            if generator.random() < 0.5:
                store._attempt.abandon()
        proxy.cut_after = None
        assert set(before) <= set(intact_steps(direct(behind, s3))) <= {*before, step}
    monkeypatch.undo()
    save_step(store, 100)
    assert intact_steps(direct(behind, s3))[0] == 100


def test_a_store_that_forbids_fails_at_once(behind, s3, proxy):
    store = behind.owned()
    save_step(store, 1)
    proxy.status = 403
    proxy.cut()
    calls = len(proxy.requests)
    with pytest.raises(UsageError, match="AccessDenied by the proxy") as caught:
        behind.store().prepare()
    assert "credentials" in caught.value.remedy
    assert len(proxy.requests) == calls + 1
    with pytest.raises(PermissionError):
        save_step(store, 2)
    mend(proxy)
    assert intact_steps(behind) == [1]


def test_a_bucket_that_is_missing_is_named_and_not_made(behind, s3):
    store = behind.store(url="s3://no-such-bucket/run")
    with pytest.raises(UsageError, match=r"s3://no-such-bucket/run.*bucket does not exist") as caught:
        store.prepare()
    assert "make the bucket first" in caught.value.remedy
    with pytest.raises(UsageError, match="bucket does not exist"):
        store.prepare()


def test_reading_survives_a_store_that_fails_for_a_moment(behind, proxy, quick_retries):
    save_step(behind.owned(), 1)
    store = behind.store(reads_cache=False)
    file = store.files("step-00000001").open("mark/model.safetensors")
    for fault in (refuse, answer_503, stall):
        fault(proxy)
        timer = threading.Timer(3, mend, [proxy])
        timer.start()
        found = bytearray(NBYTES)
        file.read_into(0, memoryview(found))
        timer.join()
        assert found == content(1)
    file.close()
    assert store.names() == ["step-00000001"]


def test_a_store_that_is_down_has_no_fewer_checkpoints(behind, proxy):
    store = behind.owned()
    save_step(store, 1)
    proxy.refuse()
    with giving_up():
        with pytest.raises(OSError, match="s3://"):
            store.names()
        with pytest.raises(UsageError, match="s3://"):
            behind.store().prepare()
    mend(proxy)
    assert store.names() == ["step-00000001"]


def test_a_forked_process_reads_and_the_parent_goes_on(make_place):
    place = make_place("s3")
    store = place.owned()
    save_step(store, 1)

    def reads() -> bool:
        both = [1], [2, 1]  # the parent saves meanwhile
        return [int(name[5:]) for name in store.names()] in both and intact_steps(place) in both

    pid = start(reads)
    save_step(store, 2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert intact_steps(place) == [2, 1]


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["file", "sftp", "s3"])
def test_ranks_killed_while_they_save_damage_nothing(make_place, kind):
    place, generator = make_place(kind), random.Random(kind)
    place.store().prepare()

    def saves_for_ever() -> bool:
        store = place.store()
        lock = store.lock()
        store.remove_incomplete()
        step = max((int(name.removeprefix("step-")) for name in store.names()), default=0)
        while lock is not None:
            step += 1
            save_step(store, step, mark=f"{os.getpid():012x}")
            store.remove(store.names()[2:])
        return False

    newest = 0
    for _ in range(4):
        pid = start(saves_for_ever)
        time.sleep(generator.uniform(0.5, 2.5))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        steps = intact_steps(place)
        assert steps[:1] >= [newest] or not newest
        newest = max(steps, default=0)
    store = place.owned()
    store.remove_incomplete()
    save_step(store, newest + 1)
    assert intact_steps(place)[0] == newest + 1
    left = [name for name in store._files.list() if name.startswith("step-")]
    assert sorted(left, reverse=True) == store.names()


_PROGRAM = """
import sys, threading, time
from pathlib import Path
from checkpoint_places import Place, save

place = Place(sys.argv[1], {"key": "key", "secret": "secret", "endpoint_url": sys.argv[2]}, Path(sys.argv[3]))
store = place.store(bandwidth=0.7e6)  # for 15 s: names are resolved anew after 10
store.prepare()
lock = store.lock()

def work():
    save(store, 1, {"a": bytes(9 << 20), "b": bytes(1 << 20)})
    lock.close()

threading.Thread(target=work).start()
time.sleep(0.5)
"""


@pytest.mark.thorough
def test_a_program_that_ends_without_waiting_completes_its_last_checkpoint(make_place, s3, tmp_path):
    place = make_place("s3")
    endpoint = f"http://localhost:{s3.port}"  # which is resolved by a thread of an executor
    subprocess.run(
        [sys.executable, "-c", _PROGRAM, place.url, endpoint, str(tmp_path / "cache")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        timeout=120,
    )
    assert place.store().names() == ["step-00000001"]


# ------------------------------------------------------------------ SFTP


@pytest.fixture
def mortal(tmp_path) -> Iterator[SftpServer]:
    pytest.importorskip("sshfs", reason="sshfs is not installed")
    (tmp_path / "mortal").mkdir()
    server = SftpServer(tmp_path / "mortal")
    yield server
    server.close()


def test_an_sftp_server_that_is_killed_and_started_again(make_place, mortal, quick_retries):
    place = replace(make_place("sftp"), url=mortal.url)
    store = place.store()
    store.prepare()
    lock = store.lock()
    save_step(store, 1)
    timers = []

    def fail():
        mortal.kill()
        timers.append(threading.Timer(1.0, mortal.start))
        timers[0].start()

    store._limit = AtByte(NBYTES // 2, fail)
    save_step(store, 2)
    timers[0].join()
    assert intact_steps(place) == [2, 1]
    lock.close()


def test_an_sftp_server_that_is_killed_and_stays_away(make_place, mortal):
    place = replace(make_place("sftp"), url=mortal.url)
    store = place.store()
    store.prepare()
    lock = store.lock()
    save_step(store, 1)
    store._limit = AtByte(NBYTES // 2, mortal.kill)
    with giving_up():
        with pytest.raises(OSError, match="step-00000002"):
            save_step(store, 2)
        store._attempt.abandon()
    mortal.start()
    assert intact_steps(place) == [1]
    save_step(store, 2)
    assert intact_steps(place) == [2, 1]
    lock.close()
