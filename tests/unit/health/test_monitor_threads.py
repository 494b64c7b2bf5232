"""Monitor threads and their connections: messages, and many monitors in one process."""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import threading
import time

import pytest

from paceline._core.processes import graceful_shutdown
from paceline.health import abort_collectives, thread_probe
from paceline.health.aggregation.groups import PeerGroups
from paceline.health.attribution import StallLimits
from paceline.health.heartbeat import FailureNotice, Heartbeat
from paceline.health.monitor_thread import MonitorThread
from paceline.health.peer_endpoint import LOOPBACK, PeerEndpoint, open_listener
from paceline.health.peer_mesh import PeerMesh
from paceline.world.process_probe import process_start_ticks


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


KEY = b"k" * 32


# ------------------------------------------------------------------ messages


def endpoint(rank, listener, *, start_ticks=0, ident=0, host_key="same"):
    address, port = listener.getsockname()[:2]
    return PeerEndpoint(
        rank=rank,
        host=f"pc{rank}",
        host_key=host_key,
        pid=os.getpid(),
        start_ticks=start_ticks,
        thread_ident=ident,
        address=address,
        port=port,
        token="",
    )


def open_mesh(own, endpoints, listener, lost=5.0):
    groups, rank = PeerGroups([each.host_key for each in endpoints]), own.rank
    peers, calls, mates = groups.peers(rank), groups.calls(rank), groups.mates(rank)
    return PeerMesh(own, endpoints, listener, lost, key=KEY, peers=peers, calls=calls, quiet=mates)


@pytest.fixture
def meshes():
    made = []

    def make(ranks, per_host=16, lost=5.0):
        listeners = [open_listener(LOOPBACK) for _ in range(ranks)]
        pid, ident = os.getpid(), threading.get_ident()
        endpoints = [
            endpoint(
                rank, each, start_ticks=process_start_ticks(pid), ident=ident, host_key=f"h{rank // per_host}"
            )
            for rank, each in enumerate(listeners)
        ]
        made.extend(
            open_mesh(own, endpoints, each, lost) for own, each in zip(endpoints, listeners, strict=True)
        )
        for mesh in made:
            mesh.connect()
        until(lambda: all([list(mesh.receive()) == [] and not mesh.missing() and mesh.dump for mesh in made]))
        return made

    yield make
    for mesh in made:
        mesh.close()


def received_notices(mesh):
    found = []
    until(lambda: found.extend(mesh.receive()) or found)
    return found


def test_messages_go_to_all_or_to_one(meshes):
    a, b, c = meshes(3)
    a.send({"ack": [1]})
    assert received_notices(b) == received_notices(c) == [(0, {"ack": [1]})]
    b.send({"ack": [2]}, to=[2])
    assert received_notices(c) == [(1, {"ack": [2]})]
    assert list(a.receive()) == []


def test_the_end_of_a_connection_ends_a_wait(meshes):
    a, b = meshes(2)
    b.send({"ack": [1]})
    b.close()
    started = time.monotonic()
    a.wait(20.0, [])
    assert time.monotonic() - started < 10
    assert list(a.receive()) == [(1, {"ack": [1]})]  # messages received before the end are not lost
    assert a.links[1].state == "closed"
    a.send({"ack": [2]})  # goes nowhere


def test_a_link_with_malformed_messages_is_closed_but_not_reported_as_ended(meshes):
    a, b = meshes(2)
    b.links[0].socket.send(b"\xff" * 16)
    until(lambda: list(a.receive()) == [] and a.links[1].state != "open")
    assert a.links[1].state == "none"


def test_a_peer_that_does_not_read_costs_bounded_memory(meshes):
    a, _ = meshes(2)
    note = FailureNotice("raised", 0, 0, text="x" * 16_000).message()
    for _ in range(1000):
        a.send(note)
        a.send(note, droppable=True)
    assert len(a.links[1].backlog) <= 1 << 20
    assert a.unanswered(1) < 60


def test_stack_dumps_are_read_by_the_next_rank(meshes):
    a, b = meshes(2)
    faulthandler.dump_traceback(a.dump.fileno())
    found = []
    until(
        lambda: (
            list(b.receive()) == [] and (found.extend(b.stack_dumps()) or any(rank == 0 for rank, _ in found))
        )
    )
    text = next(text for rank, text in reversed(found) if rank == 0)
    assert "test_stack_dumps_are_read_by_the_next_rank" in thread_probe.stack_in_dump(
        text, threading.get_ident()
    )
    b.discard_dump(0)


def test_a_forked_child_leaves_the_connections_alone(meshes):
    a, b = meshes(2)
    if (child := os.fork()) == 0:
        a.close(forked=True)
        os._exit(0)
    os.waitpid(child, 0)
    a.send({"ack": [1]})
    assert received_notices(b) == [(0, {"ack": [1]})]


