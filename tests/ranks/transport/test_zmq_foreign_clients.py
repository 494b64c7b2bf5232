"""Invalid messages and foreign peers over ZeroMQ: none is delivered, nothing leaks, and other peers are served."""

from __future__ import annotations

import os
import random
import socket
import time

import psutil
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.transport.envelope import encode_checksummed
from paceline.transport.transport_interface import HUB
from paceline.transport.zmq import HubExchange, WorkerExchange
from zmq_ends import (
    ENOUGH,
    LOOPBACK,
    bad_messages,
    connect_all,
    drive,
    frame,
    garbage,
    handshake,
    make,
    poll_for,
    port_of,
    program,
    wire_parts,
)

FRAME = 4 << 20


@pytest.fixture
def hub(ends):
    return ends(HubExchange, LOOPBACK, "run", insecure=True)


class Raw:
    """A DEALER socket that sends arbitrary parts as worker `me`."""

    def __init__(self, hub, me):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(hub.address)
        self.hub, self.me, self.sequence = hub, me, 0

    def delivered(self, parts):
        """Send parts, then a valid message; return the messages that the hub receives before it."""
        self.socket.send_multipart(parts)
        self.sequence += 1
        self.socket.send_multipart(wire_parts(make(self.me, HUB, self.sequence, kind="after")))
        received = drive(
            [self.hub], lambda received: any(each.header.kind == "after" for each in received[0])
        )[0]
        assert received[-1].header.sequence == self.sequence
        return received[:-1]

    def close(self):
        self.socket.close(0)
        self.context.term()


def test_invalid_messages_are_counted_by_kind(ends, hub):
    raw = ends(Raw, hub, 2**40)
    for number in range(20):
        for parts in bad_messages(random.Random(number), raw.me):
            before = hub.refused.total()
            assert raw.delivered(parts) == []
            assert hub.refused.total() == before + 1, parts
    assert set(hub.refused) == {"TruncatedEnvelope", "DamagedEnvelope", "ForeignEnvelope"}
    assert hub.refused["ForeignEnvelope"] == 20 * 4
    assert hub.peers() == [raw.me], "of what followed"


def test_an_envelope_with_a_false_source_is_not_delivered_and_adds_no_peer(ends, hub):
    raw = ends(Raw, hub, 5)
    assert len(raw.delivered(wire_parts(make(5, HUB)))) == 1
    assert raw.delivered(wire_parts(make(6, HUB))) == []
    assert hub.refused == {"ForeignEnvelope": 1}
    assert hub.peers() == [5]


def test_a_worker_accepts_envelopes_of_the_hub_only(ends):
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # what can't be sent is an error, not dropped
    port = router.bind_to_random_port("tcp://127.0.0.1")
    try:
        worker = ends(WorkerExchange, f"tcp://127.0.0.1:{port}", 7, "run")
        drive([worker], lambda _: worker.peers())
        assert worker.send(make(7, HUB))
        identity = router.recv_multipart()[0]
        sent = 0
        for number in range(20):
            wrong = [
                wire_parts(make(8, 7)),
                wire_parts(make(HUB, 8)),
                wire_parts(make(HUB, 7, run="another")),
            ]
            for parts in [*bad_messages(random.Random(number), HUB), *wrong]:
                router.send_multipart([identity, *parts])
                sent += 1
        router.send_multipart([identity, *wire_parts(make(HUB, 7, 9))])
        received = drive([worker], lambda received: received[0])[0]
        assert [each.header.sequence for each in received] == [9]
        assert worker.refused.total() == sent
    finally:
        router.close(0)
        context.term()


def mutated(draw, sent):
    """Return the parts of an envelope after something happened to them."""
    received = list(sent)
    for _ in range(draw(st.integers(0, 3))):
        if not received:
            break
        at = draw(st.integers(0, len(received) - 1))
        way = draw(st.sampled_from(["flip", "cut", "longer", "drop", "twice", "noise", "swap"]))
        if way == "flip" and received[at]:
            byte = draw(st.integers(0, len(received[at]) - 1))
            flipped = received[at][byte] ^ 1 << draw(st.integers(0, 7))
            received[at] = received[at][:byte] + bytes([flipped]) + received[at][byte + 1 :]
        elif way == "cut":
            received[at] = received[at][: draw(st.integers(0, len(received[at])))]
        elif way == "longer":
            received[at] += draw(st.binary(max_size=9))
        elif way == "drop":
            del received[at]
        elif way == "twice":
            received.insert(at, received[at])
        elif way == "noise":
            received[at] = draw(st.binary(max_size=100))
        elif way == "swap":
            received.append(received.pop(at))
    return received


