"""Hub and workers over ZeroMQ: delivery, back-pressure per peer, and reconnection."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections import Counter
from dataclasses import replace

import psutil
import pytest

from paceline.errors import UsageError
from paceline.transport.paced_queue import PacedQueue
from paceline.transport.transport_interface import HUB
from paceline.transport.zmq import HubExchange, SocketSettings, WorkerExchange
from zmq_ends import (
    ENOUGH,
    LOOPBACK,
    connect_all,
    drive,
    frame,
    greeting,
    handshake,
    make,
    port_of,
    program,
    read_address,
    wire_parts,
)

FRAME = 4 << 20


@pytest.fixture
def hub(ends):
    return ends(HubExchange, LOOPBACK, "run", insecure=True)


@pytest.mark.parametrize("number", [0, -1, 2**53, True, 1.5, "1"])
def test_invalid_worker_numbers_are_refused(number):
    with pytest.raises(UsageError, match="is not a worker number"):
        WorkerExchange("tcp://127.0.0.1:7000", number)


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_messages_arrive_in_both_directions(ends, tmp_path, transport):
    place = LOOPBACK if transport == "tcp" else f"ipc://{tmp_path}/hub"
    hub = ends(HubExchange, place, "run", insecure=transport == "tcp")
    worker = ends(WorkerExchange, hub.address, 7, "run")
    connect_all(hub, worker)
    payloads = [b"", b"x", os.urandom(5000), bytearray(os.urandom(100_000)), memoryview(os.urandom(FRAME))]
    for there, back in ((worker, hub), (hub, worker)):
        before = back.received_nbytes
        for sequence, payload in enumerate(payloads):
            sent = make(there.me, back.me, sequence, payload, meta={"score": 0.5, "name": "x"})
            assert there.send(sent)
            (received,) = drive([back], lambda received: received[0])[0]
            assert bytes(received.payload) == bytes(payload)
            assert replace(received.header, nbytes=0, total_nbytes=0, checksum=0) == sent.header
        assert back.received_nbytes - before > sum(map(len, payloads))
    assert (hub.sent_nbytes, worker.sent_nbytes) == (worker.received_nbytes, hub.received_nbytes)
    assert hub.refused == worker.refused == Counter()
    assert (hub.peers(), worker.peers(), worker.problem) == ([7], [HUB], "")


def test_a_payload_that_may_change_is_sent_as_it_was(ends, hub):
    worker = ends(WorkerExchange, hub.address, 7)
    connect_all(hub, worker)
    payload = bytearray(b"a" * 1_000_000)
    for sequence in range(4):
        assert worker.send(make(7, HUB, sequence, payload))
        payload[:] = bytes([ord("b") + sequence]) * len(payload)
    received = drive([hub], lambda received: len(received[0]) == 4)[0]
    assert [bytes(each.payload[:1]) for each in received] == [b"a", b"b", b"c", b"d"]
    assert hub.refused == {}


def test_many_workers_at_once_each_in_its_order(ends, hub):
    numbers = range(1, 9)

    def work(number):
        worker = WorkerExchange(hub.address, number, "run")
        sequence, received = 0, []
        deadline = time.monotonic() + ENOUGH
        while len(received) < 50 and time.monotonic() < deadline:
            if sequence < 50 and worker.send(make(number, HUB, sequence, bytes([number]) * 20_000)):
                sequence += 1
            received += worker.poll(0.001)
        received_by[number] = [each.header.sequence for each in received]
        worker.close()

    received_by, arrived = {}, {number: [] for number in numbers}
    threads = [threading.Thread(target=work, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    back = PacedQueue()
    while any(thread.is_alive() for thread in threads):
        for each in hub.poll(min(0.01, back.pump(time.monotonic(), hub.send))):
            source = each.header.source
            assert bytes(each.payload) == bytes([source]) * 20_000
            arrived[source].append(each.header.sequence)
            back.add(source, iter([make(HUB, source, each.header.sequence)]), short=True)
    assert arrived == received_by == {number: list(range(50)) for number in numbers}


def test_a_thread_that_wakes_the_other_ends_its_wait(ends, hub):
    worker = ends(WorkerExchange, hub.address, 7)
    connect_all(hub, worker)
    for end in (hub, worker):
        end.wake()
        end.wake()
        assert end.poll(3600.0) == [], "it was woken before"
        timer = threading.Timer(0.05, end.wake)
        timer.start()
        assert end.poll(3600.0) == []
        timer.join()
        end.close()
        end.wake()


def test_poll_returns_on_a_message_or_a_connection(ends, hub):
    worker = ends(WorkerExchange, hub.address, 7)
    stop = threading.Event()
    polling = threading.Thread(target=lambda: [hub.poll(0.01) for _ in iter(stop.is_set, True)])
    polling.start()
    try:
        assert worker.poll(3600.0) == []
        assert worker.peers() == [HUB]
    finally:
        stop.set()
        polling.join()
    worker.send(make(7, HUB, 0))
    (received,) = hub.poll(3600.0)
    assert received.header.source == 7


def test_send_is_refused_without_a_peer(ends, hub):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    worker = ends(WorkerExchange, f"tcp://127.0.0.1:{port}", 7)
    assert not worker.send(make(7, HUB))
    assert not worker.send(make(7, 8)), "a worker reaches the hub only"
    for target in (7, HUB, 2**60):
        assert not hub.send(make(HUB, target))
    assert hub.sent_nbytes == worker.sent_nbytes == 0


def test_an_unsendable_envelope_is_a_usage_error(ends, hub):
    worker = ends(WorkerExchange, hub.address, 7)
    connect_all(hub, worker)
    for end, wrong, message in (
        (hub, make(7, 7), "can't be sent from 0"),
        (worker, make(HUB, HUB), "can't be sent from 7"),
        (worker, make(7, HUB, 0, bytes(FRAME + 1)), f"the limit is {FRAME}"),
        (worker, make(7, HUB, -1), "sequence is -1"),
    ):
        with pytest.raises(UsageError, match=message):
            end.send(wrong)


def filled(end, target, payload):
    """Send until nothing is taken any more, and return how many were."""
    sequence, deadline = 0, time.monotonic() + 0.5
    while time.monotonic() < deadline:
        if end.send(make(end.me, target, sequence, payload)):
            sequence += 1
            deadline = time.monotonic() + 0.5
            assert sequence < 1000, "there is no end to what it takes"
        else:
            time.sleep(0.005)
    return sequence


def test_a_peer_that_receives_nothing_delays_only_its_sender(ends, hub):
    slow, quick = ends(WorkerExchange, hub.address, 7), ends(WorkerExchange, hub.address, 8)
    connect_all(hub, slow, quick)
    payload = os.urandom(1 << 20)
    taken = filled(hub, 7, payload)
    assert hub.send(make(HUB, 8, 0, payload))
    drive([quick], lambda received: received[0])
    received = drive([slow], lambda received: len(received[0]) == taken)[0]
    assert [each.header.sequence for each in received] == list(range(taken))

    taken = filled(slow, HUB, payload)
    assert quick.send(make(8, HUB, 0))
    received = drive([hub], lambda received: len(received[0]) == taken + 1)[0]
    assert [each.header.sequence for each in received if each.header.source == 7] == list(range(taken))
    assert hub.refused == slow.refused == quick.refused == {}


def test_one_poll_ends_while_messages_keep_arriving(ends, hub):
    worker = ends(WorkerExchange, hub.address, 7, settings=SocketSettings(queue_length=1000))
    connect_all(hub, worker)
    for sequence in range(500):
        assert worker.send(make(7, HUB, sequence))
    received = []
    while len(received) < 500:
        some = hub.poll(1.0)
        assert 0 < len(some) <= 64
        received += some


# --- hubs and workers that leave and return


def answered(worker, sequence, seconds=ENOUGH):
    """Return once the hub has sent something back."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if worker.send(make(worker.me, HUB, sequence, b"hello", run="run")):
            until = time.monotonic() + 1.0
            while time.monotonic() < until:
                if any(each.header.sequence == sequence for each in worker.poll(0.05)):
                    return
        worker.poll(0.02)
    raise AssertionError(worker.problem)


