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
from paceline.transport.zmq.zmq_socket import worker_identity
from zmq_ends import (
    ENOUGH,
    LOOPBACK,
    bad_messages,
    drive,
    frame,
    garbage,
    make,
    meet,
    port_of,
    program,
    settle,
    shake_hands,
    wired,
)

FRAME = 4 << 20


@pytest.fixture
def hub(ends):
    return ends(HubExchange, LOOPBACK, "run")


class Raw:
    """A DEALER that sends whatever it is told to, as worker `me`."""

    def __init__(self, hub, me):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, worker_identity(me))
        self.socket.connect(hub.address)
        self.hub, self.me, self.sequence = hub, me, 0

    def come(self, parts):
        """Send parts, and return what the hub gets before what is sent after them."""
        self.socket.send_multipart(parts)
        self.sequence += 1
        self.socket.send_multipart(wired(make(self.me, HUB, self.sequence, kind="after")))
        came = drive([self.hub], lambda came: any(each.header.kind == "after" for each in came[0]))[0]
        assert came[-1].header.sequence == self.sequence
        return came[:-1]

    def close(self):
        self.socket.close(0)
        self.context.term()


def test_invalid_messages_are_counted_by_kind(ends, hub):
    raw = ends(Raw, hub, 2**40)
    for number in range(20):
        for parts in bad_messages(random.Random(number), raw.me):
            before = hub.refused.total()
            assert raw.come(parts) == []
            assert hub.refused.total() == before + 1, parts
    assert set(hub.refused) == {"TruncatedEnvelope", "DamagedEnvelope", "ForeignEnvelope"}
    assert hub.refused["ForeignEnvelope"] == 20 * 4
    assert hub.peers() == [raw.me], "of what followed"


def test_an_envelope_with_a_false_source_is_not_delivered_and_adds_no_peer(ends, hub):
    raw = ends(Raw, hub, 5)
    assert raw.come(wired(make(6, HUB))) == []
    assert hub.refused == {"ForeignEnvelope": 1}
    assert hub.peers() == [5]
    assert len(raw.come(wired(make(5, HUB)))) == 1


def until_it_is_known(router, message):
    """Send a message as soon as the worker is known here, which is after it knows that it is connected; return 1."""
    deadline = time.monotonic() + 20
    while True:
        try:
            router.send_multipart(message)
            return 1
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH or time.monotonic() > deadline:
                raise
        time.sleep(0.005)


def test_a_worker_accepts_envelopes_of_the_hub_only(ends):
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # what can't be sent is an error, not dropped
    port = router.bind_to_random_port("tcp://127.0.0.1")
    try:
        worker = ends(WorkerExchange, f"tcp://127.0.0.1:{port}", 7, "run")
        drive([worker], lambda _: worker.peers())
        sent = until_it_is_known(router, [worker_identity(7), *wired(make(8, 7))])
        for number in range(20):
            wrong = [wired(make(8, 7)), wired(make(HUB, 8)), wired(make(HUB, 7, run="another"))]
            for parts in [*bad_messages(random.Random(number), HUB), *wrong]:
                router.send_multipart([worker_identity(7), *parts])
                sent += 1
        router.send_multipart([worker_identity(7), *wired(make(HUB, 7, 9))])
        came = drive([worker], lambda came: came[0])[0]
        assert [each.header.sequence for each in came] == [9]
        assert worker.refused.total() == sent
    finally:
        router.close(0)
        context.term()


def mutated(draw, sent):
    """Return the parts of an envelope after something happened to them."""
    came = list(sent)
    for _ in range(draw(st.integers(0, 3))):
        if not came:
            break
        at = draw(st.integers(0, len(came) - 1))
        way = draw(st.sampled_from(["flip", "cut", "longer", "drop", "twice", "noise", "swap"]))
        if way == "flip" and came[at]:
            byte = draw(st.integers(0, len(came[at]) - 1))
            flipped = came[at][byte] ^ 1 << draw(st.integers(0, 7))
            came[at] = came[at][:byte] + bytes([flipped]) + came[at][byte + 1 :]
        elif way == "cut":
            came[at] = came[at][: draw(st.integers(0, len(came[at])))]
        elif way == "longer":
            came[at] += draw(st.binary(max_size=9))
        elif way == "drop":
            del came[at]
        elif way == "twice":
            came.insert(at, came[at])
        elif way == "noise":
            came[at] = draw(st.binary(max_size=100))
        elif way == "swap":
            came.append(came.pop(at))
    return came


