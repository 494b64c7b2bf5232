"""Watchers and their connections: who is connected with whom, what comes and goes, many watchers in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline._core import graceful_shutdown
from paceline.health import abort_collectives, stack_probe
from paceline.health.attribution import StallLimits
from paceline.health.heartbeat import FailureNotice, pack
from paceline.health.monitor_thread import MonitorThread
from paceline.health.peer_mesh import FULL_MESH, LOOPBACK, MeshCard, PeerMesh, listen, mesh_peers
from paceline.health.process_probe import start_of


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


# ------------------------------------------------------------------ who is connected with whom


@given(st.integers(2, 400))
def test_being_neighbours_is_mutual_and_reaches_everybody_soon(ranks):
    near = [mesh_peers(rank, ranks) for rank in range(ranks)]
    assert all(rank in near[other] for rank in range(ranks) for other in near[rank])
    assert all(rank not in near[rank] for rank in range(ranks))
    reached, steps = {0}, 0
    while len(reached) < ranks:
        reached |= {other for rank in reached for other in near[rank]}
        steps += 1
    assert steps <= (1 if ranks <= FULL_MESH else ranks.bit_length())
    assert max(map(len, near)) <= max(FULL_MESH - 1, 2 * ranks.bit_length())


@pytest.fixture
def meshes():
    made = []

    def make(ranks, lost=5.0):
        listeners = [listen(LOOPBACK) for _ in range(ranks)]
        pid, ident = os.getpid(), threading.get_ident()
        cards = [
            MeshCard(
                rank, f"pc{rank}", "same", pid, start_of(pid), ident, *each.getsockname()[:2], f"token {rank}"
            )
            for rank, each in enumerate(listeners)
        ]
        made.extend(PeerMesh(card, cards, each, lost) for card, each in zip(cards, listeners, strict=True))
        for mesh in made:
            assert mesh.dial() == []
        until(
            lambda: all(
                list(mesh.receive()) == [] and len(mesh.links) == len(mesh_peers(mesh.me.rank, ranks))
                for mesh in made
            )
        )
        return made

    yield make
    for mesh in made:
        mesh.close()


def heard(mesh):
    found = []
    until(lambda: found.extend(mesh.receive()) or found)
    return found


def test_messages_go_to_all_or_to_one(meshes):
    a, b, c = meshes(3)
    a.send({"ack": [1]})
    assert heard(b) == heard(c) == [(0, {"ack": [1]})]
    b.send({"ack": [2]}, to=2)
    assert heard(c) == [(1, {"ack": [2]})]
    assert list(a.receive()) == []


def test_what_comes_with_the_greeting_is_not_lost():
    listener = listen(LOOPBACK)
    card = MeshCard(0, "pc", "k", os.getpid(), 0, 0, *listener.getsockname()[:2], "secret")
    mesh = PeerMesh(card, [card, card], listener, 5.0)
    with socket.create_connection(listener.getsockname()) as caller:
        caller.sendall(pack({"hello": [1, "secret", "beats"]}) + pack({"ack": [7]}))
        assert heard(mesh) == [(1, {"ack": [7]})]
    mesh.close()


NO_TEXT = rb'{"hello":[1,"\ud800","beats"]}'  # JSON that no encoding has


@pytest.mark.parametrize(
    "greeting",
    [
        pack({"hello": [1, "wrong", "beats"]}),
        pack({"hello": [9, "secret", "beats"]}),
        pack({"hello": ["1", "secret", "beats"]}),
        pack({"hello": [0, "secret", "beats"]}),
        pack({"hello": [1, None, "beats"]}),
        len(NO_TEXT).to_bytes(4) + NO_TEXT,
        pack({"hello": [1, "secret", "else"]}),
        pack({"hello": "secret"}),
        pack({"row": []}),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x02[]",
        b"\xff" * 100,
    ],
)
def test_callers_who_do_not_know_the_token_are_sent_away(greeting):
    listener = listen(LOOPBACK)
    card = MeshCard(0, "pc", "k", os.getpid(), 0, 0, *listener.getsockname()[:2], "secret")
    mesh = PeerMesh(card, [card, card], listener, 5.0)
    with socket.create_connection(listener.getsockname()) as caller:
        caller.sendall(greeting)
        caller.settimeout(0.01)

        def sent_away():
            assert list(mesh.receive()) == []
            with contextlib.suppress(TimeoutError):
                try:
                    return caller.recv(1) == b""
                except ConnectionResetError:
                    return True

        until(sent_away)
        assert mesh.links == {}
    mesh.close()


def test_the_end_of_a_process_ends_its_connection_and_wakes_who_rests(meshes):
    a, b = meshes(2)
    b.send({"ack": [1]})
    b.close()
    started = time.monotonic()
    a.rest(20.0, [])
    assert time.monotonic() - started < 10
    assert list(a.receive()) == [(1, {"ack": [1]})]  # what came before the end is not lost
    assert a.links[1].state == "closed"
    a.send({"ack": [2]})  # goes nowhere


def test_who_tells_nonsense_is_heard_no_more_but_did_not_end(meshes):
    a, b = meshes(2)
    b.links[0].socket.send(b"\xff" * 16)
    until(lambda: list(a.receive()) == [] and a.links[1].state != "open")
    assert a.links[1].state == "none"


def test_a_peer_that_takes_nothing_costs_bounded_memory(meshes):
    a, _ = meshes(2)
    note = FailureNotice("raised", 0, 0, text="x" * 16_000).message()
    for _ in range(1000):
        a.send(note)
        a.send(note, vital=False)
    assert len(a.links[1].outgoing) <= 1 << 20
    assert a.unanswered(1) < 60


def test_stacks_are_read_by_the_next_rank(meshes):
    a, b = meshes(2)
    faulthandler.dump_traceback(a.dump.fileno())
    until(lambda: (list(b.receive()) == [] and any(rank == 0 for rank, _ in b.dumps())) or b._dumps[0][2])
    text = b._dumps[0][2].decode() if b._dumps[0][0] == 0 else b._dumps[1][2].decode()
    assert "test_stacks_are_read_by_the_next_rank" in stack_probe.section(text, threading.get_ident())
    b.forget_dump(0)


def test_a_forked_child_leaves_the_connections_alone(meshes):
    a, b = meshes(2)
    if (child := os.fork()) == 0:
        a.close(forked=True)
        os._exit(0)
    os.waitpid(child, 0)
    a.send({"ack": [1]})
    assert heard(b) == [(0, {"ack": [1]})]


# ------------------------------------------------------------------ many watchers in one process


@pytest.fixture
def crowd(meshes, monkeypatch):
    abandoned, made = [], []
    monkeypatch.setattr(
        abort_collectives, "abort_groups", lambda reason, files: abandoned.append(reason.rank)
    )

    def make(ranks, **options):
        watchers = []
        for mesh in meshes(ranks):
            if mesh.dump is not None:
                mesh.dump.close()
            mesh.dump = None
            settings = {
                "leaves_stalls": True,
                "warn": 100.0,
                "grace": 100.0,
                "launcher": graceful_shutdown.ShutdownListener(),
            }
            settings |= options
            watchers.append(MonitorThread(mesh, StallLimits(50.0, 50.0), **settings))
        made.extend(watchers)
        return watchers

    yield make
    for each in made:
        each.close()


def turn(watchers, times=1):
    for _ in range(times):
        for each in watchers:
            each._turn()


@pytest.mark.parametrize("ranks", [2, 5, 20])
def test_an_exception_reaches_everybody(crowd, ranks):
    watchers = crowd(ranks)
    watchers[1].publish(watchers[1].notice_of("raised", name="ValueError: no", text="its traceback"))
    deadline = time.monotonic() + 60
    while not all(each.decided.is_set() for each in watchers):
        turn(watchers)
        assert time.monotonic() < deadline
    for each in watchers:
        assert (each.error.rank, each.error.kind, each.error.host) == (1, "raised", "pc1")
        assert "raised ValueError: no" in str(each.error)
        assert "| its traceback" in str(each.error)


def test_rows_reach_everybody_where_they_are_passed_on(crowd):
    watchers = crowd(20)
    until(lambda: turn(watchers) or all(len(each._rows) == 20 for each in watchers), 60)
    assert all(seen.row is not None for seen in watchers[0].seen())


@pytest.fixture
def asking(crowd, tmp_path, monkeypatch):
    """A crowd of three, each with the file in which its launcher asks."""
    files = [tmp_path / f"leave{rank}" for rank in range(3)]
    launchers = []
    for file in files:
        monkeypatch.setenv(graceful_shutdown.VARIABLE, str(file))
        launchers.append(graceful_shutdown.ShutdownListener())
    watchers = crowd(3)
    for each, launcher in zip(watchers, launchers, strict=True):
        each._launcher = launcher
    turn(watchers, 3)
    return watchers, files


def test_who_is_asked_to_leave_for_a_newcomer_is_missed_by_nobody(asking):
    watchers, files = asking
    graceful_shutdown.request_shutdown(files[1], "changed")
    turn(watchers, 3)
    assert [graceful_shutdown.is_listening(file) for file in files] == [True, False, True]
    watchers[1].mesh.close()
    turn([watchers[0], watchers[2]], 20)
    assert not any(each.decided.is_set() for each in watchers)


def test_who_is_asked_to_leave_after_a_failure_names_it(asking):
    watchers, files = asking
    watchers[1].cards[2] = dataclasses.replace(watchers[1].cards[2], key="another host")
    watchers[1].mesh.links[2].state = "lost"
    watchers[1]._heard[2] -= 5.0  # of 50 that it may be silent
    turn([watchers[1]])
    assert watchers[1]._pending is None
    graceful_shutdown.request_shutdown(files[1], "failed")
    until(lambda: turn([watchers[0], watchers[1]]) or watchers[1].decided.is_set())
    assert watchers[1].error.rank == 2
    watchers[1].close()
    assert graceful_shutdown.is_listening(files[1]), "the launcher waits for its end"


def test_who_is_asked_to_leave_and_knows_nothing_goes(asking, monkeypatch):
    monkeypatch.setattr("paceline.health.monitor_thread._ASKED_SECONDS", 0.05)
    watchers, files = asking
    graceful_shutdown.request_shutdown(files[1], "failed")
    until(lambda: turn(watchers) or not graceful_shutdown.is_listening(files[1]))
    assert not any(each.decided.is_set() for each in watchers)


def test_a_launcher_asks_who_listens(tmp_path, monkeypatch):
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


def test_a_launcher_that_can_not_write_goes_on(tmp_path):
    graceful_shutdown.request_shutdown(tmp_path, "failed")  # a folder: there, but nothing to write to
    assert graceful_shutdown.is_listening(tmp_path)


def test_who_leaves_in_order_is_not_missed(crowd):
    watchers = crowd(3)
    turn(watchers, 3)
    watchers[1].publish(watchers[1].notice_of("done"))
    watchers[1].close()
    turn([watchers[0], watchers[2]], 20)
    assert not watchers[0].decided.is_set()


def test_an_end_without_a_word_is_named_and_told_by_all_alike(crowd):
    watchers = crowd(3)
    turn(watchers, 3)
    watchers[1].mesh.close()
    rest = [watchers[0], watchers[2]]
    until(lambda: turn(rest) or all(each.decided.is_set() for each in rest))
    assert {(each.error.kind, each.error.rank) for each in rest} == {("gone", 1)}


def test_nonsense_from_a_rank_ends_its_connection_only(crowd, caplog):
    watchers = crowd(2)
    turn(watchers, 2)
    watchers[1].mesh.send({"row": [1, 2, 3]})
    watchers[1].mesh.send({"note": {"kind": "raised"}})
    until(lambda: turn([watchers[0]]) or watchers[0].mesh.links[1].state == "none")
    assert "told what can't be" in caplog.text
    assert not watchers[0].decided.is_set()


def test_own_absence_is_not_held_against_others(crowd, monkeypatch):
    watchers = crowd(2)
    turn(watchers, 3)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 300)
    watchers[0]._turn()
    assert watchers[0].seen()[1].silent < 2