def test_a_peer_that_does_not_connect_is_warned_of(caplog, monkeypatch):
    monkeypatch.setattr("paceline.health.monitor_thread.CONNECT_SECONDS", 0.3)
    listeners = [open_listener(LOOPBACK), open_listener(LOOPBACK)]
    endpoints = [endpoint(rank, each, ident=threading.get_ident()) for rank, each in enumerate(listeners)]
    settings = {"leave_on_stall": True, "warn": 100.0, "grace": 100.0}
    shutdown = graceful_shutdown.ShutdownListener()
    mesh = open_mesh(endpoints[0], endpoints, listeners[0])
    monitor = MonitorThread(
        mesh, PeerGroups(["same"] * 2), StallLimits(50.0, 50.0), shutdown=shutdown, **settings
    )
    monitor.start()
    monitor.close()
    listeners[1].close()
    assert "ranks [1] can't be watched by this rank: they did not connect" in caplog.text


# ------------------------------------------------------------------ many monitors in one process


@pytest.fixture
def make_monitors(meshes, monkeypatch):
    aborted, made = [], []
    monkeypatch.setattr(abort_collectives, "abort_groups", lambda reason: aborted.append(reason.rank))

    def make(ranks, per_host=16, **options):
        monitors, groups = [], PeerGroups([f"h{rank // per_host}" for rank in range(ranks)])
        for mesh in meshes(ranks, per_host):
            if mesh.dump is not None:
                mesh.dump.close()
            mesh.dump = None
            settings = {
                "leave_on_stall": True,
                "warn": 100.0,
                "grace": 100.0,
                "shutdown": graceful_shutdown.ShutdownListener(),
            }
            settings |= options
            monitors.append(MonitorThread(mesh, groups, StallLimits(50.0, 50.0), **settings))
        made.extend(monitors)
        return monitors

    yield make
    for each in made:
        each.close()


def take_turns(monitors, times=1):
    for _ in range(times):
        for each in monitors:
            each._heartbeat_sent_at = 0.0  # due in each turn
            each._turn()


@pytest.mark.parametrize(("ranks", "per_host"), [(2, 2), (5, 5), (20, 4)])
def test_an_exception_reaches_all_ranks(make_monitors, ranks, per_host):
    monitors = make_monitors(ranks, per_host)
    monitors[1].publish(
        monitors[1].detector.own_notice("raised", name="ValueError: no", text="its traceback")
    )
    deadline = time.monotonic() + 60
    while not all(each.decided.is_set() for each in monitors):
        take_turns(monitors)
        assert time.monotonic() < deadline
    for each in monitors:
        assert (each.error.rank, each.error.kind, each.error.host) == (1, "raised", "pc1")
        assert "raised ValueError: no" in str(each.error)
        assert "| its traceback" in str(each.error)


def is_seen_as_dumped(detector, rank):
    return next(row.dumped for row in detector.snapshot()[0] if row.rank == rank)


def dump_of(rank, by, sequence):
    return FailureNotice("stack", rank, by, name="dump", text=f"stack {sequence}", sequence=sequence)


def test_each_stack_that_a_rank_dumps_counts_until_its_next_heartbeat(make_monitors):
    detectors = [each.detector for each in make_monitors(3)]
    for sequence in (1, 2, 3):
        for each in detectors:
            each.add_heartbeat(Heartbeat(1, sequence), 0.0)
            assert not is_seen_as_dumped(each, 1)
        assert detectors[2].publish(dump_of(1, 2, sequence))
        assert detectors[0].publish(dump_of(1, 2, sequence), source=2)
        assert not detectors[0].publish(dump_of(1, 2, sequence), source=2)
        assert all(is_seen_as_dumped(detectors[rank], 1) for rank in (0, 2))
    stacks = [each.text for each in detectors[0].snapshot()[1] if each.kind == "stack"]
    assert stacks == ["stack 3"], "the latest alone"


def test_a_stack_that_arrives_before_the_last_heartbeat_counts(make_monitors):
    detector = make_monitors(3)[0].detector
    detector.add_heartbeat(Heartbeat(1, 1), 0.0)
    detector.publish(dump_of(1, 2, 5), source=2)
    for sequence in (2, 5):
        detector.add_heartbeat(Heartbeat(1, sequence), 0.0)
        assert is_seen_as_dumped(detector, 1)
    detector.add_heartbeat(Heartbeat(1, 6), 0.0)
    assert not is_seen_as_dumped(detector, 1)


def test_the_stacks_of_a_long_run_leave_room_for_a_failure(make_monitors):
    detector = make_monitors(2)[0].detector
    for sequence in range(1, 1000):
        own = FailureNotice("stack", 1, 1, name=f"{sequence:x}", text="…", sequence=sequence)
        detector.publish(own, source=1)
    assert detector.publish(FailureNotice("raised", 1, 1, name="ValueError"), source=1)
    assert detector.attribute().kind == "raised"


def test_every_host_is_heard_by_every_rank(make_monitors):
    monitors = make_monitors(20, 2)
    worlds = lambda: [each.detector.exchange._world for each in monitors]  # noqa: E731
    until(lambda: take_turns(monitors) or all(world.groups == ((0, 9),) for world in worlds()), 60)
    for each in monitors:
        assert sorted(each.detector.heartbeats) == sorted({each.own.rank, *each.detector.mates})
        assert all(row.heartbeat is not None for row in each.detector.exchange._world.rows)


