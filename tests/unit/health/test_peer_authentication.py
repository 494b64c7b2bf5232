"""Authentication of watchdogs: strangers, wrong keys, recordings, altered bytes, and many callers that say nothing."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
import time
from dataclasses import replace

import pytest

from paceline._core.job_key import JobKey
from paceline._core.processes import graceful_shutdown
from paceline.errors import MismatchError
from paceline.health import abort_collectives, watchdog
from paceline.health.aggregation.groups import PeerGroups
from paceline.health.attribution import StallLimits
from paceline.health.heartbeat import FailureNotice, FrameParser, Heartbeat, MalformedFrame, encode_frame
from paceline.health.monitor_thread import MonitorThread
from paceline.health.peer_endpoint import LOOPBACK, PeerEndpoint, open_listener
from paceline.health.peer_handshake import CallerHandshake, FrameSealer, ListenerHandshake, world_key
from paceline.health.peer_mesh import PeerMesh
from paceline.world.process_probe import process_start_ticks

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
RAISED = json.loads(json.dumps(FailureNotice("raised", 1, 1, name="ValueError: forged").message()))
ROW = Heartbeat(1, 1).message()


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)
    return found


# ------------------------------------------------------------------ without sockets


def handshake(caller, listener):
    listener.accept(caller.answer(listener.challenge(caller.hello())))


def test_both_ends_derive_the_same_keys_and_new_ones_each_time():
    keys = set()
    for _ in range(2):
        caller, listener = CallerHandshake(KEY, 1, 0, "beats"), ListenerHandshake(KEY, 0, 2)
        handshake(caller, listener)
        assert caller.keys == listener.keys[::-1]
        keys.update(caller.keys)
    assert len(keys) == 4


def test_either_end_refuses_the_other_without_the_key():
    caller, listener = CallerHandshake(KEY, 1, 0, "beats"), ListenerHandshake(OTHER_KEY, 0, 2)
    with pytest.raises(MalformedFrame, match="caller has another key"):
        listener.challenge(caller.hello())
    with pytest.raises(MalformedFrame, match="listener has another key"):
        caller.answer({"challenge": ["0" * 32, "0" * 64]})


def test_a_recorded_handshake_is_refused():
    caller, listener = CallerHandshake(KEY, 1, 0, "beats"), ListenerHandshake(KEY, 0, 2)
    hello = caller.hello()
    answer = caller.answer(listener.challenge(hello))
    again = ListenerHandshake(KEY, 0, 2)
    again.challenge(hello)
    with pytest.raises(MalformedFrame, match="wrong answer"):
        again.accept(answer)


def test_a_recorded_hello_is_refused_by_another_rank():
    with pytest.raises(MalformedFrame, match="to another rank"):
        ListenerHandshake(KEY, 1, 3).challenge(CallerHandshake(KEY, 2, 0, "beats").hello())


@pytest.mark.parametrize(
    "change",
    [
        lambda frames: [frames[0][:-1] + bytes([frames[0][-1] ^ 1]), *frames[1:]],
        lambda frames: [frames[0].replace(b"1", b"2", 1), *frames[1:]],
        lambda frames: [frames[0], frames[0]],
        lambda frames: frames[1:],
        lambda frames: frames[::-1],
    ],
    ids=["code", "content", "repeated", "left out", "reordered"],
)
def test_frames_that_are_not_as_sent_are_malformed(change):
    sealer = FrameSealer(KEY)
    frames = [sealer.seal(encode_frame({"ack": [each]})) for each in (1, 3)]
    assert list(FrameParser(key=KEY).feed(b"".join(frames))) == [{"ack": [1]}, {"ack": [3]}]
    with pytest.raises(MalformedFrame, match="wrong code"):
        list(FrameParser(key=KEY).feed(b"".join(change(frames))))


def test_keys_differ_by_world_and_by_job():
    jobs = [None, JobKey(b"1" * 32), JobKey(b"2" * 32)]
    assert len({world_key(job, token) for job in jobs for token in ("one", "other")}) == 6


# ------------------------------------------------------------------ with sockets


@pytest.fixture
def world():
    """Return a function that makes meshes of two ranks that are not connected yet."""
    made = []

    def make(keys=(KEY, KEY)):
        listeners = [open_listener(LOOPBACK) for _ in range(2)]
        pid = os.getpid()
        endpoints = [
            PeerEndpoint(
                rank=rank,
                host=f"pc{rank}",
                host_key="same",
                pid=pid,
                start_ticks=process_start_ticks(pid),
                thread_ident=threading.get_ident(),
                address=LOOPBACK,
                port=listener.getsockname()[1],
                token="",
            )
            for rank, listener in enumerate(listeners)
        ]
        for rank, (listener, key) in enumerate(zip(listeners, keys, strict=True)):
            other = [1 - rank]
            mesh = PeerMesh(
                endpoints[rank],
                list(endpoints),
                listener,
                5.0,
                key=key,
                peers=other,
                calls=[0] * rank,
                quiet=other,
            )
            made.append(mesh)
        return made

    yield make
    for mesh in made:
        mesh.close()


def received(*meshes):
    return [found for mesh in meshes for found in mesh.receive()]


def join(*meshes):
    for mesh in meshes:
        mesh.connect()
    until(lambda: received(*meshes) == [] and not any(mesh.missing() for mesh in meshes))


def call(mesh):
    return socket.create_connection((LOOPBACK, mesh.own.port), timeout=0.01)


def is_closed(connection):
    """Return whether the other end closed a connection, on which it has sent nothing."""
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def hello(key=KEY, *facts):
    return encode_frame(CallerHandshake(key, *(facts or (1, 0, "beats"))).hello())


NOT_UTF8 = rb'{"hello":[1,0,"beats","\ud800","\ud800"]}'  # JSON that no encoding has


@pytest.mark.parametrize(
    "greeting",
    [
        hello(OTHER_KEY),
        hello(KEY, 9, 0, "beats"),
        hello(KEY, "1", 0, "beats"),
        hello(KEY, True, 0, "beats"),
        hello(KEY, 1, 1, "beats"),
        hello(KEY, 1, 0, "else"),
        encode_frame({"hello": [1, 0, "beats", "", None]}),
        len(NOT_UTF8).to_bytes(4) + NOT_UTF8,
        encode_frame({"hello": "secret"}),
        encode_frame({"answer": [""]}),
        encode_frame(RAISED),
        encode_frame(ROW),
        FrameSealer(OTHER_KEY).seal(encode_frame(RAISED)),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x02[]",
        b"\x00\x00\x01\xff",
        b"\xff" * 5000,
    ],
)
def test_callers_without_a_valid_hello_are_closed(world, greeting):
    mesh, _ = world()
    with call(mesh) as caller:
        caller.sendall(greeting)
        until(lambda: received(mesh) == [] and is_closed(caller))
        assert mesh.links == {}


def test_ranks_with_different_keys_are_not_connected(world):
    meshes = world((KEY, OTHER_KEY))
    for mesh in meshes:
        mesh.connect()
    until(lambda: received(*meshes) == [] and meshes[1].call_failure(0))
    assert meshes[1].call_failure(0).kind == "rejected"
    assert [mesh.links for mesh in meshes] == [{}, {}]


def test_a_listener_without_the_key_learns_nothing_and_is_refused(world):
    _, mesh = world()
    with socket.create_server((LOOPBACK, 0)) as impostor:
        mesh.endpoints[0] = replace(mesh.endpoints[0], port=impostor.getsockname()[1])
        mesh.call(0)
        connection, _ = impostor.accept()
        connection.settimeout(0.01)
        with connection:
            until(lambda: received(mesh) == [] and select.select([connection], [], [], 0)[0])
            assert b"hello" in connection.recv(1000)
            connection.sendall(encode_frame({"challenge": ["0" * 32, "0" * 64]}))
            until(lambda: received(mesh) == [] and is_closed(connection))
    assert mesh.links == {}
    assert "another key" in mesh.call_failure(0).text


class Proxy:
    """Forwards one connection, records it, and alters bytes on the way to the listener."""

    def __init__(self, port):
        self.server = socket.create_server((LOOPBACK, 0))
        self.port, self.target, self.recorded, self.alter = self.server.getsockname()[1], port, [], bytes
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        caller, _ = self.server.accept()
        listener = socket.create_connection((LOOPBACK, self.target))
        with caller, listener, contextlib.suppress(OSError):
            while True:
                for source in select.select([caller, listener], [], [])[0]:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    if source is caller:
                        self.recorded.append(data)
                        data = self.alter(data)
                    (listener if source is caller else caller).sendall(data)

    def close(self):
        self.server.close()
        self.thread.join(20)


@pytest.fixture
def through_proxy(world):
    """Two connected meshes; what rank 1 sends passes a proxy."""
    meshes = world()
    proxy = Proxy(meshes[0].own.port)
    meshes[1].endpoints[0] = replace(meshes[1].endpoints[0], port=proxy.port)
    join(*meshes)
    yield *meshes, proxy
    for mesh in meshes:
        mesh.close()
    proxy.close()


def test_a_recorded_connection_that_is_replayed_brings_nothing(through_proxy):
    listener, caller, proxy = through_proxy
    caller.send(RAISED)
    until(lambda: received(listener) == [(1, RAISED)])
    link = listener.links[1]
    with call(listener) as replay:
        replay.sendall(b"".join(proxy.recorded))
        replay.settimeout(0.01)

        def ended():
            assert received(listener) == []
            try:
                return replay.recv(1000) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        until(ended)
    assert listener.links == {1: link}
    assert link.state == "open"


def test_bytes_altered_on_the_way_end_the_connection(through_proxy):
    listener, caller, proxy = through_proxy
    proxy.alter = lambda data: data.replace(b"forged", b"FORGED")
    caller.send(RAISED)
    until(lambda: received(listener) == [] and listener.links[1].state != "open")
    assert listener.links[1].state == "none", "no evidence that the process has ended"


def test_a_peer_joins_while_hundreds_of_callers_say_nothing(world):
    listener, peer = world()
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(call(listener)) for _ in range(250)]
        peer.connect()
        idle += [stack.enter_context(call(listener)) for _ in range(250)]
        until(lambda: received(listener, peer) == [] and not listener.missing() and not peer.missing())
        assert len(listener._pending.sockets()) < 50
        peer.send(RAISED)
        until(lambda: received(listener) == [(1, RAISED)])
        assert sum(map(is_closed, idle)) >= 460


def test_a_caller_that_says_nothing_is_closed_after_a_time(world, monkeypatch):
    monkeypatch.setattr("paceline.health.pending_connections._HELLO_SECONDS", 0.1)
    mesh, _ = world()
    with call(mesh) as caller:
        until(lambda: received(mesh) == [] and is_closed(caller))


def test_recorded_hellos_can_not_displace_a_peer(world):
    """A hello may be recorded and repeated, but ends in a challenge; those that wait for an answer are bounded too."""
    listener, peer = world()
    with contextlib.ExitStack() as stack:
        recorded = hello()
        for _ in range(200):
            stack.enter_context(call(listener)).sendall(recorded)
        received(listener)
        assert len(listener._pending.sockets()) <= 1 + 64
        join(peer, listener)


def test_a_stranger_can_neither_report_a_failure_nor_read_states(world, monkeypatch):
    monkeypatch.setattr(abort_collectives, "abort_groups", lambda reason: None)
    monitors = [
        MonitorThread(
            mesh,
            PeerGroups(["same"] * 2),
            StallLimits(50.0, 50.0),
            leave_on_stall=True,
            warn=100.0,
            grace=100.0,
            shutdown=graceful_shutdown.ShutdownListener(),
        )
        for mesh in world()
    ]
    starts = [threading.Thread(target=each.start) for each in monitors]
    for each in starts:
        each.start()
    gone = FailureNotice("gone", 1, 1, code=-9).message()
    with contextlib.ExitStack() as stack:
        strangers = []
        for message in (RAISED, gone, ROW):
            for data in (
                encode_frame(message),
                FrameSealer(OTHER_KEY).seal(encode_frame(message)),
                hello() + encode_frame(message),
            ):
                strangers.append(stack.enter_context(call(monitors[0].mesh)))
                strangers[-1].sendall(data)
        seen = b""
        for each in strangers:
            each.settimeout(20)
            with contextlib.suppress(OSError):
                while data := each.recv(1000):
                    seen += data
    for each in starts:
        each.join()
    assert b"row" not in seen
    assert b"note" not in seen
    assert not any(each.decided.is_set() or each.detector._notices for each in monitors)
    until(lambda: all(len(each.detector.heartbeats) == 2 for each in monitors))
    for each in monitors:
        each.publish(each.detector.own_notice("done"))
    for each in monitors:
        each.close()


# ------------------------------------------------------------------ set-up


@pytest.fixture
def two_ranks(monkeypatch):
    """Play a world of two ranks on two hosts, or on one, in this process."""

    def play(*host_keys):
        def gather(text):
            record = json.loads(text)
            if isinstance(record, list):
                return [json.dumps([key, record[1]]) for key in host_keys]
            return [json.dumps(record | {"rank": rank, "host_key": host_keys[rank]}) for rank in range(2)]

        monkeypatch.setattr(watchdog, "rank_and_size", lambda: (0, 2))
        monkeypatch.setattr(watchdog, "gather_texts", gather)
        mesh, _ = watchdog._open_mesh(5.0)
        address = mesh._pending.sockets()[0].getsockname()[0]
        mesh.close()
        return address, mesh

    return play


def test_ranks_of_one_host_listen_on_the_loopback_alone(two_ranks):
    assert two_ranks("a", "a")[0] == LOOPBACK


def test_ranks_of_several_hosts_listen_on_the_address_of_the_group(two_ranks, monkeypatch):
    monkeypatch.setattr(watchdog, "watchdog_address", lambda: "127.0.0.2")
    assert two_ranks("a", "b")[0] == "127.0.0.2"


def test_the_key_is_that_of_the_job_where_there_is_one(two_ranks, monkeypatch):
    job = JobKey(b"j" * 32)
    monkeypatch.setenv("PACELINE_JOB_KEY", job.secret.hex())
    _, mesh = two_ranks("a", "a")
    assert mesh._pending._key == world_key(job, mesh.endpoints[0].token)
    monkeypatch.delenv("PACELINE_JOB_KEY")
    _, mesh = two_ranks("a", "a")
    assert mesh._pending._key == world_key(None, mesh.endpoints[0].token)
    assert len(mesh.endpoints[0].token) == 32


def test_job_keys_that_differ_are_refused_on_every_rank():
    with pytest.raises(MismatchError, match=r"rank 0 has a job key; ranks 1–2 do not have the same"):
        watchdog._check_job_keys(["a", "b", ""])
    watchdog._check_job_keys(["", ""])