def test_a_hub_that_is_killed_and_started_again_finds_its_workers(ends):
    with program("hub", LOOPBACK) as process:
        address = read_address(process)
        worker = ends(WorkerExchange, address, 7, "run")
        answered(worker, 0)
    deadline = time.monotonic() + ENOUGH
    while worker.peers() or "no hub answers" not in worker.problem:
        assert time.monotonic() < deadline, worker.problem
        worker.poll(0.02)
    assert not worker.send(make(7, HUB, 1))
    with program("hub", address) as process:
        assert read_address(process) == address
        answered(worker, 2)
        assert (worker.peers(), worker.problem) == ([HUB], "")


def test_a_stopped_hub_times_out_and_reconnects(ends):
    with program("hub", LOOPBACK) as process:
        worker = ends(WorkerExchange, read_address(process), 7, settings=SocketSettings(peer_timeout=0.6))
        answered(worker, 0)
        process.send_signal(signal.SIGSTOP)
        drive([worker], lambda _: not worker.peers())
        assert "broke" in worker.problem
        process.send_signal(signal.SIGCONT)
        answered(worker, 1)


def test_a_worker_that_starts_again_keeps_its_number(ends, hub):
    first = ends(WorkerExchange, hub.address, 7)
    connect_all(hub, first)
    first.close()
    drive([hub], lambda _: not hub.send(make(HUB, 7)))
    assert hub.peers() == []
    second = ends(WorkerExchange, hub.address, 7)
    connect_all(hub, second)
    assert hub.send(make(HUB, 7, 3, b"again"))
    (received,) = drive([second], lambda received: received[0])[0]
    assert bytes(received.payload) == b"again"