def test_a_damaged_envelope_is_refused_or_equals_the_sent_one(ends, hub):
    raw = ends(Raw, hub, 5)
    outcomes = set()

    @settings(max_examples=400, deadline=None)
    @given(st.data(), st.binary(max_size=300))
    def change(data, payload):
        sent = wire_parts(make(5, HUB, 3, payload, meta={"base": 4, "worker": "x"}))
        parts = mutated(data.draw, sent)
        received = raw.delivered(parts or [b""])
        assert len(received) <= 1
        for each in received:
            assert [bytes(part) for part in encode_checksummed(each.header, each.payload)] == sent == parts
        outcomes.add(len(received))

    change()
    assert outcomes == {0, 1}


@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_ten_thousand_bad_messages_leak_nothing_and_delay_no_peer(ends, hub):
    worker = ends(WorkerExchange, hub.address, 7, "run")
    connect_all(hub, worker)
    process, resident, served = psutil.Process(), [], 0
    for count in (3000, 10_000):  # the first fills what is kept for use again
        served = 0
        with program("invalid", hub.address, count) as clients:
            while clients.poll() is None:
                if worker.send(make(7, HUB, served, os.urandom(10_000))):
                    served += 1
                for received in hub.poll(0.01):
                    source, run, nbytes = received.header.source, received.header.run, len(received.payload)
                    # Without keys, a connection may have any one number.
                    assert (source, run, nbytes) in ((7, "run", 10_000), (2**40 + 1, "run", 0))
            assert int(clients.stdout.read()) >= count
            assert clients.returncode == 0
        poll_for([hub], 0.3)
        resident.append(process.memory_info().rss)
    assert hub.refused.total() > 12_000
    assert 7 in hub.peers()
    assert served > 20
    assert resident[1] - resident[0] < 4e6, [f"{each / 1e6:.1f} MB" for each in resident]


def connected(hub):
    """Return a TCP connection that has shaken hands."""
    raw = socket.create_connection(("127.0.0.1", port_of(hub.address)), ENOUGH)
    handshake(raw, b"", hub.poll)
    return raw


def ended(raw, hub):
    """Return whether the hub ends a connection."""
    deadline = time.monotonic() + ENOUGH
    raw.settimeout(0.01)
    while time.monotonic() < deadline:
        hub.poll(0.01)
        try:
            if not raw.recv(4096):
                return True
        except TimeoutError:
            continue
        except ConnectionResetError:
            return True
    return False


def test_an_oversized_part_closes_its_connection_before_it_arrives(ends, hub):
    worker = ends(WorkerExchange, hub.address, 7)
    connect_all(hub, worker)
    for size in (2**63, 1 << 40, FRAME + 1000):
        with connected(hub) as raw:
            raw.sendall(frame(b"begin", size=size))
            assert ended(raw, hub)
    assert worker.send(make(7, HUB, 1, bytes(FRAME)))
    drive([hub], lambda received: received[0])


def test_half_an_envelope_is_not_delivered(ends, hub):
    parts = wire_parts(make(77, HUB, 0, bytes(1000)))
    whole = b"".join(frame(part, more=index < 2) for index, part in enumerate(parts))
    for end in range(0, len(whole), 37):
        with connected(hub) as raw:
            raw.sendall(whole[:end])
    with connected(hub) as raw:
        raw.sendall(whole)
        received = drive([hub], lambda received: received[0])[0]
    assert len(received) == 1
    assert hub.refused == {}


def test_other_protocols_add_no_peer(ends, hub):
    draw, received = random.Random(1), []
    for _ in range(200):
        garbage(hub.address, draw, lambda: received.extend(hub.poll()))
    received += poll_for([hub], 0.2)[0]
    assert (received, hub.peers(), hub.sent_nbytes) == ([], [], 0)
    connect_all(hub, ends(WorkerExchange, hub.address, 7))


@pytest.mark.thorough
def test_thousands_of_connections_while_the_hub_does_something_else(ends):
    hub = HubExchange(LOOPBACK, "run", insecure=True)
    for _ in range(2500):  # a monitor has room for 2000 events
        try:
            socket.create_connection(("127.0.0.1", port_of(hub.address)), 0.5).close()
        except TimeoutError:
            break
    worker = ends(WorkerExchange, hub.address, 7)
    connect_all(hub, worker)
    for _ in range(2500):
        try:
            socket.create_connection(("127.0.0.1", port_of(hub.address)), 0.5).close()
        except TimeoutError:
            break
    hub.close()
