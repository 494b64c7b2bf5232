"""A hub over real sockets keeps out strangers, foreign numbers, withdrawn keys and other users, and workers go on."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import stat
import time
from dataclasses import replace

import pytest
import zmq

from paceline._core.job_key import JobKey
from paceline.errors import UsageError
from paceline.transport.transport_interface import HUB
from paceline.transport.zmq import HubExchange, WorkerExchange, connection_guard
from paceline.transport.zmq.curve_keys import HubKeys, WorkerKeys, make_keys
from zmq_ends import (
    LOOPBACK,
    connect_all,
    drive,
    frame,
    greeting,
    handshake,
    make,
    poll_for,
    port_of,
    wire_parts,
)

OTHER_USER = 65534


@pytest.fixture
def folder(tmp_path):
    for name in ("alice", "bob"):
        make_keys(tmp_path / "keys", name)
    return tmp_path / "keys"


@pytest.fixture
def hub(ends, folder):
    return ends(HubExchange, LOOPBACK, "run", keys=HubKeys.read(folder))


@pytest.fixture
def worker_of(ends, hub, folder):
    def make_worker(name, number, at=None):
        return ends(
            WorkerExchange, (at or hub).address, number, "run", keys=WorkerKeys.read(folder / f"{name}.key")
        )

    return make_worker


def exchanges(hub, worker, sequence):
    """Return once an envelope went both ways."""
    assert worker.send(make(worker.me, HUB, sequence))
    drive([hub], lambda received: any(each.header.source == worker.me for each in received[0]))
    assert hub.send(make(HUB, worker.me, sequence))
    drive([worker], lambda received: received[0])


# --- numbers and keys


def test_a_number_belongs_to_the_first_key_that_uses_it(hub, worker_of, caplog):
    alice, bob = worker_of("alice", 7), worker_of("bob", 7)
    connect_all(hub, alice)
    drive([hub, bob], lambda _: bob.peers())
    assert bob.send(make(7, HUB, 0, b"as alice"))
    received, *_ = drive([hub, alice, bob], lambda _: "belongs to the key 'alice'" in bob.problem)
    assert received == []
    assert hub.refused == {"number of another key": 1}
    assert "key 'bob' sent messages of 7, a worker of key 'alice'" in hub.problem
    assert "key 'bob' sent messages of 7" in caplog.text
    exchanges(hub, alice, 1)
    assert bob.poll() == [], "answers go to the owner"


def test_another_worker_s_connection_is_not_taken_over(hub, worker_of, folder):
    """The identity that workers used to have followed from their number."""
    alice = worker_of("alice", 7)
    connect_all(hub, alice)
    context, keys = zmq.Context(), WorkerKeys.read(folder / "bob.key")
    thief = context.socket(zmq.DEALER)
    try:
        thief.curve_serverkey, thief.curve_publickey, thief.curve_secretkey = (
            each.encode() for each in (keys.hub, keys.public, keys.secret)
        )
        thief.setsockopt(zmq.ROUTING_ID, (7 | 1 << 63).to_bytes(8, "big"))
        thief.connect(hub.address)
        thief.send_multipart(wire_parts(make(7, HUB, 0)))
        drive([hub, alice], lambda _: hub.refused["number of another key"])
        assert alice.peers() == [HUB]
        exchanges(hub, alice, 1)
    finally:
        thief.close(0)
        context.term()


def test_a_key_may_have_several_numbers_and_a_number_several_connections(hub, worker_of):
    first, second = worker_of("alice", 7), worker_of("alice", 8)
    connect_all(hub, first, second)
    first.close()
    again = worker_of("alice", 7)
    drive([hub, again], lambda _: again.peers())
    exchanges(hub, again, 1)
    exchanges(hub, second, 1)
    assert hub.refused == {}


def test_owners_known_from_an_earlier_hub_keep_their_numbers(hub, worker_of, folder):
    hub.bind_keys({7: WorkerKeys.read(folder / "alice.key").public, 9: ""})
    bob = worker_of("bob", 7)
    drive([hub, bob], lambda _: bob.peers())
    bob.send(make(7, HUB))
    drive([hub, bob], lambda _: "belongs to the key 'alice'" in bob.problem)
    connect_all(hub, worker_of("alice", 7), worker_of("bob", 9))


# --- withdrawn keys


def test_a_withdrawn_key_loses_its_connections_and_others_stay(hub, worker_of, folder):
    alice, bob, silent = worker_of("alice", 7), worker_of("bob", 8), worker_of("alice", 9)
    connect_all(hub, alice, bob)
    drive([hub, silent], lambda _: silent.peers())
    (folder / "workers" / "alice.pub").unlink()
    drive(
        [hub, alice, bob, silent], lambda _: all("does not admit" in each.problem for each in (alice, silent))
    )
    assert not alice.peers()
    assert hub.rejected["withdrawn key"] == 1
    assert bob.peers() == [HUB]
    exchanges(hub, bob, 1)


def test_messages_of_a_withdrawn_key_are_refused_before_its_connection_ends(
    hub, worker_of, folder, monkeypatch
):
    monkeypatch.setattr(connection_guard.ConnectionGuard, "_end", lambda *_: None)
    alice = worker_of("alice", 7)
    connect_all(hub, alice)
    (folder / "workers" / "alice.pub").unlink()
    sequence = 1

    def refused(_):
        nonlocal sequence
        sequence += alice.send(make(7, HUB, sequence))
        return hub.refused["withdrawn key"]

    drive([hub], refused)
    assert alice.send(make(7, HUB, sequence))
    assert poll_for([hub], 0.2)[0] == []


def test_a_withdrawn_key_that_is_recorded_again_is_admitted(hub, worker_of, folder):
    alice, record = worker_of("alice", 7), folder / "workers" / "alice.pub"
    connect_all(hub, alice)
    content = record.read_bytes()
    record.unlink()
    drive([hub, alice], lambda _: "does not admit" in alice.problem)
    record.write_bytes(content)
    drive([hub, alice], lambda _: alice.peers())
    exchanges(hub, alice, 1)


# --- the key of a job


def test_hub_and_workers_of_a_job_derive_their_keys(ends):
    job = JobKey.generate()
    hub = ends(HubExchange, LOOPBACK, "run", keys=HubKeys.of_job(job))
    workers = [ends(WorkerExchange, hub.address, number, keys=WorkerKeys.of_job(job)) for number in (7, 8)]
    connect_all(hub, *workers)
    other = WorkerKeys.of_job(JobKey.generate())
    stranger = ends(WorkerExchange, hub.address, 9, keys=other)
    knows_the_hub = ends(WorkerExchange, hub.address, 10, keys=replace(other, hub=HubKeys.of_job(job).public))
    drive([hub, stranger, knows_the_hub], lambda _: stranger.problem and knows_the_hub.problem)
    assert "its key differs" in stranger.problem
    assert "does not admit worker 'job key'" in knows_the_hub.problem
    assert not stranger.peers()
    exchanges(hub, workers[0], 1)


# --- Unix sockets


def test_a_unix_socket_is_its_user_s_alone(ends, tmp_path):
    umask = os.umask(0o022)
    try:
        hub = ends(HubExchange, f"ipc://{tmp_path}/new/hub", "run")
        assert os.umask(0o022) == 0o022, "as before"
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "new" / "hub").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    connect_all(hub, ends(WorkerExchange, hub.address, 7, "run"))


def test_a_unix_socket_is_not_taken_from_a_running_hub_and_is_removed_at_the_end(ends, tmp_path):
    hub = ends(HubExchange, f"ipc://{tmp_path}/hub", "run")
    with pytest.raises(UsageError, match="Address already in use"):
        HubExchange(hub.address, "run")
    connect_all(hub, ends(WorkerExchange, hub.address, 7, "run"))
    hub.close()
    assert not (tmp_path / "hub").exists()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(f"{tmp_path}/hub")
    connect_all(ends(HubExchange, hub.address, "run"), ends(WorkerExchange, hub.address, 7, "run"))


def test_a_folder_in_which_others_replace_the_socket_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(UsageError, match="others can write to"):
        HubExchange(f"ipc://{tmp_path}/hub", "run")


def connect_as_another_user(path, answers):
    os.setgroups([])
    os.setgid(OTHER_USER)
    os.setuid(OTHER_USER)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(20)
        try:
            stranger.connect(path)
            stranger.sendall(greeting())
            answers.put(stranger.recv(100))
        except OSError as error:
            answers.put(type(error).__name__)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("open_to_all", [False, True])
def test_another_user_does_not_connect_to_a_unix_socket(ends, open_to_all):
    with contextlib.ExitStack() as stack:
        place = f"/tmp/paceline-hub-test-{os.getpid()}-{time.monotonic_ns()}"  # other users can enter it
        os.mkdir(place, 0o711)
        stack.callback(os.rmdir, place)
        hub = ends(HubExchange, f"ipc://{place}/hub", "run")
        stack.callback(hub.close)
        if open_to_all:
            os.chmod(f"{place}/hub", 0o777)
        fork = multiprocessing.get_context("fork")
        answers = fork.Queue()
        child = fork.Process(target=connect_as_another_user, args=(f"{place}/hub", answers))
        child.start()
        answer = answers.get(timeout=30)
        child.join()
        assert answer in (
            (b"", "ConnectionResetError", "BrokenPipeError") if open_to_all else ("PermissionError",)
        )
        connect_all(hub, ends(WorkerExchange, hub.address, 7, "run"))


# --- what strangers can occupy


def is_open(raw):
    """Return whether the other end has not ended a connection."""
    raw.setblocking(False)
    try:
        while raw.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def test_idle_strangers_are_limited_and_workers_connect(hub, worker_of, monkeypatch):
    monkeypatch.setattr(connection_guard, "MAX_STRANGERS", 8)
    monkeypatch.setattr(connection_guard, "_HANDSHAKE_SECONDS", 0.1)
    alice = worker_of("alice", 7)
    connect_all(hub, alice)
    with contextlib.ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port_of(hub.address))))
            for _ in range(60)
        ]
        for raw in idle[::2]:
            raw.sendall(greeting(b"CURVE"))
        drive([hub, alice], lambda _: sum(map(is_open, idle)) <= 8)
        exchanges(hub, alice, 1)
        connect_all(hub, worker_of("bob", 8))
        assert hub.rejected["no handshake"] >= 52


def test_an_oversized_handshake_ends_its_connection(hub):
    with socket.create_connection(("127.0.0.1", port_of(hub.address))) as raw:
        raw.sendall(greeting(b"CURVE") + frame(b"\x05HELLO", command=True, size=3 << 20) + bytes(100_000))
        drive([hub], lambda _: not is_open(raw))
    assert hub.rejected["oversized handshake"] == 1


def test_an_unfinished_message_is_limited(ends, monkeypatch):
    monkeypatch.setattr(connection_guard, "_UNFINISHED_NBYTES", -95 << 20)
    hub = ends(HubExchange, LOOPBACK, "run", insecure=True)
    worker = ends(WorkerExchange, hub.address, 7)
    connect_all(hub, worker)
    with socket.create_connection(("127.0.0.1", port_of(hub.address))) as raw:
        handshake(raw, b"", hub.poll)
        part = frame(bytes(1 << 20), more=True)

        def ended(_):
            raw.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                try:
                    raw.send(part)
                except ConnectionError:
                    return True
            return not is_open(raw)

        drive([hub], ended)
    assert hub.rejected["unfinished message"] == 1
    for sequence in range(1, 4):
        payload = bytes(3 << 20)
        assert worker.send(make(7, HUB, sequence, payload))
        drive([hub], lambda received: received[0])
    poll_for([hub], 1.2)
    assert worker.peers() == [HUB], "whole messages may be as many as it likes"


def test_workers_are_admitted_while_the_hub_does_something_else(hub, worker_of):
    alice = worker_of("alice", 7)
    drive([alice], lambda _: alice.peers())
    assert alice.send(make(7, HUB))


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_thousand_workers_and_a_thousand_strangers(hub, folder):
    keys = WorkerKeys.read(folder / "alice.key")
    context = zmq.Context(io_threads=1)
    context.set(zmq.MAX_SOCKETS, 2000)
    workers, numbers = {}, range(1, 1001)
    with contextlib.ExitStack() as stack:
        stack.callback(context.destroy, 0)
        idle = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port_of(hub.address))))
            for _ in range(1000)
        ]
        for number in numbers:
            worker = workers[number] = context.socket(zmq.DEALER)
            worker.curve_serverkey, worker.curve_publickey, worker.curve_secretkey = (
                each.encode() for each in (keys.hub, keys.public, keys.secret)
            )
            worker.connect(hub.address)
            worker.send_multipart(wire_parts(make(number, HUB)))
        heard = set()

        def all_heard(received):
            heard.update(each.header.source for each in received[0])
            received[0].clear()
            return heard == set(numbers)

        drive([hub], all_heard, seconds=200)
        drive([hub], lambda _: sum(map(is_open, idle)) <= connection_guard.MAX_STRANGERS)
        for number in numbers:
            assert hub.send(make(HUB, number))
        for worker in workers.values():
            assert worker.poll(20_000)
        assert len(hub.peers()) == 1000
        assert not hub.rejected["withdrawn key"]