def test_a_worker_with_a_stale_connection_keeps_its_number(ends, hub):
    with socket.create_connection(("127.0.0.1", port_of(hub.address))) as old:
        handshake(old, b"7's old connection", hub.poll)
        old.sendall(
            b"".join(frame(part, more=index < 2) for index, part in enumerate(wire_parts(make(7, HUB))))
        )
        drive([hub], lambda received: received[0])
        assert hub.peers() == [7]
        worker = ends(WorkerExchange, hub.address, 7)
        drive([hub, worker], lambda _: worker.peers())
        assert worker.send(make(7, HUB))
        drive([hub], lambda received: received[0])
        assert hub.send(make(HUB, 7, 3, b"again"))
        drive([worker], lambda received: received[0])


def test_a_hub_remembers_only_the_latest_senders(ends):
    hub = ends(HubExchange, LOOPBACK, "run", max_peers=3, insecure=True)
    workers = [ends(WorkerExchange, hub.address, number) for number in range(1, 6)]
    drive([hub, *workers], lambda _: all(worker.peers() for worker in workers))
    for number in (1, 2, 3, 1, 4, 5):
        assert workers[number - 1].send(make(number, HUB))
        drive([hub], lambda received: received[0])
    assert hub.peers() == [1, 4, 5]


def test_a_worker_that_is_silent_for_long_is_no_peer(ends):
    hub = ends(HubExchange, LOOPBACK, "run", recent_seconds=0.2, insecure=True)
    worker = ends(WorkerExchange, hub.address, 7)
    connect_all(hub, worker)
    drive([hub], lambda _: not hub.peers())
    assert hub.send(make(HUB, 7)), "it may only have been silent"


def answered_by(server, worker):
    """Return the next connection of a worker to a server."""
    while True:
        worker.poll(0.01)
        with contextlib.suppress(TimeoutError):
            return server.accept()[0]


@pytest.mark.thorough
def test_a_hub_may_replace_another_service_at_its_address(ends):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        worker = ends(WorkerExchange, address, 7)
        other.settimeout(0.01)
        for _ in range(2):
            with answered_by(other, worker) as connection:
                connection.sendall(greeting(b"PLAIN"))
                drive([worker], lambda _: "is not a hub without keys" in worker.problem)
    hub = ends(HubExchange, address, "run", insecure=True)
    connect_all(hub, worker)
    assert worker.problem == ""


def test_ends_leave_nothing_behind():
    def once():
        hub = HubExchange(LOOPBACK, "run", insecure=True)
        worker = WorkerExchange(hub.address, 7)
        connect_all(hub, worker)
        for end in (worker, hub):
            end.close()
            end.close()
        with pytest.raises(UsageError):
            HubExchange("tcp://192.0.2.1:*", "run", insecure=True)

    process = psutil.Process()
    once()
    before = process.num_fds(), process.num_threads()
    for _ in range(10):
        once()
    assert (process.num_fds(), process.num_threads()) == before


# --- addresses


def test_a_taken_port_is_reported(ends, hub):
    with pytest.raises(
        UsageError, match=rf"can't bind {hub.address}: Address already in use.*\n.*another port"
    ):
        HubExchange(hub.address, "run", insecure=True)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("tcp://192.0.2.1:*", "address of this machine"),
        ("tcp://no-such-host.invalid:*", "does not resolve"),
        ("ipc:///no/such/folder/hub", "can't bind ipc"),
        ("tcp://127.0.0.1", "is not a hub address|is not a port"),
    ],
)
def test_an_address_without_a_hub_is_refused_with_the_valid_ones(address, message):
    with pytest.raises(UsageError, match=message):
        HubExchange(address, "run", insecure=True)


def test_a_reachable_hub_requires_keys_or_insecure(ends):
    with pytest.raises(UsageError, match="has no keys"):
        HubExchange("tcp://*:*", "run")
    with pytest.raises(UsageError, match="reached by other users of this machine, and has no keys"):
        HubExchange(LOOPBACK, "run")
    hub = ends(HubExchange, "tcp://*:*", "run", insecure=True)
    worker = ends(WorkerExchange, f"tcp://localhost:{port_of(hub.address)}", 7)
    connect_all(hub, worker)


def test_a_hub_may_be_named_and_be_at_a_number_of_ipv6(ends):
    hub = ends(HubExchange, "tcp://localhost:*", "run", insecure=True)
    connect_all(hub, ends(WorkerExchange, f"tcp://localhost:{port_of(hub.address)}", 7))
    if not os.path.exists("/proc/net/if_inet6"):
        return
    hub = ends(HubExchange, "tcp://[::1]:*", "run", insecure=True)
    connect_all(hub, ends(WorkerExchange, hub.address, 7))
