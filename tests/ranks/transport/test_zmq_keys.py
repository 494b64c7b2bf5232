"""Authentication over ZeroMQ: recorded workers connect, others are rejected with a reason."""

from __future__ import annotations

import os
import re
import socket
import stat
from dataclasses import replace

import pytest

from paceline.errors import UsageError
from paceline.transport.transport_interface import HUB
from paceline.transport.zmq import HubExchange, SocketSettings, WorkerExchange
from paceline.transport.zmq.curve_keys import HubKeys, WorkerKeys, make_keys
from zmq_ends import LOOPBACK, connect_all, drive, make, poll_for, port_of


@pytest.fixture
def folder(tmp_path):
    make_keys(tmp_path / "keys", "alice")
    return tmp_path / "keys"


@pytest.fixture
def hub(ends, folder):
    return ends(HubExchange, LOOPBACK, "run", keys=HubKeys.read(folder))


def worker_of(ends, hub, folder, name, number=7):
    return ends(WorkerExchange, hub.address, number, "run", keys=WorkerKeys.read(folder / f"{name}.key"))


def test_recorded_workers_connect_and_exchange_envelopes(ends, hub, folder):
    worker = worker_of(ends, hub, folder, "alice")
    connect_all(hub, worker)
    payload = os.urandom(4 << 20)
    assert worker.send(make(7, HUB, 1, payload))
    assert drive([hub], lambda received: received[0])[0][0].payload == payload
    assert hub.send(make(HUB, 7, 1, payload))
    assert drive([worker], lambda received: received[0])[0][0].payload == payload
    assert hub.rejected == {}


def test_messages_are_encrypted(ends, hub, folder):
    secret = b"nobody else may read this " * 40
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as between:
        place = f"tcp://127.0.0.1:{between.getsockname()[1]}"
        worker = ends(WorkerExchange, place, 7, "run", keys=WorkerKeys.read(folder / "alice.key"))
        here, _ = between.accept()
        there = socket.create_connection(("127.0.0.1", port_of(hub.address)))

    def pass_on():
        for one, other in ((here, there), (there, here)):
            one.setblocking(False)
            try:
                passed = one.recv(1 << 20)
            except BlockingIOError:
                continue
            seen.extend(passed)
            other.sendall(passed)

    with here, there:
        drive([hub, worker], lambda _: pass_on() or worker.peers())
        assert worker.send(make(7, HUB, 1, secret))
        received = drive([hub], lambda received: pass_on() or received[0])[0]
    assert received[0].payload == secret
    assert len(seen) > len(secret)
    assert secret[:26] not in seen


def test_a_wrong_or_missing_key_is_rejected_with_a_reason(ends, hub, folder, tmp_path):
    make_keys(tmp_path / "others", "eve")
    eve = WorkerKeys.read(tmp_path / "others" / "eve.key")
    of_another_hub = ends(WorkerExchange, hub.address, 1, keys=eve)
    unknown = ends(WorkerExchange, hub.address, 2, keys=replace(eve, hub=HubKeys.read(folder).public))
    without = ends(WorkerExchange, hub.address, 3)
    nobody = [of_another_hub, unknown, without]
    good = worker_of(ends, hub, folder, "alice")
    received = drive([hub, *nobody, good], lambda _: good.peers() and all(each.problem for each in nobody))[0]
    assert received == []
    assert "its key differs from the one that this worker was given" in of_another_hub.problem
    assert "does not admit worker 'eve'" in unknown.problem
    assert re.search("requires? a key", without.problem)
    for each in nobody:
        assert hub.address in each.problem
        assert not each.send(make(each.me, HUB))
        assert each.peers() == []
        assert not hub.send(make(HUB, each.me))
    connect_all(hub, good)
    assert hub.peers() == [7]
    assert {"unknown key", "invalid handshake"} <= set(hub.rejected)


def test_a_worker_with_keys_does_not_connect_to_a_hub_without(ends, folder):
    hub = ends(HubExchange, LOOPBACK, "run", insecure=True)
    worker = worker_of(ends, hub, folder, "alice")
    drive([hub, worker], lambda _: "is not a hub with keys" in worker.problem)
    assert not worker.send(make(7, HUB))