def test_a_damaged_envelope_is_refused_or_equals_the_sent_one(ends, hub):
    raw = ends(Raw, hub, 5)
    outcomes = set()

    @settings(max_examples=400, deadline=None)
    @given(st.data(), st.binary(max_size=300))
    def change(data, payload):
        sent = wired(make(5, HUB, 3, payload, meta={"base": 4, "worker": "x"}))
        parts = mutated(data.draw, sent)
        came = raw.come(parts or [b""])
        assert len(came) <= 1
        for each in came:
            assert [bytes(part) for part in encode_checksummed(each.header, each.payload)] == sent == parts
        outcomes.add(len(came))

    change()
    assert outcomes == {0, 1}


@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_ten_thousand_bad_messages_leak_nothing_and_delay_no_peer(ends, hub):
    worker = ends(WorkerExchange, hub.address, 7, "run")
    meet(hub, worker)
    process, resident, served = psutil.Process(), [], 0
    for count in (3000, 10_000):  # the first fills what is kept for use again
        served = 0
        with program("strangers", hub.address, count) as strangers:
            while strangers.poll() is None:
                if worker.send(make(7, HUB, served, os.urandom(10_000))):
                    served += 1
                for came in hub.poll(0.01):
                    assert (came.header.source, came.header.run, len(came.payload)) == (7, "run", 10_000)
            assert int(strangers.stdout.read()) >= count
            assert strangers.returncode == 0
        settle([hub], 0.3)
        resident.append(process.memory_info().rss)
    assert hub.refused.total() > 12_000
    assert hub.peers() == [7]
    assert served > 20
    assert resident[1] - resident[0] < 4e6, [f"{each / 1e6:.1f} MB" for each in resident]


def connected(hub, me=77):
    """Return a TCP connection that has shaken hands as worker `me`."""
    raw = socket.create_connection(("127.0.0.1", port_of(hub.address)), ENOUGH)
    shake_hands(raw, worker_identity(me), hub.poll)
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
    meet(hub, worker)
    for size in (2**63, 1 << 40, FRAME + 1000):
        with connected(hub) as raw:
            raw.sendall(frame(b"begin", size=size))
            assert ended(raw, hub)
    assert worker.send(make(7, HUB, 1, bytes(FRAME)))
    drive([hub], lambda came: came[0])


def test_half_an_envelope_is_not_delivered(ends, hub):
    parts = wired(make(77, HUB, 0, bytes(1000)))
    whole = b"".join(frame(part, more=index < 2) for index, part in enumerate(parts))
    for end in range(0, len(whole), 37):
        with connected(hub) as raw:
            raw.sendall(whole[:end])
    with connected(hub) as raw:
        raw.sendall(whole)
        came = drive([hub], lambda came: came[0])[0]
    assert len(came) == 1
    assert hub.refused == {}


def test_other_protocols_add_no_peer(ends, hub):
    draw, came = random.Random(1), []
    for _ in range(200):
        garbage(hub.address, draw, lambda: came.extend(hub.poll()))
    came += settle([hub], 0.2)[0]
    assert (came, hub.peers(), hub.sent_nbytes) == ([], [], 0)
    meet(hub, ends(WorkerExchange, hub.address, 7))


@pytest.mark.thorough
def test_thousands_of_connections_while_the_hub_does_something_else(ends):
    hub = HubExchange(LOOPBACK, "run")
    for _ in range(2500):  # a monitor has room for 2000 events
        try:
            socket.create_connection(("127.0.0.1", port_of(hub.address)), 0.5).close()
        except TimeoutError:
            break
    worker = ends(WorkerExchange, hub.address, 7)
    meet(hub, worker)
    for _ in range(2500):
        try:
            socket.create_connection(("127.0.0.1", port_of(hub.address)), 0.5).close()
        except TimeoutError:
            break
    hub.close()