@pytest.fixture
def with_listeners(make_monitors, tmp_path, monkeypatch):
    """Three monitors, each with the file in which its launcher requests an exit."""
    files = [tmp_path / f"leave{rank}" for rank in range(3)]
    listeners = []
    for file in files:
        monkeypatch.setenv(graceful_shutdown.VARIABLE, str(file))
        listeners.append(graceful_shutdown.ShutdownListener())
    monitors = make_monitors(3)
    for each, listener in zip(monitors, listeners, strict=True):
        each._shutdown = listener
    take_turns(monitors, 3)
    return monitors, files


def test_an_exit_requested_for_a_new_world_is_no_failure(with_listeners):
    monitors, files = with_listeners
    graceful_shutdown.request_shutdown(files[1], "changed")
    take_turns(monitors, 3)
    assert [graceful_shutdown.is_listening(file) for file in files] == [True, False, True]
    monitors[1].mesh.close()
    take_turns([monitors[0], monitors[2]], 20)
    assert not any(each.decided.is_set() for each in monitors)


def test_an_exit_requested_after_a_failure_names_that(with_listeners):
    monitors, files = with_listeners
    monitors[1].endpoints[2] = dataclasses.replace(monitors[1].endpoints[2], host_key="another host")
    monitors[1].mesh.links[2].state = "lost"
    monitors[1].detector.heard_at[2] -= 5.0  # of 50 that it may be silent
    take_turns([monitors[1]])
    assert monitors[1].detector.pending is None
    graceful_shutdown.request_shutdown(files[1], "failed")
    until(lambda: take_turns([monitors[0], monitors[1]]) or monitors[1].decided.is_set())
    assert monitors[1].error.rank == 2
    monitors[1].close()
    assert graceful_shutdown.is_listening(files[1]), "the launcher waits for its end"


def test_an_exit_requested_without_evidence_is_no_failure(with_listeners, monkeypatch):
    monkeypatch.setattr("paceline.health.monitor_thread._SHUTDOWN_SECONDS", 0.05)
    monitors, files = with_listeners
    graceful_shutdown.request_shutdown(files[1], "failed")
    until(lambda: take_turns(monitors) or not graceful_shutdown.is_listening(files[1]))
    assert not any(each.decided.is_set() for each in monitors)


def test_a_launcher_requests_exits_of_ranks_that_listen(tmp_path, monkeypatch):
    file = tmp_path / "leave0"
    graceful_shutdown.request_shutdown(file, "failed")
    assert not graceful_shutdown.is_listening(file)
    monkeypatch.setenv(graceful_shutdown.VARIABLE, str(file))
    listener = graceful_shutdown.ShutdownListener()
    assert graceful_shutdown.is_listening(file)
    assert listener.requested() is None
    graceful_shutdown.request_shutdown(file, "failed")
    assert listener.requested() == "failed"
    listener.done()
    listener.done()
    assert not graceful_shutdown.is_listening(file)
    monkeypatch.setenv(graceful_shutdown.VARIABLE, str(tmp_path / "gone" / "leave0"))
    assert graceful_shutdown.ShutdownListener().requested() is None
    monkeypatch.delenv(graceful_shutdown.VARIABLE)
    graceful_shutdown.ShutdownListener().done()
    assert os.path.exists(os.devnull)


def test_a_launcher_that_can_not_write_continues(tmp_path):
    graceful_shutdown.request_shutdown(tmp_path, "failed")  # a folder: there, but nothing to write to
    assert graceful_shutdown.is_listening(tmp_path)


def test_a_rank_that_is_done_is_no_failure(make_monitors):
    monitors = make_monitors(3)
    take_turns(monitors, 3)
    monitors[1].publish(monitors[1].detector.own_notice("done"))
    monitors[1].close()
    take_turns([monitors[0], monitors[2]], 20)
    assert not monitors[0].decided.is_set()


def test_all_ranks_name_the_same_closed_connection(make_monitors):
    monitors = make_monitors(3)
    take_turns(monitors, 3)
    monitors[1].mesh.close()
    rest = [monitors[0], monitors[2]]
    until(lambda: take_turns(rest) or all(each.decided.is_set() for each in rest))
    assert {(each.error.kind, each.error.rank) for each in rest} == {("gone", 1)}


def test_malformed_messages_end_only_the_connection(make_monitors, caplog):
    monitors = make_monitors(2)
    take_turns(monitors, 2)
    monitors[1].mesh.send({"row": [1, 2, 3]})
    monitors[1].mesh.send({"note": {"kind": "raised"}})
    until(lambda: take_turns([monitors[0]]) or monitors[0].mesh.links[1].state == "none")
    assert "sent a malformed message" in caplog.text
    assert not monitors[0].decided.is_set()


def test_own_absence_does_not_count_as_silence_of_others(make_monitors, monkeypatch):
    monitors = make_monitors(2)
    take_turns(monitors, 3)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 300)
    monitors[0]._turn()
    assert monitors[0].detector.snapshot()[0][1].silent < 2