def test_an_absent_hub_is_not_taken_for_one_that_refuses(ends, folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    worker = ends(WorkerExchange, f"tcp://127.0.0.1:{port}", 7, keys=WorkerKeys.read(folder / "alice.key"))
    drive([worker], lambda _: worker.problem)
    assert worker.problem == f"no hub answers at tcp://127.0.0.1:{port}; retrying"


@pytest.mark.thorough
def test_a_worker_added_while_the_hub_runs_connects(ends, hub, folder, tmp_path):
    make_keys(tmp_path / "spare", "bob")
    bob = replace(WorkerKeys.read(tmp_path / "spare" / "bob.key"), hub=HubKeys.read(folder).public)
    worker = ends(WorkerExchange, hub.address, 8, keys=bob)
    drive([hub, worker], lambda _: "does not admit worker 'bob'" in worker.problem)
    os.replace(tmp_path / "spare" / "workers" / "bob.pub", folder / "workers" / "bob.pub")
    connect_all(hub, worker)
    assert worker.problem == ""


def test_a_removed_worker_is_not_readmitted(ends, hub, folder):
    first = worker_of(ends, hub, folder, "alice")
    connect_all(hub, first)
    (folder / "workers" / "alice.pub").unlink()
    first.close()
    again = worker_of(ends, hub, folder, "alice")
    drive([hub, again], lambda _: "does not admit" in again.problem)


def test_an_unreadable_record_is_reported_and_the_others_are_valid(ends, hub, folder):
    make_keys(folder, "bob")
    (folder / "workers" / "alice.pub").write_text("kind = public\nname = alice\npublic = nonsense\n")
    connect_all(hub, worker_of(ends, hub, folder, "bob", 8))
    assert "alice.pub is damaged" in hub.problem
    with pytest.raises(UsageError, match=r"alice\.pub is damaged"):
        HubExchange(LOOPBACK, "run", keys=HubKeys.read(folder))
    (folder / "workers" / "alice.pub").unlink()
    connect_all(hub, worker_of(ends, hub, folder, "bob", 9))
    assert hub.problem == ""


def test_hubs_in_one_process_authenticate_separately(ends, hub, folder, tmp_path):
    make_keys(tmp_path / "second", "bob")
    second = ends(HubExchange, LOOPBACK, "run", keys=HubKeys.read(tmp_path / "second"))
    connect_all(hub, worker_of(ends, hub, folder, "alice"))
    connect_all(second, worker_of(ends, second, tmp_path / "second", "bob"))
    lost = ends(
        WorkerExchange,
        second.address,
        9,
        keys=replace(WorkerKeys.read(folder / "alice.key"), hub=HubKeys.read(tmp_path / "second").public),
    )
    drive([hub, second, lost], lambda _: "does not admit" in lost.problem)


def test_a_hub_that_others_reach_is_bound_with_keys(ends, folder):
    hub = ends(HubExchange, "tcp://*:*", "run", keys=HubKeys.read(folder))
    place = f"tcp://127.0.0.1:{port_of(hub.address)}"
    connect_all(hub, ends(WorkerExchange, place, 7, keys=WorkerKeys.read(folder / "alice.key")))


def paced_sockets(port, rate):
    """Return how many of this process's connections of a port the kernel holds to a rate."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
        except OSError:  # the listing's own
            continue
        each = socket.socket(fileno=os.dup(int(name)))
        with each:
            if each.family != socket.AF_INET or each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            ends_at = {each.getsockname()[1], each.getpeername()[1]}
            pacing_rate = int.from_bytes(each.getsockopt(socket.SOL_SOCKET, 47, 4), "little")
            found += port in ends_at and pacing_rate == rate
    return found


def test_connections_are_held_to_the_rate_at_both_ends(ends, folder):
    hub = ends(HubExchange, LOOPBACK, "run", insecure=True, settings=SocketSettings(rate=3e6))
    other = ends(HubExchange, LOOPBACK, "run", insecure=True)
    worker = ends(WorkerExchange, hub.address, 7, settings=SocketSettings(rate=4e6))
    plain = ends(WorkerExchange, other.address, 8)
    connect_all(hub, worker)
    connect_all(other, plain)
    poll_for([hub, worker], 0.05)
    for rate in (3_000_000, 4_000_000):
        assert paced_sockets(port_of(hub.address), rate) == 1
        assert paced_sockets(port_of(other.address), rate) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"rate": 0},
        {"rate": float("nan")},
        {"rate": float("inf")},
        {"peer_timeout": -1.0},
        {"peer_timeout": 1e9},
        {"queue_length": 0},
        {"queue_length": 2.5},
        {"queue_length": 10**12},
        {"frame_nbytes": None},
        {"frame_nbytes": True},
    ],
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        SocketSettings(**wrong)


def test_settings_at_their_ends_are_taken(ends):
    for each in (SocketSettings(1 << 30, 1e12, 6000.0, 10_000), SocketSettings(1, 1.0, 1e-4, 1)):
        ends(HubExchange, LOOPBACK, "run", settings=each, insecure=True)
        ends(WorkerExchange, "tcp://127.0.0.1:7000", 7, settings=each)


def test_a_hub_whose_name_does_not_resolve_is_absent(ends):
    worker = ends(WorkerExchange, "tcp://no-such-host.invalid:7000", 7)
    drive([worker], lambda _: "no hub answers" in worker.problem)
